"""The service against its own description: whatever a client sends, the answer is one that the description allows."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import schemathesis
import yaml
from fixtures_service import Rig, open_rig, settings_for
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode
from schemathesis.checks import CHECKS

SEMANTIC = {"create_job", "upload_dataset", "commit_plan", "commit_shard", "register_worker"}
"""Operations that may refuse a body that fits its schema: an unknown model, a plan that does not add up."""


@schemathesis.serializer("application/jsonl")
def send_as_it_is(context: Any, value: Any) -> Any:
    """A data set's body is bytes."""
    return value if isinstance(value, bytes) else str(value).encode()


@pytest.fixture(scope="module")
def fuzzed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    """A service with a data set, a worker, and a job to be found."""
    folder = tmp_path_factory.mktemp("fuzzed")
    url = f"sqlite:///{folder}/layertap.sqlite3"
    with open_rig(settings_for(url, Path(folder), allowed_hosts="testserver"), None) as rig:
        rig.register()
        for _ in range(100):  # more than the deletes that will be tried
            rig.job()
        yield rig


@pytest.fixture(scope="module")
def description(fuzzed: Rig) -> Any:
    """The description that the service gives of itself."""
    return schemathesis.openapi.from_asgi("/openapi.json", fuzzed.client.app)  # type: ignore[union-attr]


OPERATIONS = [
    (path, method)
    for path, item in yaml.safe_load((Path(__file__).parents[2] / "openapi.yaml").read_text())["paths"].items()
    for method in item
    if not path.endswith("/events")
]


@pytest.mark.parametrize("mode", list(GenerationMode))
@pytest.mark.parametrize(("path", "method"), OPERATIONS)
def test_every_answer_is_one_that_the_description_allows(
    fuzzed: Rig, description: Any, path: str, method: str, mode: GenerationMode
) -> None:
    operation = description[path][method]
    excluded = []
    if operation.definition.raw["operationId"] in SEMANTIC:
        excluded = CHECKS.get_by_names(["positive_data_acceptance"])

    @seed(2)
    @settings(max_examples=15, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(case=operation.as_strategy(generation_mode=mode), real=st.booleans())
    def answers(case: schemathesis.Case, real: bool) -> None:
        if real and "job" in case.path_parameters and mode is GenerationMode.POSITIVE:
            case.path_parameters["job"] = fuzzed.client.get("/v1/jobs").json()["data"][0]["id"]
        case.call_and_validate(excluded_checks=excluded)

    try:
        answers()
    except Unsatisfiable:
        # An operation without parameters or body can't be called wrongly.
        assert mode is GenerationMode.NEGATIVE
        assert not operation.body
