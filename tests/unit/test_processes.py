"""Processes of an engine, real ones: ended wherever they went, and reaped by the worker that adopted them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from worker.engine.processes import of_session, reap

WORKER = """
import json, os, subprocess, sys, time
from pathlib import Path
from layertap.children import adopt_orphans, children_of
from worker.engine.engine import MARK, end_marked
from worker.engine.processes import alive

folder = Path(sys.argv[1])
adopt_orphans()
own = subprocess.Popen([sys.executable, "-c", "raise SystemExit(7)"], start_new_session=True)
server = subprocess.Popen(
    [sys.executable, "-c", sys.argv[2], str(folder)], env={**os.environ, MARK: str(folder)}, start_new_session=True
)
while len(list(folder.glob("*.pid"))) < 4:
    time.sleep(0.02)
pids = {path.stem: int(path.read_text()) for path in folder.glob("*.pid")}
server.kill()
server.wait()
while not set(pids.values()) <= children_of(os.getpid()) or alive(pids["brief"]):
    time.sleep(0.02)
adopted = sorted(name for name, pid in pids.items() if pid in children_of(os.getpid()))
ended = end_marked(folder, session=server.pid)
print(json.dumps({
    "adopted": adopted,
    "ended": ended,
    "left": sorted(name for name, pid in pids.items() if Path(f"/proc/{pid}").exists()),
    "unreaped": sorted(children_of(os.getpid()) - {own.pid}),
    "own": own.wait(),
}))
"""
"""A worker: it has a child of its own that ended, unreaped as yet, and an engine's server whose children outlive it."""

SERVER = """
import os, signal, subprocess, sys, time
from pathlib import Path

STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
folder, bare = Path(sys.argv[1]), {"PATH": os.environ["PATH"]}

def start(name, code, **how):
    (folder / f"{name}.partial").write_text(str(subprocess.Popen([sys.executable, "-c", code], **how).pid))
    os.rename(folder / f"{name}.partial", folder / f"{name}.pid")

start("scheduler", STUBBORN)
start("runaway", STUBBORN, start_new_session=True)
start("unmarked", STUBBORN, env=bare, process_group=0)
start("brief", "pass")
time.sleep(600)
"""
"""Its children: in its own session; in another; without the mark, in another group; one that dies before the end."""


def test_what_outlives_its_engine_is_ended_and_reaped_by_the_worker_and_no_other_exit_code_is_taken(
    tmp_path: Path,
) -> None:
    words = [sys.executable, "-c", WORKER, str(tmp_path), SERVER]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["adopted"] == ["brief", "runaway", "scheduler", "unmarked"]
    assert found["ended"] == 4
    assert found["left"] == found["unreaped"] == []
    assert found["own"] == 7


def test_a_session_holds_its_leader_and_whoever_stayed_in_it() -> None:
    code = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'print(flush=True); input()'])"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    ) as leader:
        assert leader.stdout is not None
        leader.stdout.readline()
        members = of_session(leader.pid)
        assert leader.pid in members
        assert len(members) == 2
        assert os.getpid() not in members
        leader.communicate(b"\n")
    assert of_session(leader.pid) == []


@pytest.mark.parametrize("pid", [1, os.getpid()], ids=["init", "ourselves"])
def test_a_process_that_is_no_child_of_ours_is_not_waited_for(pid: int) -> None:
    reap([pid])
    assert Path(f"/proc/{pid}").exists()
