"""What can go wrong with a real engine, on purpose: the matrix of faults, and a stack whose engine commits them.

A fault is a few words in a file that `tests/faults/sitecustomize.py`, loaded into the engine's processes, acts on.
"""

import json
import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from fixtures_service_process import until
from fixtures_stack import ENGINE_MARK, Stack, WorkerProcess, open_stack

from layertap.schemas.incidents import Blame, Incident, IncidentKind
from layertap.schemas.jobs import Job
from worker.engine import processes
from worker.patch.package import Condition, check, find_package

MODEL, LAYERS = "tiny-llama", [0, 4, 8]
MARKED = 4242
"""A token that no innocent row holds."""
TOKENS = 60
ODD_TOKENS = 33
"""Length of a row that is meant to stand out."""
LAUNCH_QUIET, CHECK, STALL = 30, 30, 15
"""The worker's deadlines in seconds: short, but a start on a busy machine keeps them."""
MARGIN = 30
"""Seconds that a busy machine may add to a deadline before the worker has noticed and looked."""
LOOK_SECONDS = 0.5
PATIENCE = 900.0
_FLAGS = ("--launch-quiet", str(LAUNCH_QUIET), "--check-timeout", str(CHECK), "--stall-timeout", str(STALL))
ONE_BY_ONE = (*_FLAGS, "--chunked-prefill-size", "64", "--max-inflight-tokens", "64", "--installer", "plugin")
"""Flags of a worker whose engine has one row of `TOKENS` tokens at a time."""
_MOVED = re.compile(r"last moved ([\d.]+) s ago")


