"""One worker under one fault after the other, with jobs running all the time: `make soak`.

The faults are drawn at random. `TEST_SOAK_SEED` repeats a run, `TEST_SOAK_FAULTS` says how many are drawn.
"""

import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from engine_faults import (
    MARKED,
    MATRIX,
    ONE_BY_ONE,
    PATIENCE,
    Fault,
    Faulty,
    check_incident,
    check_rows,
    innocent,
    open_faulty,
)
from fixtures_service_process import until

from layertap.schemas.incidents import Blame, Incident, IncidentKind
from layertap.schemas.jobs import Job, JobState
from worker.patch.package import Condition, check, find_package

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.soak, pytest.mark.timeout(3 * 3600)]

FLAGS = (*ONE_BY_ONE, "--max-inflight-tokens", "128")
"""Two rows in flight at a time, so that a row that kills has to be found."""
JOBS_OPEN, JOB_ROWS = 2, 30
LOOK_SECONDS = 0.5
SERVER_KILLED = (IncidentKind.DIED_IDLE, IncidentKind.DIED_SERVING)
_BY_NAME = {fault.name: fault for fault in MATRIX}
STARTS = [
    replace(fault, switch={**fault.switch, "once": True}, blame=Blame.NOBODY, lasting=False)
    for fault in MATRIX
    if fault.row == "plain"
]
"""Faults of an engine that comes up; each strikes once, after the engine before it was killed."""
SERVES = {
    _BY_NAME["hangs-in-a-later-forward"]: 4,
    _BY_NAME["segfaults-on-a-row"]: 3,
    _BY_NAME["hangs-on-a-row"]: 2,
    Fault(
        "segfaults-in-a-later-forward",
        {"at": "forward", "do": "segfault", "token": MARKED, "once": True},
        IncidentKind.DIED_SERVING,
        Blame.UNKNOWN,
        row="marked",
    ): 6,
}
"""Faults of an engine that serves, with how often they are drawn; those that come up take five of twenty."""


class Feeder:
    """Keeps some jobs unfinished at all times, from a thread of its own."""

    def __init__(self, faulty: Faulty) -> None:
        self.jobs: list[Job] = []
        self._faulty = faulty
        self._stop = threading.Event()
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Feeds while the block runs. Raises what went wrong in the thread."""
        self._thread.start()
        try:
            yield
        finally:
            self._stop.set()
            self._thread.join(60)
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            while not self._stop.wait(LOOK_SECONDS):
                client = self._faulty.stack.client
                unfinished = [job for job in self.jobs[-JOBS_OPEN:] if not client.job(job.id).state.terminal]
                if len(unfinished) < JOBS_OPEN:
                    self.jobs.append(self._faulty.submit(innocent(JOB_ROWS, seed=len(self.jobs))))
        except Exception as error:  # noqa: BLE001 (raised where the block ends)
            self._error = error


def drawn(seed: int, count: int) -> list[Fault]:
    """The faults of a run."""
    weights = {**dict.fromkeys(STARTS, 5 / len(STARTS)), **SERVES}
    return random.Random(seed).choices(list(weights), list(weights.values()), k=count)


def commit(faulty: Faulty, fault: Fault, known: set[str]) -> list[Incident]:
    """Has the engine commit the fault, and returns the incidents that came of it once all is well again."""
    serves(faulty)
    faulty.switch_on(fault.switch)
    if fault in STARTS:
        os.kill(faulty.server_pid(), signal.SIGKILL)
        until(lambda: not faulty.file.exists(), PATIENCE)
        until(lambda: fresh(faulty, known, fault), PATIENCE)
        found = [incident for incident in faulty.incidents() if incident.id not in known]
    else:
        job = faulty.stack.succeeded(faulty.submit(fault.rows()), PATIENCE)
        faulty.switch_off()
        found = [incident for incident in faulty.incidents() if incident.id not in known]
        (explained,) = [incident for incident in found if incident.blame is fault.blame and job.id in incident.jobs]
        check_rows(faulty, fault, job, explained)
    return found


def fresh(faulty: Faulty, known: set[str], fault: Fault) -> bool:
    """Whether the incident that the fault must lead to is there."""
    listed = [incident for incident in faulty.stack.client.incidents() if incident.id not in known]
    return any(incident.kind is fault.kind and incident.blame is fault.blame for incident in listed)


def serves(faulty: Faulty) -> None:
    """Returns once the worker says that its engine serves."""
    until(lambda: any((w.status or "").startswith("serving") for w in faulty.stack.client.workers()), PATIENCE)


def check_all(fault: Fault, incidents: list[Incident]) -> None:
    """Every new incident is of the fault, or of the kill that it came with, and is over with."""
    of_fault = [incident for incident in incidents if incident.kind is fault.kind]
    assert any(incident.blame is fault.blame for incident in of_fault), fault.name
    for incident in incidents:
        assert incident.processes_left == 0, incident.tried
        if fault not in STARTS or incident.blame is fault.blame:
            check_incident(incident, fault)
        else:
            assert incident.kind in SERVER_KILLED, incident.reason


def test_no_run_of_faults_costs_a_job_a_row_or_a_process(tmp_path: Path, tiny_llama: Path) -> None:
    seed = int(os.environ.get("TEST_SOAK_SEED") or random.SystemRandom().randrange(2**32))
    count = int(os.environ.get("TEST_SOAK_FAULTS", "30"))
    print(f"TEST_SOAK_SEED={seed} TEST_SOAK_FAULTS={count}", flush=True)
    with open_faulty(tmp_path / "stack", tiny_llama, FLAGS) as faulty:
        feeder, known, began = Feeder(faulty), set[str](), time.monotonic()
        with feeder.running():
            for number, fault in enumerate(drawn(seed, count), 1):
                incidents = commit(faulty, fault, known)
                check_all(fault, incidents)
                known |= {incident.id for incident in incidents}
                minutes = (time.monotonic() - began) / 60
                print(f"{minutes:5.1f} min  {number:2}  {fault.name}: {len(incidents)} incidents", flush=True)
        for job in feeder.jobs:
            ended = faulty.stack.succeeded(job, PATIENCE)
            assert (ended.progress.rows_done, ended.progress.row_errors) == (JOB_ROWS, 0), ended.id
        assert len(feeder.jobs) > count, "jobs ran all the time"
        assert {job.state for job in faulty.stack.client.jobs()} == {JobState.SUCCEEDED}
        assert faulty.stack.query("SELECT max(attempts), max(expiries) FROM tasks") == [(0, 0)]
        assert {incident.id for incident in faulty.stack.client.incidents()} == known
        faulty.nothing_is_left()
        assert faulty.worker.terminate() == 0
        assert not faulty.worker.engine_pids()
        assert check(find_package()).condition is Condition.PRISTINE
