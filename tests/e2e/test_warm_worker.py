"""A healthy chain as users see it: layers change without a restart, bad rows are listed, bad requests explained."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import reference
from fixtures_stack import PATIENCE, Stack
from prometheus_client.parser import text_string_to_metric_families
from typer.testing import CliRunner

from layertap.cli import app
from layertap.errors import ApiError
from layertap.schemas.datasets import Stage
from layertap.schemas.figures import Figures, WorkerFigures
from layertap.schemas.jobs import JobState

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1800)]

MODEL = "tiny-llama"
GOOD = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]}


def test_a_change_of_layers_or_final_restarts_no_engine(warm_stack: Stack, tiny_llama: Path) -> None:
    (worker,) = warm_stack.workers
    rows = [GOOD, {"text": "The sea was calm that evening, and nobody spoke."}]
    warm_stack.extract(rows, MODEL, [1])
    engine, launches = worker.engine_pids(), len(worker.engine_logs())
    assert engine
    for layers, final in (([8], "post_norm"), ([0, 2, 5], "none"), (range(9), "none"), ([3], "post_norm")):
        for row in warm_stack.extract(rows, MODEL, layers, final=final):
            right = reference.states(tiny_llama, row.input_ids.tolist(), layers)
            assert row.hidden_states.shape == (len(row.input_ids), len(layers), 128)
            for k in layers:
                assert reference.relative_error(row.boundary(k), right.boundaries[k]) < 0.02
            assert (row.final_hidden_state is None) == (final == "none")
            if row.final_hidden_state is not None:
                assert reference.relative_error(row.final_hidden_state, right.final) < 0.02
    assert worker.engine_pids() == engine
    assert len(worker.engine_logs()) == launches


def long_conversation(words: int) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "Count."}, {"role": "assistant", "content": "one two " * words}]}


def test_rows_that_fail_are_listed_with_their_lines_and_every_good_row_is_there(
    warm_stack: Stack, tiny_llama: Path
) -> None:
    rows: list[Any] = [
        GOOD,
        "no json at all",
        long_conversation(400),
        {"messages": [{"role": "user", "content": "And you?"}]},
        "",
        {"input_ids": [5, 6, 7], "loss_mask": [0, 0, 0]},
        {"input_ids": [5, 49152]},
        {"messages": [{"role": "narrator", "content": "Once"}]},
        {"text": "plain"},
        {"input_ids": list(range(3, 103))},
        {"input_ids": list(range(3, 104))},
    ]
    job = warm_stack.succeeded(warm_stack.submit(rows, MODEL, [4], max_tokens=100, overflow="skip"))
    problems = {p.row_id: p for p in warm_stack.client.errors(job.id)}
    assert {row_id: (p.line, p.stage) for row_id, p in problems.items()} == {
        1: (2, Stage.UPLOAD),
        2: (3, Stage.PLAN),
        3: (4, Stage.PLAN),
        5: (6, Stage.PLAN),
        6: (7, Stage.PLAN),
        7: (8, Stage.UPLOAD),
        10: (11, Stage.PLAN),
    }
    assert {row_id: p.code for row_id, p in problems.items()} == {
        1: "invalid_json",
        2: "too_long",
        3: "nothing_supervised",
        5: "nothing_supervised",
        6: "token_id_range",
        7: "wrong_role",
        10: "too_long",
    }
    assert all(p.reason for p in problems.values())
    pulled = warm_stack.pull(job)
    assert pulled.row_ids.tolist() == [0, 8, 9]
    assert (pulled.manifest.rows, pulled.manifest.row_errors) == (3, 7)
    assert (job.progress.rows_done, job.progress.row_errors) == (3, 7)
    for row in pulled:
        right = reference.states(tiny_llama, row.input_ids.tolist(), [4])
        assert reference.relative_error(row.boundary(4), right.boundaries[4]) < 0.02


def test_truncated_rows_are_the_first_tokens_of_the_whole_row(warm_stack: Stack, tiny_llama: Path) -> None:
    rows: list[Any] = [GOOD, long_conversation(400), {"input_ids": list(range(3, 203))}]
    whole = warm_stack.extract(rows, MODEL, [4])
    cut = warm_stack.extract(rows, MODEL, [4], max_tokens=100, overflow="truncate")
    assert cut.row_ids.tolist() == [0, 1, 2]
    assert [len(row.input_ids) for row in cut] == [len(whole[0].input_ids), 100, 100]
    for long, short in zip(whole, cut, strict=True):
        assert short.input_ids.tolist() == long.input_ids.tolist()[:100]
        assert short.loss_mask.tolist() == long.loss_mask.tolist()[:100]
        right = reference.states(tiny_llama, short.input_ids.tolist(), [4])
        assert reference.relative_error(short.boundary(4), right.boundaries[4]) < 0.02


def test_the_longest_row_that_the_model_takes_is_extracted_and_a_longer_one_listed(
    warm_stack: Stack, tiny_llama: Path
) -> None:
    longest = next(model.max_row_tokens for model in warm_stack.client.models())
    random = np.random.default_rng(4)
    rows = [{"input_ids": random.integers(3, 49152, n).tolist()} for n in (longest, longest + 1, 3)]
    job = warm_stack.succeeded(warm_stack.submit(rows, MODEL, [0, 8], overflow="skip"))
    assert [(p.row_id, p.code) for p in warm_stack.client.errors(job.id)] == [(1, "too_long")]
    pulled = warm_stack.pull(job)
    assert [len(row.input_ids) for row in pulled] == [longest, 3]
    right = reference.states(tiny_llama, pulled[0].input_ids.tolist(), [8])
    assert reference.relative_error(pulled[0].boundary(8), right.boundaries[8]) < 0.02


def test_overflow_error_ends_the_job_and_names_the_line(warm_stack: Stack) -> None:
    job = warm_stack.submit([GOOD, long_conversation(400)], MODEL, [4], max_tokens=100, overflow="error")
    ended = warm_stack.client.wait(job.id, PATIENCE)
    assert ended.state is JobState.FAILED
    assert ended.failure is not None
    assert ended.failure.code == "row_too_long"
    assert "line 2" in ended.failure.reason
    assert "raise max_tokens, or set overflow" in ended.failure.reason


def test_a_conversation_that_the_template_refuses_or_rewrites_is_a_row_error(warm_stack: Stack) -> None:
    thinking = {"role": "assistant", "content": "<think>Well.</think>Yes."}
    ask = {"role": "user", "content": "Is it?"}
    rows: list[Any] = [
        {"messages": [{"role": "system", "content": "Be brief."}, *GOOD["messages"]]},
        {"messages": [ask, thinking, ask, {"role": "assistant", "content": "It is."}]},
        {"messages": [ask, thinking]},
    ]
    job = warm_stack.succeeded(warm_stack.submit(rows, MODEL, [2]))
    problems = list(warm_stack.client.errors(job.id))
    assert [(p.line, p.code) for p in problems] == [(1, "template_error"), (2, "template_rewrites_turns")]
    assert "no system turns" in problems[0].reason
    assert "messages[1]" in problems[1].reason
    assert warm_stack.pull(job).row_ids.tolist() == [2]
    everything = warm_stack.extract(rows, MODEL, [2], loss_mask="all")
    assert everything.row_ids.tolist() == [1, 2]


def samples(http: httpx.Client) -> dict[tuple[str, str], float]:
    """The metrics with one label at the most, by name and label."""
    families = text_string_to_metric_families(http.get("/metrics").text)
    return {
        (sample.name, next(iter(sample.labels.values()), "")): sample.value
        for family in families
        for sample in family.samples
        if len(sample.labels) < 2
    }


def test_a_job_says_how_fast_it_goes_while_it_runs_and_so_do_its_worker_and_the_metrics(
    warm_stack: Stack, http: httpx.Client
) -> None:
    (worker,) = warm_stack.workers
    random = np.random.default_rng(7)
    rows = [{"input_ids": random.integers(3, 49152, 2000).tolist()} for _ in range(60)]
    job = warm_stack.submit(rows, MODEL, [8])
    seen: list[Figures] = []
    told: list[WorkerFigures] = []
    scraped: dict[tuple[str, str], float] = {}
    for current in warm_stack.client.follow(job.id, PATIENCE):
        if (now := current.progress.now) is None or not now.tokens_per_second:
            continue
        seen.append(now)
        told += [listed.figures for listed in warm_stack.client.workers() if listed.figures is not None]
        scraped |= samples(http)
    done = warm_stack.succeeded(job)
    assert done.progress.now is None
    mean = done.progress.tokens_per_second
    assert mean is not None
    assert seen
    # A row of 2,000 tokens takes two boundaries of 128 in bf16, its ids and its mask.
    for now in seen:
        assert now.bytes_per_second == pytest.approx(now.tokens_per_second * (2 * 128 * 2 + 9), rel=0.05)
    assert max(now.tokens_per_second for now in seen) > mean / 3
    assert any(now.plain_share for now in seen)
    busy = max(told, key=lambda figures: figures.tokens_per_second)
    assert busy.tokens_per_second > mean / 3
    assert busy.bytes_per_second > 2 * 128 * 2 * mean / 3
    made_by = warm_stack.client.manifest(job.id).engine
    assert busy.plain_tokens_per_second == made_by["plain_tokens_per_s"]
    assert made_by["self_check"]["strategy"] == "hooks"
    assert made_by["self_check"]["figures"].keys() == {"hooks", "collect", "norm", "log_probability", "batch"}
    assert max(made_by["self_check"]["figures"].values()) < 0.1
    assert busy.tokens_per_second_mean
    assert busy.writer_busy is not None
    assert (busy.writer_wait, busy.pool_fill, busy.gpu_use) == (pytest.approx(0, abs=0.05), None, None)
    assert scraped["layertap_job_tokens_per_second", job.id] > 0
    assert scraped["layertap_job_done_tokens", job.id] > 0
    for name in ("tokens_per_second", "bytes_per_second", "plain_tokens_per_second", "plain_ratio"):
        assert scraped[f"layertap_worker_{name}", worker.id] > 0, name


def test_a_job_all_of_whose_rows_fail_says_so_and_lists_them(warm_stack: Stack) -> None:
    job = warm_stack.submit([{"input_ids": [10**6]}], MODEL, [2])
    ended = warm_stack.client.wait(job.id, PATIENCE)
    assert ended.state is JobState.FAILED
    assert ended.failure is not None
    assert ended.failure.code == "no_rows"
    assert [(p.line, p.code) for p in warm_stack.client.errors(job.id)] == [(1, "token_id_range")]
    manifest = warm_stack.client.manifest(job.id)
    assert (manifest.complete, manifest.rows, manifest.row_errors, manifest.shards) == (False, 0, 1, [])


@pytest.fixture
def http(warm_stack: Stack) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=warm_stack.url, timeout=30, trust_env=False) as client:
        yield client


@pytest.fixture
def dataset(warm_stack: Stack) -> str:
    return warm_stack.client.upload_dataset(warm_stack.write_rows([GOOD])).id


BAD_JOBS = [
    ({"model": "gpt-unknown"}, "model", "unknown_model", "tiny-llama"),
    ({"model": "/etc"}, "model", "model_not_allowed", "tiny-llama"),
    ({"model": "../.."}, "model", "model_not_allowed", "tiny-llama"),
    ({"layers": [3, 9]}, "layers", "invalid_layers", "0 to 8"),
    ({"layers": [3, 3]}, "layers", "invalid_layers", "each once"),
    ({"layers": [-1]}, "layers", "invalid_layers", "0 to 8"),
    ({"layers": []}, "layers", None, None),
    ({"layers": None}, "layers", None, None),
    ({"preset": "eagle3"}, "layers", None, None),
    ({"preset": "eagle9", "layers": None}, "preset", None, None),
    ({"max_tokens": 4090}, "max_tokens", "max_tokens_too_large", "at most 4089"),
    ({"max_tokens": 10**18}, "max_tokens", None, None),
    ({"max_tokens": 0}, "max_tokens", None, None),
    ({"max_tokens": "many"}, "max_tokens", None, None),
    ({"shard_bytes": 1}, "shard_bytes", None, None),
    ({"overflow": "explode"}, "overflow", None, None),
    ({"dataset": "ds_unknown"}, "dataset", "unknown_dataset", "POST /v1/datasets"),
    ({"layer": [1]}, "layer", None, None),
]


@pytest.mark.parametrize(("change", "field", "code", "remedy"), BAD_JOBS, ids=[json.dumps(c[0]) for c in BAD_JOBS])
def test_a_bad_job_is_a_problem_that_names_field_and_remedy(
    http: httpx.Client, dataset: str, change: dict[str, Any], field: str, code: str | None, remedy: str | None
) -> None:
    body = {"dataset": dataset, "model": MODEL, "layers": [1], **change}
    answer = http.post("/v1/jobs", json={name: value for name, value in body.items() if value is not None})
    assert answer.status_code == 422
    assert answer.headers["content-type"] == "application/problem+json"
    problem = answer.json()
    (error,) = problem["errors"]
    assert error["field"].split(".")[0] == field
    assert error["reason"]
    assert error["remedy"]
    if code is not None:
        assert problem["code"] == code
    if remedy is not None:
        assert remedy in error["remedy"]


@pytest.mark.parametrize(
    ("content", "code"),
    [(b"", "empty_dataset"), (b"\n\n  \n", "empty_dataset"), (b"{broken\n[1]\n", "empty_dataset")],
    ids=["empty", "blank", "no good line"],
)
def test_a_data_set_without_a_usable_row_is_refused(http: httpx.Client, content: bytes, code: str) -> None:
    answer = http.post("/v1/datasets", params={"name": "bad"}, content=content)
    assert answer.status_code == 422
    problem = answer.json()
    assert problem["errors"][0]["remedy"]
    assert problem["code"] == code


def test_broken_json_as_a_job_is_a_problem(http: httpx.Client) -> None:
    answer = http.post("/v1/jobs", content=b'{"dataset": ', headers={"content-type": "application/json"})
    assert answer.status_code == 422
    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.json()["errors"][0]["remedy"]


BAD_COMMANDS = [
    (["--model", "gpt-unknown", "--layers", "1"], ["model", "gpt-unknown", "tiny-llama"]),
    (["--model", "/etc", "--layers", "1"], ["model", "/etc", "tiny-llama"]),
    (["--model", MODEL, "--layers", "9"], ["layers", "9", "0 to 8"]),
    (["--model", MODEL, "--layers", "2,2"], ["layers", "each once"]),
    (["--model", MODEL, "--layers", "-1"], ["layers", "0 to 8"]),
    (["--model", MODEL, "--layers", "one"], ["--layers", "3,31,59"]),
    (["--model", MODEL], ["--layers", "--preset"]),
    (["--model", MODEL, "--layers", "1", "--max-tokens", "99999999"], ["max_tokens"]),
]


@pytest.mark.parametrize(("words", "said"), BAD_COMMANDS, ids=[" ".join(c[0]) for c in BAD_COMMANDS])
def test_the_command_line_explains_a_bad_job(
    warm_stack: Stack, monkeypatch: pytest.MonkeyPatch, words: list[str], said: list[str]
) -> None:
    monkeypatch.setenv("LAYERTAP_URL", warm_stack.url)
    result = CliRunner().invoke(app, ["submit", str(warm_stack.write_rows([GOOD])), *words])
    assert result.exit_code == 2, result.output
    for word in said:
        assert word in result.stderr


def test_the_client_raises_the_problem(warm_stack: Stack, dataset: str) -> None:
    with pytest.raises(ApiError) as refused:
        warm_stack.client.create_job(dataset, "../../etc", [1])
    assert refused.value.code == "model_not_allowed"
    assert refused.value.errors[0].field == "model"