@dataclass(frozen=True, eq=False)
class Fault:
    """One fault, and what the worker has to make of it.

    `switch` goes into the file. `clock` names the signals that must have stood still for `deadline` seconds, none for
    the phase itself. `shown` is a word that some process's command or stack must hold. With `lasting`, no engine comes
    up before the fault is switched off. `row` says whether the job's fourth row is plain or marked. With `captured`,
    some rows were written before it struck.
    """

    name: str
    switch: dict[str, Any]
    kind: IncidentKind
    blame: Blame
    clock: tuple[str, ...] = ("log_bytes", "read_bytes", "memory_bytes")
    deadline: float = 0.0
    shown: str = ""
    lasting: bool = False
    row: str = "plain"
    captured: bool = False

    @property
    def at_start(self) -> bool:
        """Whether it strikes an engine that comes up, not one that serves."""
        return self.row == "plain"

    @property
    def gone_around(self) -> bool:
        """Whether it spares one way to capture, so that an engine comes up in that way while the fault lasts."""
        return "strategy" in self.switch

    @property
    def sets_row_aside(self) -> bool:
        """Whether the row, and nothing else, is to blame."""
        return self.blame is Blame.ROW

    def rows(self) -> list[list[int]]:
        """Six rows, the fourth as the fault wants it."""
        rows = innocent(6)
        if self.row == "marked":
            rows[3][TOKENS // 2] = MARKED
        return rows


MATRIX = [
    Fault(
        "spins-in-load",
        {"at": "load", "do": "spin", "once": True},
        IncidentKind.HUNG_LAUNCHING,
        Blame.NOBODY,
        deadline=LAUNCH_QUIET,
        shown="commit",
    ),
    Fault(
        "sleeps-in-load",
        {"at": "load", "do": "sleep"},
        IncidentKind.HUNG_LAUNCHING,
        Blame.ENVIRONMENT,
        deadline=LAUNCH_QUIET,
        shown="commit",
        lasting=True,
    ),
    Fault(
        "dies-in-load",
        {"at": "load", "do": "die", "patched_only": True},
        IncidentKind.DIED_LAUNCHING,
        Blame.PATCH,
        lasting=True,
    ),
    Fault(
        "opens-no-port",
        {"at": "port", "do": "sleep", "once": True},
        IncidentKind.HUNG_LAUNCHING,
        Blame.NOBODY,
        deadline=LAUNCH_QUIET,
        shown="spoiled_startup",
    ),
    Fault(
        "hangs-in-the-first-forward",
        {"at": "forward", "do": "spin", "once": True},
        IncidentKind.HUNG_SERVING,
        Blame.NOBODY,
        clock=(),
        deadline=CHECK,
        shown="commit",
    ),
    Fault(
        "hangs-in-a-later-forward",
        {"at": "forward", "do": "sleep", "token": MARKED, "once": True},
        IncidentKind.HUNG_SERVING,
        Blame.UNKNOWN,
        clock=("tokens_captured",),
        deadline=STALL,
        shown="commit",
        row="marked",
        captured=True,
    ),
    Fault(
        "raises-in-the-capture",
        {"at": "capture", "do": "raise", "strategy": "hooks"},
        IncidentKind.DIED_SERVING,
        Blame.PATCH,
    ),
    Fault(
        "segfaults-on-a-row",
        {"at": "forward", "do": "segfault", "token": MARKED},
        IncidentKind.DIED_SERVING,
        Blame.ROW,
        row="marked",
    ),
    Fault(
        "hangs-on-a-row",
        {"at": "forward", "do": "spin", "token": MARKED},
        IncidentKind.HUNG_SERVING,
        Blame.ROW,
        clock=("tokens_captured",),
        deadline=STALL,
        shown="commit",
        row="marked",
    ),
    Fault(
        "dies-and-leaves-an-orphan",
        {"at": "load", "do": "orphan-and-die", "once": True},
        IncidentKind.DIED_LAUNCHING,
        Blame.NOBODY,
        shown="signal.SIG_IGN",
    ),
    Fault(
        "captures-what-is-not-finite",
        {"at": "capture", "do": "nan", "once": True},
        IncidentKind.FAILED_CHECK,
        Blame.NOBODY,
    ),
]


def innocent(count: int, tokens: int = TOKENS, seed: int = 5) -> list[list[int]]:
    """Rows that no fault minds."""
    drawn = np.random.default_rng(seed).integers(5000, 40000, (count, tokens))
    return [row.tolist() for row in drawn]


class Faulty:
    """A stack with one worker whose engine misbehaves while a fault is switched on."""

    def __init__(self, stack: Stack, model: Path, flags: tuple[str, ...]) -> None:
        self.stack = stack
        self.file = stack.root / "fault.json"
        self.worker: WorkerProcess = stack.start_worker("worker", model, flags=flags)

    def switch_on(self, fault: dict[str, Any]) -> None:
        """From now on the engine misbehaves like that."""
        partial = self.file.with_suffix(".partial")
        partial.write_text(json.dumps(fault))
        partial.rename(self.file)

    def switch_off(self) -> None:
        """From now on the engine is as it should be."""
        self.file.unlink(missing_ok=True)

    def submit(self, rows: list[list[int]]) -> Job:
        """A job for these rows."""
        return self.stack.submit([{"input_ids": ids} for ids in rows], MODEL, LAYERS)

    def incidents(self, known: Collection[str] = ()) -> list[Incident]:
        """Every incident with its evidence, oldest first, but for those whose ids are `known`."""
        client = self.stack.client
        return [client.incident(listed.id) for listed in client.incidents() if listed.id not in known][::-1]

    def known(self) -> frozenset[str]:
        """The ids of all incidents so far."""
        return frozenset(listed.id for listed in self.stack.client.incidents())

    def kill_engine(self) -> Incident | None:
        """SIGKILL to all of the engine that runs, if any; returns its incident. The next job starts another engine."""
        known, pids = self.known(), list(self.worker.engine_pids())
        if not pids:
            return None
        processes.send(pids, processes.signal.SIGKILL)
        (incident,) = until(lambda: self.incidents(known), 60, LOOK_SECONDS)
        assert incident.processes_left == 0
        assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()], "not even as zombies"
        return incident

    def outcome(self, fault: Fault, job: Job, known: Collection[str] = ()) -> tuple[Job, list[Incident]]:
        """The job once it has succeeded, and the incidents until then but for those `known`.

        A lasting fault is switched off after one incident.
        """
        if fault.lasting:
            until(lambda: self.known() - set(known), PATIENCE, LOOK_SECONDS)
            self.switch_off()
        ended = self.stack.succeeded(job, PATIENCE)
        return ended, self.incidents(known)

    def server_pid(self) -> int:
        """The server of the engine that runs."""
        commands = {pid: Path(f"/proc/{pid}/cmdline").read_text() for pid in self.worker.engine_pids()}
        (pid,) = [pid for pid, words in commands.items() if "sglang.launch_server" in words]
        return pid

    def nothing_is_left(self) -> None:
        """No process of any engine but the newest is alive, and the installed SGLang is as released."""
        *_, newest = sorted(self.worker.run_dir.glob("engine-*"), key=lambda folder: int(folder.name.split("-")[1]))
        serving = processes.marked(ENGINE_MARK, str(newest))
        left = self.worker.engine_pids() - set(serving)
        assert not left, f"{left} of an engine before {newest.name}"
        assert check(find_package()).condition is Condition.PRISTINE


