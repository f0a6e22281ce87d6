"""A real SGLang that misbehaves in every way seen in the field: noticed, explained, cleaned up, and gone on from.

The cases share one worker, one after the other, as long as none of them fails.
"""

import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from engine_faults import (
    MATRIX,
    ODD_TOKENS,
    Fault,
    Faulty,
    check_incident,
    check_rows,
    innocent,
    open_faulty,
)

from layertap.schemas.incidents import Blame, IncidentKind
from worker.watchdog.guard import LOOK_EVERY_S

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(1800)]


class Shared:
    """The stack that the cases share: opened for the first that asks, and anew after one was given up."""

    def __init__(self, root: Path, model: Path) -> None:
        self._root = root
        self._model = model
        self._number = 0
        self._faulty: Faulty | None = None
        self._exits = ExitStack()

    def get(self) -> Faulty:
        """The stack, with no fault switched on."""
        if self._faulty is None:
            self._number += 1
            opened = open_faulty(self._root / f"stack-{self._number}", self._model)
            self._faulty = self._exits.enter_context(opened)
        return self._faulty

    def give_up(self) -> None:
        """Stops the stack, which fails if anything of it is left; the next case gets another."""
        self._faulty = None
        self._exits.close()


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory, tiny_llama: Path) -> Iterator[Shared]:
    stacks = Shared(tmp_path_factory.mktemp("faults"), tiny_llama)
    yield stacks
    stacks.give_up()


@pytest.fixture
def faulty(shared: Shared, request: pytest.FixtureRequest) -> Iterator[Faulty]:
    failed = request.session.testsfailed
    faulty = shared.get()
    yield faulty
    faulty.switch_off()
    if request.session.testsfailed > failed or faulty.worker.child.exit_code is not None:
        shared.give_up()


@pytest.mark.parametrize("fault", MATRIX, ids=lambda fault: fault.name)
def test_no_fault_of_an_engine_costs_a_job_or_a_try_or_leaves_anything_behind(faulty: Faulty, fault: Fault) -> None:
    if fault.at_start:
        faulty.kill_engine()
    known = faulty.known()
    faulty.switch_on(fault.switch)
    ended, incidents = faulty.outcome(fault, faulty.submit(fault.rows()), known)
    for incident in incidents:
        check_incident(incident, fault)
    (explained,) = [incident for incident in incidents if incident.blame is fault.blame]
    if fault.at_start:
        assert explained.tried[0].startswith("patched by plugin")
        assert explained.tried[1].startswith("unpatched: ")
    else:
        assert all(incident.jobs == [ended.id] for incident in incidents)
    check_rows(faulty, fault, ended, explained)
    assert faulty.file.exists() is (fault.gone_around or fault.sets_row_aside)
    strategy = faulty.stack.pull(ended).manifest.engine["strategy"]
    assert strategy == ("collect" if fault.gone_around else "hooks")
    assert faulty.stack.query("SELECT max(attempts), max(expiries) FROM tasks") == [(0, 0)]

    faulty.switch_off()
    after = faulty.stack.succeeded(faulty.submit(innocent(3)))
    assert (after.progress.rows_done, after.progress.row_errors) == (3, 0)
    assert faulty.known() == known | {incident.id for incident in incidents}
    faulty.nothing_is_left()


def test_rows_that_are_not_finite_are_row_errors(faulty: Faulty) -> None:
    known = faulty.known()
    faulty.switch_on({"at": "capture", "do": "nan", "tokens": ODD_TOKENS})
    ended = faulty.stack.succeeded(faulty.submit([*innocent(3), *innocent(1, ODD_TOKENS)]))
    (problem,) = faulty.stack.client.errors(ended.id)
    assert (problem.row_id, problem.code) == (3, "non_finite")
    assert (ended.progress.rows_done, ended.progress.row_errors) == (3, 1)
    assert faulty.stack.pull(ended).row_ids.tolist() == [0, 1, 2]
    assert faulty.known() == known


def test_an_idle_engine_that_is_killed_is_replaced_and_an_orphan_of_the_next_goes_when_the_worker_stops(
    faulty: Faulty,
) -> None:
    faulty.stack.succeeded(faulty.submit(innocent(3)))
    # An engine that has served since the worker last looked would have died serving.
    time.sleep(2 * LOOK_EVERY_S)
    incident = faulty.kill_engine()
    assert incident is not None
    assert (incident.kind, incident.blame) == (IncidentKind.DIED_IDLE, Blame.UNKNOWN)
    faulty.switch_on({"at": "load", "do": "orphan", "once": True})
    faulty.stack.succeeded(faulty.submit(innocent(3)))
    faulty.nothing_is_left()
    assert any("SIG_IGN" in Path(f"/proc/{pid}/cmdline").read_text() for pid in faulty.worker.engine_pids())
    assert faulty.worker.terminate() == 0
    assert not faulty.worker.engine_pids()
