"""`layertap up` from the command line alone: a job from submit to inspect, and nothing left behind however it ends."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fixtures_service_process import free_port, until
from fixtures_stack import PATIENCE, Stack, open_stack

from layertap.children import Child

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1800)]

EXAMPLES = Path(__file__).parents[2] / "examples" / "conversations.jsonl"


class Up:
    """A running `layertap up`, and verbs said to it. The stack only looks after its processes."""

    def __init__(self, stack: Stack, model: Path) -> None:
        self.stack = stack
        self._words = [sys.executable, "-m", "layertap.cli"]
        self.port = free_port()
        words = ["up", "--model", str(model), "--port", str(self.port), "--data-dir", str(stack.root / "data")]
        self.child = Child("up", [*self._words, *words, "--device", "cpu"], stack.root / "up.log", stack.env)
        until(self._ready, PATIENCE)

    def _ready(self) -> bool:
        assert self.child.exit_code is None, self.child.last_lines()
        return any("Layertap is up" in line for line in self.child.last_lines(200))

    def say(self, *words: object) -> "subprocess.CompletedProcess[str]":
        url = f"http://127.0.0.1:{self.port}"
        command = [*self._words, "--url", url, *map(str, words)]
        return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, env=self.stack.env, check=True)

    def job(self) -> dict[str, Any]:
        """A small job that has succeeded, so that an engine runs."""
        lines = EXAMPLES.read_text().splitlines(keepends=True)
        rows = self.stack.root / "rows.jsonl"
        rows.write_text("".join(lines[:6]))
        submitted = self.say("submit", rows, "--model", "tiny-llama", "--preset", "eagle3", "--json")
        job: dict[str, Any] = json.loads(submitted.stdout)
        self.watched = self.say("watch", job["id"])
        return job


@pytest.fixture
def up(tmp_path: Path, tiny_llama: Path) -> Iterator[Up]:
    with open_stack(tmp_path / "stack", service=False) as stack:
        started = Up(stack, tiny_llama)
        yield started
        if started.child.exit_code is None:
            started.child.stop(60)


def test_up_serves_a_job_by_command_line_and_ctrl_c_leaves_no_process(up: Up, tmp_path: Path) -> None:
    job = up.job()
    assert job["layers"] == [2, 4, 5]
    assert f"{job['id']} succeeded: 6 rows" in up.watched.stdout
    pulled = tmp_path / "pulled"
    assert "verified 6 rows" in up.say("pull", job["id"], pulled).stdout
    assert "verified" in up.say("verify", pulled).stdout
    shown = up.say("inspect", pulled)
    assert "tiny-llama" in shown.stdout
    assert (pulled / "inspect.png").read_bytes().startswith(b"\x89PNG")
    assert len(up.stack.left()) > 3

    os.kill(up.child.pid, signal.SIGINT)
    until(lambda: up.child.exit_code is not None, 60)
    assert up.child.exit_code == 0, up.child.last_lines()
    assert up.stack.left() == []


def test_sigkill_of_up_leaves_no_process_after_a_few_seconds(up: Up) -> None:
    up.job()
    assert len(up.stack.left()) > 3
    os.kill(up.child.pid, signal.SIGKILL)
    until(lambda: up.stack.left() == [], 30)
