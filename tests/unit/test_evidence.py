"""Evidence from real processes: complete where the kernel allows, bounded always, without secrets."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from worker.engine import processes
from worker.engine.engine import end_marked
from worker.watchdog.evidence import gather, redact
from worker.watchdog.observe import engine_processes, look

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


def test_a_spinning_process_shows_where_it_spins(stubborn: "subprocess.Popen[str]", tmp_path: Path) -> None:
    log = tmp_path / "engine.log"
    log.write_text("\n".join(f"line {i}" for i in range(500)))
    evidence = gather(tmp_path, stubborn.pid, log, {"phase": "launching"}, {"api_key": "api_key='abc'"})
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
    evidence = gather(tmp_path, stubborn.pid, tmp_path / "no.log", {}, {})
    assert time.monotonic() - began < 60
    assert evidence.processes[0].state in "Tt"
    assert evidence.log_tail == ""