@contextmanager
def open_faulty(root: Path, model: Path, flags: tuple[str, ...] = ONE_BY_ONE) -> Iterator[Faulty]:
    """A stack that can be made to misbehave, below `root`."""
    env = {"LAYERTAP_LEASE_SECONDS": "10", "TEST_ENGINE_FAULT": str(root / "fault.json")}
    with open_stack(root, env=env) as stack:
        yield Faulty(stack, model, flags)


def quiet_seconds(incident: Incident, clock: tuple[str, ...]) -> float:
    """How long none of those signals had moved, at the most since the phase began."""
    signals = incident.evidence.signals
    moved = [float(found[1]) for name in clock if (found := _MOVED.search(signals[name]))]
    return min([float(signals["phase_seconds"]), *moved])


def check_incident(incident: Incident, fault: Fault) -> None:
    """It was noticed in time, the evidence is whole, and nothing of the engine was left."""
    assert incident.kind is fault.kind, incident.reason
    quiet = quiet_seconds(incident, fault.clock)
    assert fault.deadline <= quiet < fault.deadline + MARGIN, (incident.reason, incident.evidence.signals)
    assert incident.processes_left == 0, incident.tried
    evidence = incident.evidence
    assert evidence.log_tail
    assert {"phase", "log_bytes", "cpu_seconds", "tokens_captured", "in_flight"} <= evidence.signals.keys()
    assert {"model_path", "installer", "device", "chunked_prefill_size"} <= evidence.engine.keys()
    for process in evidence.processes:
        # One that is on its way out can no longer be looked into; one that hangs can.
        words = ("Process", "no stack: py-spy:") if incident.kind.value.startswith("died") else ("Process",)
        assert process.stack.startswith(words), process
    if "hung" in incident.kind.value:
        assert evidence.processes
    shown = [process.command + process.stack for process in evidence.processes]
    assert any(fault.shown in text for text in shown) or not fault.shown, shown
    if fault.captured:
        assert int(evidence.signals["tokens_captured"].split(",")[0]) > 0


def check_rows(faulty: Faulty, fault: Fault, job: Job, incident: Incident) -> None:
    """Every row of the ended job is done, but for the one to blame, which names the incident."""
    aside = [3] if fault.sets_row_aside else []
    problems = list(faulty.stack.client.errors(job.id))
    assert [(problem.row_id, problem.code) for problem in problems] == [(row, "kills_engine") for row in aside]
    assert all(incident.id in problem.reason for problem in problems)
    assert (job.progress.rows_done, job.progress.row_errors) == (6 - len(aside), len(aside))
    assert faulty.stack.pull(job).row_ids.tolist() == [row for row in range(6) if row not in aside]
