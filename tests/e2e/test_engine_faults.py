"""A real SGLang that misbehaves in every way seen in the field: noticed, explained, cleaned up, and gone on from."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fixtures_service_process import until
from fixtures_stack import Stack, WorkerProcess, open_stack

from layertap.schemas.incidents import Blame, Incident, IncidentKind
from layertap.schemas.jobs import Job, JobState

FAULTS = Path(__file__).resolve().parent.parent / "faults"
MARKED = 4242
"""A token that no innocent row holds."""
QUIET = ("--launch-quiet", "25", "--check-timeout", "25", "--stall-timeout", "15", "--installer", "plugin")
LAYERS = [0, 4, 8]
PATIENCE = 600.0

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(1800)]


class Faulty:
    """A stack with one worker whose engine misbehaves while a fault is switched on."""

    def __init__(self, stack: Stack, model: Path) -> None:
        self.stack = stack
        self.file = stack.root / "fault.json"
        self.worker: WorkerProcess = stack.start_worker("worker", model, flags=QUIET)

    def switch(self, **fault: Any) -> None:
        """Switches a fault on, or off."""
        if fault:
            self.file.write_text(json.dumps(fault))
        else:
            self.file.unlink(missing_ok=True)

    def submit(self, rows: list[list[int]]) -> Job:
        return self.stack.submit([{"input_ids": ids} for ids in rows], "tiny-llama", LAYERS)

    def incident(self, count: int = 1) -> Incident:
        """The newest incident, whole, once there are `count`."""

        def enough() -> list[Incident] | None:
            listed = list(self.stack.client.incidents())
            return listed if len(listed) >= count else None

        found = until(enough, PATIENCE)
        return self.stack.client.incident(found[0].id)

    def healthy_after(self) -> None:
        """The same worker does a healthy job right after, and nothing of the sick engine is left."""
        self.switch()
        self.stack.succeeded(self.submit(innocent(3)), PATIENCE)


def innocent(count: int, tokens: int = 20) -> list[list[int]]:
    random = np.random.default_rng(5)
    drawn = random.integers(5000, 40000, (count, tokens))
    return [row.tolist() for row in drawn]


@pytest.fixture
def faulty(tmp_path: Path, tiny_llama: Path) -> Iterator[Faulty]:
    root = tmp_path / "stack"
    path = os.pathsep.join(filter(None, [str(FAULTS), os.environ.get("PYTHONPATH", "")]))
    env = {"LAYERTAP_LEASE_SECONDS": "10", "PYTHONPATH": path, "TEST_ENGINE_FAULT": str(root / "fault.json")}
    with open_stack(root, env=env) as stack:
        yield Faulty(stack, tiny_llama)


@pytest.mark.parametrize(
    ("fault", "kind", "blame", "words"),
    [
        ({"at": "load", "do": "spin", "patched_only": True}, IncidentKind.HUNG_LAUNCHING, Blame.PATCH, "commit"),
        ({"at": "load", "do": "sleep"}, IncidentKind.HUNG_LAUNCHING, Blame.ENVIRONMENT, "commit"),
        ({"at": "load", "do": "die", "patched_only": True}, IncidentKind.DIED_LAUNCHING, Blame.PATCH, ""),
        ({"at": "port", "do": "sleep"}, IncidentKind.HUNG_LAUNCHING, Blame.ENVIRONMENT, "spoiled_startup"),
        ({"at": "forward", "do": "spin", "patched_only": True}, IncidentKind.HUNG_SERVING, Blame.PATCH, "commit"),
        ({"at": "capture", "do": "raise"}, IncidentKind.DIED_SERVING, Blame.PATCH, ""),
    ],
    ids=["spins-in-load", "sleeps-in-load", "dies-in-load", "opens-no-port", "hangs-at-once", "capture-raises"],
)
def test_an_engine_that_does_not_come_up_is_explained_and_costs_no_job(
    faulty: Faulty, fault: dict[str, Any], kind: IncidentKind, blame: Blame, words: str
) -> None:
    faulty.switch(**fault)
    job = faulty.submit(innocent(4))
    incident = faulty.incident()
    assert (incident.kind, incident.blame) == (kind, blame), incident.reason
    assert incident.evidence.log_tail
    assert incident.processes_left == 0
    if words:
        assert any(words in process.stack for process in incident.evidence.processes), incident.evidence.processes
    assert incident.tried[0].startswith("patched by plugin:")
    assert incident.tried[1].startswith("unpatched:")
    faulty.switch()
    ended = faulty.stack.succeeded(job, PATIENCE)
    assert ended.progress.rows_done == 4
    assert faulty.stack.query("SELECT max(attempts) FROM tasks") == [(0,)]


def test_a_transient_fault_blames_nobody(faulty: Faulty) -> None:
    faulty.switch(at="load", do="die", once=True)
    ended = faulty.stack.succeeded(faulty.submit(innocent(4)), PATIENCE)
    assert ended.progress.rows_done == 4
    assert faulty.incident().blame is Blame.NOBODY


@pytest.mark.parametrize(("do", "kind"), [("segfault", IncidentKind.DIED_SERVING), ("spin", IncidentKind.HUNG_SERVING)])
def test_a_row_that_kills_or_hangs_the_engine_is_set_aside_and_the_rest_goes_on(
    faulty: Faulty, do: str, kind: IncidentKind
) -> None:
    faulty.switch(at="forward", do=do, token=MARKED)
    rows = innocent(6)
    rows[4][7] = MARKED
    ended = faulty.stack.succeeded(faulty.submit(rows), PATIENCE)
    assert ended.progress.rows_done == 5
    (problem,) = faulty.stack.client.errors(ended.id)
    assert (problem.row_id, problem.code) == (4, "kills_engine")
    incident = faulty.incident()
    assert (incident.kind, incident.blame) == (kind, Blame.ROW)
    assert incident.id in problem.reason
    assert ended.id in incident.jobs
    pulled = faulty.stack.pull(ended)
    assert pulled.row_ids.tolist() == [0, 1, 2, 3, 5]
    faulty.healthy_after()


def test_an_orphan_that_ignores_sigterm_goes_with_its_engine(faulty: Faulty) -> None:
    faulty.switch(at="load", do="orphan", once=True)
    faulty.stack.succeeded(faulty.submit(innocent(4)), PATIENCE)
    assert len(faulty.worker.engine_pids()) >= 3
    assert faulty.worker.terminate() == 0
    assert not faulty.worker.engine_pids()


def test_rows_that_are_not_finite_are_row_errors(faulty: Faulty) -> None:
    faulty.switch(at="capture", do="nan", tokens=33)
    rows = [*innocent(3), innocent(1, tokens=33)[0]]
    ended = faulty.stack.succeeded(faulty.submit(rows), PATIENCE)
    (problem,) = faulty.stack.client.errors(ended.id)
    assert (problem.row_id, problem.code) == (3, "non_finite")
    assert faulty.stack.client.job(ended.id).state is JobState.SUCCEEDED
