"""The self-check on the real engine: passes what is right, and sees every way in which a reading can be wrong."""

import asyncio
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
import tiny_families

from worker import models
from worker.engine.engine import Engine
from worker.engine.judgement import BATCH, LOG_PROBABILITY, SAME_FORWARD, CheckError, Judgement
from worker.engine.self_check import check
from worker.engine.spec import EngineSpec, Strategy

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(600)]

T = TypeVar("T")


class Checked:
    """A serving engine whose self-check can be asked for again and again, with a fault planted in its capture."""

    def __init__(self, model: Path, directory: Path, strategy: Strategy = "hooks", **more: Any) -> None:
        self._loop = asyncio.new_event_loop()
        self.file = directory.parent / "planted"
        self.facts = models.facts(model)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TEST_PLANTED", str(self.file))
            spec = EngineSpec.of(self.facts, "cpu", strategy=strategy, **more)
            self.engine = Engine(spec, directory, prefill_timeout=60)
            self._run(self.engine.launch(timeout=240))

    def judge(self, fault: str = "") -> Judgement:
        """What the self-check says while this fault is planted. Raises `CheckError`."""
        self.file.write_text(fault)
        return self._run(check(self.engine, self.facts))

    def close(self) -> None:
        self._run(self.engine.stop())
        self._loop.close()

    def _run(self, step: Coroutine[Any, Any, T]) -> T:
        return self._loop.run_until_complete(step)


@pytest.fixture(scope="module")
def llama(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Checked]:
    checked = Checked(tiny_llama, tmp_path_factory.mktemp("checked") / "engine")
    yield checked
    checked.close()


def test_what_is_right_passes_with_its_figures(llama: Checked) -> None:
    judgement = llama.judge()
    assert (judgement.strategy, judgement.remarks) == ("hooks", ())
    assert judgement.figures["hooks"] <= SAME_FORWARD
    assert judgement.figures["collect"] <= SAME_FORWARD
    assert judgement.figures["norm"] < 0.01
    assert judgement.figures["log_probability"] < LOG_PROBABILITY / 3
    assert judgement.figures["batch"] < BATCH / 2


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("pre-norm for post-norm", "not taken after the norm"),
        ("rows swapped", "states belong to other rows"),
        ("stale buffer", r"final norm of boundary 8|read after its time|other rows"),
        ("not finite", "NaN or an infinity"),
        ("last layer missed", "no strategy reads"),
    ],
)
def test_a_reading_that_no_strategy_gets_right_is_refused(llama: Checked, fault: str, words: str) -> None:
    llama.judge()
    with pytest.raises(CheckError, match=words):
        llama.judge(fault)


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("off by one", "holds boundary k +1 in the place of boundary k"),
        ("residual left out", "leaves the residual out"),
    ],
)
def test_hooks_that_read_wrong_are_named_and_collect_takes_over(llama: Checked, fault: str, words: str) -> None:
    judgement = llama.judge(fault)
    assert judgement.strategy == "collect"
    (remark,) = judgement.remarks
    assert remark.startswith("hooks is wrong at")
    assert words in remark


def test_an_engine_that_only_collects_is_checked_too(tiny_llama: Path, tmp_path: Path) -> None:
    checked = Checked(tiny_llama, tmp_path / "engine", strategy="collect")
    try:
        judgement = checked.judge()
        assert judgement.strategy == "collect"
        assert judgement.figures["norm"] < 0.01
    finally:
        checked.close()


def test_a_head_agrees_with_the_engine_with_its_scale_and_gathered_from_two_ranks(tmp_path: Path) -> None:
    checked = Checked(tiny_families.make("granite"), tmp_path / "engine", tensor_parallel=2)
    try:
        judgement = checked.judge()
        assert judgement.strategy == "hooks"
        assert judgement.figures["log_probability"] < LOG_PROBABILITY / 3
        with pytest.raises(CheckError, match=r"other rows|rows are mixed up"):
            checked.judge("rows swapped")
    finally:
        checked.close()


def test_a_release_that_collects_gemma_3_without_the_residual_is_seen_and_hooks_are_used(tmp_path: Path) -> None:
    checked = Checked(tiny_families.make("gemma3"), tmp_path / "engine")
    try:
        judgement = checked.judge()
        assert judgement.strategy == "hooks"
        assert judgement.figures["hooks"] <= SAME_FORWARD
        assert judgement.figures["collect"] > 0.2
        (remark,) = judgement.remarks
        assert remark.startswith("collect is wrong at")
        assert "leaves the residual out" in remark
    finally:
        checked.close()


def test_a_family_whose_residual_means_something_else_is_refused(tmp_path: Path) -> None:
    checked = Checked(tiny_families.make("cohere"), tmp_path / "engine")
    try:
        with pytest.raises(CheckError, match="the final norm of boundary 6 is"):
            checked.judge()
    finally:
        checked.close()
