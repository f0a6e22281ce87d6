"""A whole plan with a real tokenizer, in this process and in one of its own."""

import asyncio
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path
from typing import Any

import psutil
import pytest

from layertap.schemas.jobs import Final, LossMask, Overflow
from layertap.schemas.tasks import PlanSpec, TaskRowProblem
from layertap.schemas.workers import ModelFacts
from worker import models
from worker.plan import plan
from worker.plan.messages import PlanLine, PlanProgressLine, PlanRequest, PlanResultLine, RowErrorsLine
from worker.plan.plan import PlanError, PlanProgress, PlanResult, PlanStoppedError, make_plan
from worker.plan.process import plan_lines
from worker.plan.render import LoadedTokenizer
from worker.plan.tokens import INDEX, TokenRows

CHAT = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello 👋"}]}
UNANSWERED = {"messages": [{"role": "user", "content": "Hi"}]}


@pytest.fixture(scope="module")
def facts(smollm2: Path) -> ModelFacts:
    return models.facts(smollm2)


@pytest.fixture(scope="module")
def tokenizer(smollm2: Path) -> LoadedTokenizer:
    return LoadedTokenizer.load(smollm2)


def spec(**more: Any) -> PlanSpec:
    return PlanSpec(
        **{
            "dataset_file": "rows.jsonl",
            "tokens_dir": "tokens.g1",
            "max_tokens": None,
            "overflow": Overflow.TRUNCATE,
            "loss_mask": LossMask.ASSISTANT,
            "shard_bytes": 1 << 20,
            **more,
        }
    )


def write_rows(root: Path, lines: list[Any]) -> None:
    """Dicts as JSON, bytes as they are, one a line."""
    data = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines]
    (root / "rows.jsonl").write_bytes(b"\n".join(data))


class Planned:
    """What a plan in this process gave and reported."""

    def __init__(self, root: Path, facts: ModelFacts, tokenizer: LoadedTokenizer, spec: PlanSpec) -> None:
        self.errors: list[TaskRowProblem] = []
        self.progress: list[PlanProgress] = []
        self.result: PlanResult = make_plan(
            root / spec.dataset_file,
            root / spec.tokens_dir,
            spec,
            [2, 15, 27],
            Final.POST_NORM,
            facts,
            lambda: tokenizer,
            report_errors=self.errors.extend,
            report_progress=self.progress.append,
        )
        self.rows = TokenRows.open(root / spec.tokens_dir)

    @property
    def codes(self) -> dict[int, str]:
        return {error.row_id: error.code for error in self.errors}


def test_every_line_ends_as_a_row_or_as_a_row_error(
    tmp_path: Path, facts: ModelFacts, tokenizer: LoadedTokenizer
) -> None:
    lines = [
        CHAT,
        b"",
        UNANSWERED,
        {"text": "Once upon a time"},
        b"   \r",
        b"{broken",
        {"input_ids": [1, 2, 99_999]},
        {"input_ids": [5, 6, 7], "loss_mask": [0, 0, 1]},
        {"prompt": "a", "completion": ""},
        {"prompt": "2 + 2 =", "completion": " 4"},
        {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]},
    ]
    write_rows(tmp_path, lines)
    planned = Planned(tmp_path, facts, tokenizer, spec())
    assert planned.rows.row_ids.tolist() == [0, 3, 7, 9, 10]
    assert planned.codes == {2: "nothing_supervised", 6: "token_id_range", 8: "nothing_supervised"}
    assert planned.result.rows == sum(s.rows for s in planned.result.shards) == 5
    assert planned.result.tokens == int(planned.rows.lengths.sum())
    assert planned.result.row_errors == 3
    assert planned.rows.input_ids(2).tolist() == [5, 6, 7]
    assert tokenizer.decode(planned.rows.input_ids(0)[planned.rows.loss_mask(0) == 1].tolist()) == "Hello 👋<|im_end|>"
    assert planned.progress[-1] == PlanProgress(lines=11, rows=5, tokens=planned.result.tokens, row_errors=3)


def test_many_rows_keep_their_order_and_ids_over_batches_and_shards(
    tmp_path: Path, facts: ModelFacts, tokenizer: LoadedTokenizer
) -> None:
    lines = [{"text": f"row number {i} " + "x " * (i % 7)} if i % 5 else b"" for i in range(3000)]
    write_rows(tmp_path, lines)
    planned = Planned(tmp_path, facts, tokenizer, spec())
    assert planned.rows.row_ids.tolist() == [i for i in range(3000) if i % 5]
    for place in (0, 1234, 2399):
        row_id = int(planned.rows.row_ids[place])
        assert tokenizer.decode(planned.rows.input_ids(place).tolist()) == lines[row_id]["text"]
    shards = planned.result.shards
    assert len(shards) > 10
    assert all(s.bytes <= 1 << 20 for s in shards)
    assert [s.first_row for s in shards[1:]] == [s.first_row + s.rows for s in shards[:-1]]


