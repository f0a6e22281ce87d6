"""What ranks report: whole or not at all, and never a reason for the worker to fall over."""

import asyncio
from pathlib import Path

import pytest

from worker.capture.report import (
    Attached,
    attached_dir,
    read_reports,
    take_log_probabilities,
    write_log_probabilities,
    write_report,
)
from worker.engine.engine import Engine, EngineLaunchError
from worker.engine.spec import EngineSpec

SPEC = EngineSpec("/models/m", "BF16", "cpu", "0.5.23", installer=None)


def _report(rank: int) -> Attached:
    return Attached(1, rank, 2, "LlamaForCausalLM", 8, 128, "BF16", "hooks", True, "plugin")


def test_reports_are_read_back_by_rank(tmp_path: Path) -> None:
    attached_dir(tmp_path).mkdir()
    for rank in (1, 0):
        write_report(tmp_path, _report(rank))
    assert read_reports(tmp_path) == [_report(0), _report(1)]


@pytest.mark.parametrize("text", ["{", "{}", '{"pid": 1, "of": "another release"}', "[]"])
def test_a_report_of_another_release_is_a_launch_that_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    engine = Engine(SPEC, tmp_path, prefill_timeout=1)

    async def serving() -> bool:
        return True

    monkeypatch.setattr(engine.client, "serving", serving)
    attached_dir(tmp_path).mkdir()
    (attached_dir(tmp_path) / "rank0.json").write_text(text)
    with pytest.raises(EngineLaunchError, match="another release"):
        asyncio.run(engine.until_serving())


def test_what_the_head_says_is_taken_once(tmp_path: Path) -> None:
    write_log_probabilities(tmp_path, "probe_1.1", 2, [-1.5, -2.5])
    assert take_log_probabilities(tmp_path, "probe_1.1", 2) == [-1.5, -2.5]
    with pytest.raises(FileNotFoundError):
        take_log_probabilities(tmp_path, "probe_1.1", 2)
