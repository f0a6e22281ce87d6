"""The committed API description is the one the service gives."""

from pathlib import Path
from typing import Any

import yaml

from service.openapi import render

FILE = Path(__file__).parents[2] / "openapi.yaml"


def operations() -> list[tuple[str, str, dict[str, Any]]]:
    """Every operation as (method, path, operation)."""
    paths = yaml.safe_load(FILE.read_text())["paths"]
    return [(method, path, operation) for path, item in paths.items() for method, operation in item.items()]


def test_the_committed_description_is_not_stale() -> None:
    assert FILE.read_text() == render(), "run: python -m service.openapi > openapi.yaml"


def test_every_operation_says_what_it_does_and_how_it_fails() -> None:
    names = [operation["operationId"] for _, _, operation in operations()]
    assert len(names) == len(set(names))
    for method, path, operation in operations():
        assert operation["summary"], (method, path)
        assert operation["tags"], (method, path)
        assert operation["responses"]["default"] == {"$ref": "#/components/responses/Problem"}
        if path.startswith("/v1/") and "requestBody" in operation:
            (content,) = operation["requestBody"]["content"].values()
            assert content["example"], (method, path)
