"""The watchdog of an engine that comes up: what a step that fails is called. The server is a process that waits."""

import asyncio
import itertools
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from layertap.schemas.incidents import IncidentKind
from worker.engine.client import EngineDownError
from worker.engine.engine import Engine
from worker.engine.judgement import CheckError
from worker.engine.spec import EngineSpec
from worker.watchdog import guard
from worker.watchdog.guard import Guard
from worker.watchdog.rules import Limits, Phase

SPEC = EngineSpec(
    model_path="model",
    dtype="BF16",
    device="cpu",
    engine_version="0.5.23",
    installer=None,
)


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    """An engine whose server is a process that does nothing."""
    found = Engine(SPEC, tmp_path, prefill_timeout=1)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, start_new_session=True) as server:
        found._process = server
        yield found
        server.kill()


def outcome(engine: Engine, dies: bool) -> IncidentKind | None:
    """What a check that gets no answer is called, on a server that dies of it or lives on."""

    async def unanswered() -> None:
        if dies:
            assert engine.pid is not None
            asyncio.get_running_loop().call_later(0.5, subprocess.run, ["kill", "-9", str(engine.pid)])
        try:
            raise EngineDownError("/generate: the connection broke")
        except EngineDownError as error:
            raise CheckError("no answer to the first row") from error

    async def watched() -> IncidentKind | None:
        watch = Guard(engine, Limits(), lambda: 0)
        watch.enter(Phase.SELF_CHECK)
        verdict = await watch.through(unanswered())
        return None if verdict is None else verdict.kind

    return asyncio.run(watched())


def test_a_check_that_fails_because_its_server_dies_is_a_death(engine: Engine) -> None:
    assert outcome(engine, dies=True) is IncidentKind.DIED_SERVING


def test_a_check_that_gets_no_answer_from_a_server_that_lives_has_failed(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guard, "_DYING_S", 0.1)
    assert outcome(engine, dies=False) is IncidentKind.FAILED_CHECK


def test_a_driver_that_hangs_hides_no_death(
    engine: Engine, gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guard, "_LOOK_S", 0.05)
    monkeypatch.setattr(guard, "gpu_use", lambda names: gate.wait(60))
    assert outcome(engine, dies=True) is IncidentKind.DIED_SERVING


@pytest.mark.parametrize("how", ["hangs", "fails"])
def test_a_look_that_finds_nothing_hides_no_death(
    engine: Engine, gate: threading.Event, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    def look(*args: object) -> list[object]:
        if how == "hangs":
            gate.wait(60)
        raise OSError("no")

    monkeypatch.setattr(guard, "_LOOK_S", 0.05)
    monkeypatch.setattr(guard, "engine_processes", look)
    assert outcome(engine, dies=True) is IncidentKind.DIED_SERVING


def test_a_log_that_cannot_be_rotated_ends_no_watch(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def full() -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(engine, "rotate_log", full)
    assert outcome(engine, dies=True) is IncidentKind.DIED_SERVING


def test_what_hangs_of_the_evidence_takes_none_of_the_rest_with_it(
    engine: Engine, gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, bound in (("processes_of", "_STACKS_S"), ("gpu_lines", "_LOOK_S")):
        monkeypatch.setattr(guard, bound, 0.5)
        monkeypatch.setattr(guard, name, lambda *args: gate.wait(60))
    engine.log_path.write_text("CUDA out of memory\n")
    evidence = asyncio.run(Guard(engine, Limits(), lambda: 0).evidence())
    assert (evidence.log_tail, evidence.processes, evidence.gpu) == ("CUDA out of memory", [], [])
    assert evidence.engine["model_path"] == "model"


def test_processes_that_cannot_be_read_do_not_make_an_engine_that_works_look_hung(
    engine: Engine, gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = itertools.count(1)
    monkeypatch.setattr(guard, "_LOOK_S", 0.01)
    monkeypatch.setattr(guard, "LOOK_EVERY_S", 0.01)
    monkeypatch.setattr(guard, "engine_processes", lambda *args: gate.wait(60))
    monkeypatch.setattr(guard, "port_open", lambda port: True)
    monkeypatch.setattr(guard, "_captured", lambda engine: next(tokens))

    async def watched() -> None:
        watch = Guard(engine, Limits(serving_quiet=0.3), lambda: 1)
        watch.enter(Phase.IDLE)
        async with asyncio.timeout(1.5):
            await watch.until_sick()

    with pytest.raises(TimeoutError):
        asyncio.run(watched())


def test_a_log_too_long_to_be_kept_on_a_full_disk_is_cut_short(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(source: Path, target: Path) -> None:
        target.write_bytes(b"some")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("worker.engine.engine._LOG_BYTES", 10)
    monkeypatch.setattr("shutil.copyfile", full)
    engine.log_path.write_bytes(b"words" * 10)
    engine.rotate_log()
    assert engine.log_bytes() == 0
    assert not engine.log_path.with_suffix(".log.1").exists()