def test_rows_are_cut_to_the_smaller_of_the_jobs_and_the_engines_limit(
    tmp_path: Path, facts: ModelFacts, tokenizer: LoadedTokenizer
) -> None:
    write_rows(tmp_path, [{"input_ids": [7] * 9000}])
    assert Planned(tmp_path, facts, tokenizer, spec(max_tokens=100)).rows.lengths.tolist() == [100]
    whole = Planned(tmp_path, facts, tokenizer, spec(max_tokens=9000, tokens_dir="tokens.g2"))
    assert whole.rows.lengths.tolist() == [8192 - 7]


def test_overflow_error_ends_the_plan_and_names_the_line(
    tmp_path: Path, facts: ModelFacts, tokenizer: LoadedTokenizer
) -> None:
    write_rows(tmp_path, [{"text": "short"}, {"text": "much too long " * 10}])
    assert Planned(tmp_path, facts, tokenizer, spec(max_tokens=5, overflow="skip")).codes == {1: "too_long"}
    with pytest.raises(PlanError, match="line 2: ") as caught:
        Planned(tmp_path, facts, tokenizer, spec(max_tokens=5, overflow="error", tokens_dir="tokens.g2"))
    assert (caught.value.code, caught.value.retryable) == ("row_too_long", False)


def test_loss_mask_all_supervises_every_token(tmp_path: Path, facts: ModelFacts, tokenizer: LoadedTokenizer) -> None:
    write_rows(tmp_path, [CHAT, UNANSWERED, {"input_ids": [1, 2], "loss_mask": [0, 0]}])
    planned = Planned(tmp_path, facts, tokenizer, spec(loss_mask="all"))
    assert planned.rows.row_ids.tolist() == [0, 1, 2]
    assert planned.rows.all_loss_mask.all()


