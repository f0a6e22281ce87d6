"""Evidence from real processes: complete where the kernel allows, bounded always, without secrets."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from layertap.schemas.incidents import Evidence, IncidentKind
from worker.engine import processes
from worker.engine.engine import Engine, end_marked
from worker.engine.spec import EngineSpec
from worker.patch.package import TARGET
from worker.patch.source import SourceInstaller
from worker.watchdog import evidence as evidence_module
from worker.watchdog.evidence import compose, patch_state, processes_of, redact, tail
from worker.watchdog.guard import Guard
from worker.watchdog.observe import engine_processes, look, port_open
from worker.watchdog.rules import Limits

STUBBORN = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if len(sys.argv) > 1:
    os.setsid()
def spinning_in_the_forward():
    print("ready", flush=True)
    while True:
        pass
spinning_in_the_forward()
"""


@pytest.fixture
def stubborn(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A marked process that spins and ignores SIGTERM."""
    env = os.environ | {"LAYERTAP_ENGINE_DIR": str(tmp_path)}
    with subprocess.Popen(
        [sys.executable, "-c", STUBBORN], env=env, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process
        process.kill()


def gathered(directory: Path, server: int, log: Path, signals: dict[str, str], engine: dict[str, str]) -> Evidence:
    processes = processes_of(directory, server)
    return compose(tail(log), processes, [], signals, engine)


def test_a_spinning_process_shows_where_it_spins(stubborn: "subprocess.Popen[str]", tmp_path: Path) -> None:
    log = tmp_path / "engine.log"
    log.write_text("\n".join(f"line {i}" for i in range(500)))
    evidence = gathered(tmp_path, stubborn.pid, log, {"phase": "launching"}, {"api_key": "api_key='abc'"})
    (found,) = evidence.processes
    assert found.pid == stubborn.pid
    assert "spinning_in_the_forward" in found.stack
    assert found.state == "R"
    assert found.rss_bytes > 1 << 20
    assert evidence.log_tail.splitlines()[0] == "line 300"
    assert evidence.log_tail.splitlines()[-1] == "line 499"
    assert "abc" not in str(evidence.engine)


def test_a_marked_process_is_ended_however_it_hides(stubborn: "subprocess.Popen[str]", tmp_path: Path) -> None:
    env = os.environ | {"LAYERTAP_ENGINE_DIR": str(tmp_path / "engine-3")}
    with subprocess.Popen(
        [sys.executable, "-c", STUBBORN, "own session"], env=env, stdout=subprocess.PIPE, text=True
    ) as escaped:
        assert escaped.stdout is not None
        escaped.stdout.readline()
        assert end_marked(tmp_path) == 2
        assert not processes.alive(escaped.pid)
        assert not processes.alive(stubborn.pid)
        escaped.wait(5)


def test_a_process_of_another_engine_is_left_alone(stubborn: "subprocess.Popen[str]", tmp_path: Path) -> None:
    assert end_marked(tmp_path.with_name(tmp_path.name + "-other")) == 0
    assert processes.alive(stubborn.pid)


def test_an_ended_process_is_not_seen(tmp_path: Path) -> None:
    with subprocess.Popen(["true"]) as process:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert look(process.pid) is None
        assert engine_processes(tmp_path, process.pid) == []


@pytest.mark.parametrize(
    "text",
    [
        "--api-key s3cret --port 1",
        "--api-key=s3cret",
        "api_key='s3cret'",
        "Authorization: Bearer s3cret",
        "HF_TOKEN=s3cret",
        "LAYERTAP_TOKEN=s3cret",
    ],
)
def test_secrets_are_taken_out(text: str) -> None:
    assert "s3cret" not in redact(f"before {text} after")
    assert redact(f"before {text} after").endswith("after")


def test_evidence_is_bounded_in_time_even_for_a_stopped_process(
    stubborn: "subprocess.Popen[str]", tmp_path: Path
) -> None:
    os.kill(stubborn.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, stubborn.pid, os.WSTOPPED | os.WNOWAIT)
    began = time.monotonic()
    evidence = gathered(tmp_path, stubborn.pid, tmp_path / "no.log", {}, {})
    assert time.monotonic() - began < 60
    assert evidence.processes[0].state in "Tt"
    assert evidence.log_tail == ""


def test_a_port_is_open_while_something_listens_on_it_however_busy() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        # Nobody ever accepts: a process that hangs looks like this, and is judged by other signals.
        assert port_open(port)
        assert port_open(port)
    assert not port_open(port)


def test_evidence_says_whether_the_installed_engine_is_as_released(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evidence_module, "find_package", lambda: package)
    installer = SourceInstaller(package, tmp_path / "patch")
    assert asyncio.run(patch_state(tmp_path / "patch")) == "pristine"
    installer.apply()
    assert asyncio.run(patch_state(tmp_path / "patch")) == "patched"
    installer.revert()
    (package / TARGET).write_text("# somebody else's\n")
    assert asyncio.run(patch_state(tmp_path / "patch")) == "foreign"


def test_evidence_does_without_the_patch_state_where_there_is_no_engine_to_look_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evidence_module, "find_package", lambda: tmp_path / "gone")
    assert asyncio.run(patch_state(None)).startswith("unknown: PatchError: ")


def test_evidence_does_without_the_patch_state_where_it_takes_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    goes_on = threading.Event()

    def find_package() -> Path:
        goes_on.wait(30)
        raise OSError

    monkeypatch.setattr(evidence_module, "find_package", find_package)
    monkeypatch.setattr(evidence_module, "_PATCH_SECONDS", 0.05)

    async def ask() -> str:
        try:
            return await patch_state(None)
        finally:
            goes_on.set()

    assert asyncio.run(ask()) == "unknown: not read within 0.05 s"


def test_a_guard_keeps_signals_and_patch_state_of_an_engine_that_never_started(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evidence_module, "find_package", lambda: package)
    spec = EngineSpec(
        model_path="/models/tiny",
        dtype="BF16",
        device="cpu",
        engine_version="9.8.7",
        installer=None,
        patch_dir=str(tmp_path / "patch"),
    )

    async def scenario() -> Evidence:
        engine = Engine(spec, tmp_path / "engine", 60)
        guard = Guard(engine, Limits(launch_total=0), lambda: 5, lambda: 2.5)
        try:
            verdict = await guard.until_sick()
            assert verdict.kind is IncidentKind.HUNG_LAUNCHING
            return await guard.evidence()
        finally:
            await engine.stop()

    kept = asyncio.run(scenario())
    assert kept.engine["patch_state"] == "pristine"
    assert kept.engine["model_path"] == "/models/tiny"
    assert kept.signals["oldest_request_s"] == "2.5"
    assert kept.signals["in_flight"] == "5"
    assert kept.signals["port_open"] == "no"