def test_a_row_that_breaks_the_tokenizer_costs_no_other_row(
    tmp_path: Path, facts: ModelFacts, smollm2: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = LoadedTokenizer.load(smollm2)
    encode = tokenizer.encode

    def fragile(rendered: Any) -> Any:
        if any("poison" in r.text for r in rendered):
            raise RuntimeError("no such byte")
        return encode(rendered)

    monkeypatch.setattr(tokenizer, "encode", fragile)
    write_rows(tmp_path, [{"text": "good"}, {"text": "poison"}, {"text": "good too"}])
    planned = Planned(tmp_path, facts, tokenizer, spec())
    assert planned.rows.row_ids.tolist() == [0, 2]
    assert planned.codes == {1: "tokenizer_error"}


def no_tokenizer(folder: Path, facts: ModelFacts, rows: list[Any]) -> PlanRequest:
    """A plan of `rows` for a model folder with config and weights only."""
    model = folder / "model"
    model.mkdir()
    for name in ("config.json", "model.safetensors"):
        (model / name).symlink_to(Path(facts.path) / name)
    write_rows(folder, rows)
    return request(folder, models.facts(model))


def test_token_ids_are_planned_without_a_tokenizer(tmp_path: Path, facts: ModelFacts) -> None:
    wanted = no_tokenizer(tmp_path, facts, [{"input_ids": [5, 6, 7]}, b"", b"{broken", {"input_ids": [1, 99_999]}])
    assert wanted.model.pins.tokenizer_hash == hashlib.sha256().hexdigest()
    assert wanted.model.pins.chat_template_hash is None
    *middle, last = collect(wanted)
    assert isinstance(last, PlanResultLine)
    assert (last.rows, last.tokens, last.row_errors) == (1, 3, 1)
    assert [e.code for line in middle if isinstance(line, RowErrorsLine) for e in line.errors] == ["token_id_range"]
    assert TokenRows.open(tmp_path / "tokens.g1").input_ids(0).tolist() == [5, 6, 7]


def test_the_first_other_row_ends_a_plan_without_a_tokenizer(tmp_path: Path, facts: ModelFacts) -> None:
    wanted = no_tokenizer(tmp_path, facts, [{"input_ids": [5, 6, 7]}, {"text": "one"}])
    with pytest.raises(PlanError, match=r"(?s)does not load.*send input_ids rows") as caught:
        collect(wanted)
    assert (caught.value.code, caught.value.retryable) == ("tokenizer_unusable", False)
    assert not (tmp_path / "tokens.g1" / INDEX).exists()


def test_the_tokenizer_is_loaded_once(tmp_path: Path, facts: ModelFacts, tokenizer: LoadedTokenizer) -> None:
    write_rows(tmp_path, [{"input_ids": [1]}, *[{"text": "one"}] * 3000])
    loads = []

    def load() -> LoadedTokenizer:
        loads.append(1)
        return tokenizer

    paths = (tmp_path / "rows.jsonl", tmp_path / "tokens.g1")
    make_plan(*paths, spec(), [2], Final.NONE, facts, load, report_errors=lambda errors: None)
    assert loads == [1]


@pytest.mark.parametrize("end", [b"", b"\n"], ids=repr)
def test_a_line_is_as_long_as_at_upload_or_passed_over(
    tmp_path: Path, facts: ModelFacts, tokenizer: LoadedTokenizer, monkeypatch: pytest.MonkeyPatch, end: bytes
) -> None:
    monkeypatch.setattr(plan, "MAX_LINE_BYTES", 100)
    fits = b'{"input_ids": [1]}'.ljust(100)
    too_long = fits + b" "
    (tmp_path / "rows.jsonl").write_bytes(b"\n".join([fits, too_long, b"", too_long * 50, fits, too_long, fits]) + end)
    planned = Planned(tmp_path, facts, tokenizer, spec())
    assert planned.rows.row_ids.tolist() == [0, 4, 6]
    assert planned.errors == []
    assert planned.progress[-1].lines == 7


def test_a_line_that_is_too_long_is_never_held(
    tmp_path: Path, facts: ModelFacts, tokenizer: LoadedTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "MAX_LINE_BYTES", 1000)
    write_rows(tmp_path, [{"input_ids": [1]}, b" " * (32 << 20), {"input_ids": [2]}])
    tracemalloc.start()
    try:
        planned = Planned(tmp_path, facts, tokenizer, spec())
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert planned.rows.row_ids.tolist() == [0, 2]
    assert peak < 8 << 20


def test_a_stopped_plan_leaves_nothing_readable(tmp_path: Path, facts: ModelFacts, tokenizer: LoadedTokenizer) -> None:
    write_rows(tmp_path, [CHAT])
    with pytest.raises(PlanStoppedError):
        make_plan(
            *(tmp_path / "rows.jsonl", tmp_path / "tokens.g1", spec(), [2], Final.NONE, facts, lambda: tokenizer),
            report_errors=lambda errors: None,
            should_stop=lambda: True,
        )
    assert not (tmp_path / "tokens.g1" / INDEX).exists()


def request(root: Path, facts: ModelFacts, **more: Any) -> PlanRequest:
    return PlanRequest(storage=root, spec=spec(**more), layers=[2, 15, 27], final=Final.POST_NORM, model=facts)


def collect(wanted: PlanRequest, quiet_seconds: float = 60) -> list[PlanLine]:
    async def lines() -> list[PlanLine]:
        return [line async for line in plan_lines(wanted, quiet_seconds)]

    return asyncio.run(lines())


def test_the_plan_process_reports_progress_errors_and_the_result(tmp_path: Path, facts: ModelFacts) -> None:
    write_rows(tmp_path, [CHAT, UNANSWERED, CHAT])
    first, *middle, last = collect(request(tmp_path, facts))
    assert first == PlanProgressLine(phase="loading")
    assert [e.row_id for line in middle if isinstance(line, RowErrorsLine) for e in line.errors] == [1]
    assert isinstance(last, PlanResultLine)
    assert (last.rows, last.row_errors, sum(s.rows for s in last.shards)) == (2, 1, 2)
    assert TokenRows.open(tmp_path / "tokens.g1").row_ids.tolist() == [0, 2]


def test_the_plan_process_says_why_it_failed(tmp_path: Path, facts: ModelFacts) -> None:
    with pytest.raises(PlanError, match=r"rows\.jsonl") as caught:
        collect(request(tmp_path, facts))
    assert (caught.value.code, caught.value.retryable) == ("storage_error", True)


def test_a_plan_process_that_falls_silent_is_ended(tmp_path: Path, facts: ModelFacts) -> None:
    os.mkfifo(tmp_path / "rows.jsonl")  # opening it waits for a writer that never comes
    with pytest.raises(PlanError, match="no sign of progress") as caught:
        collect(request(tmp_path, facts), quiet_seconds=1)
    assert caught.value.code == "plan_stuck"
    assert not [child for child in psutil.Process().children() if "worker.plan" in child.cmdline()]


def test_the_plan_process_dies_with_its_parent(tmp_path: Path, facts: ModelFacts) -> None:
    os.mkfifo(tmp_path / "rows.jsonl")
    (tmp_path / "request").write_text(request(tmp_path, facts).model_dump_json())
    script = (
        "import subprocess, sys; p = subprocess.Popen([sys.executable, '-m', 'worker.plan'], stdin=open(sys.argv[1]),"
        " stdout=subprocess.PIPE); p.stdout.readline(); print(p.pid, flush=True); p.wait()"
    )
    parent = subprocess.Popen([sys.executable, "-c", script, str(tmp_path / "request")], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    with parent.stdout:
        child = psutil.Process(int(parent.stdout.readline()))
        parent.send_signal(signal.SIGKILL)
        parent.wait(10)
    deadline = time.monotonic() + 10
    while child.is_running() and child.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, "the plan process outlived its parent"
        time.sleep(0.02)
