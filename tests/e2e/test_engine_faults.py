"""A real SGLang that misbehaves in every way seen in the field: noticed, explained, cleaned up, and gone on from."""

from collections.abc import Iterator
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
from fixtures_service_process import until

from layertap.schemas.incidents import Blame, IncidentKind
from worker.engine import processes

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.fixture
def faulty(tmp_path: Path, tiny_llama: Path) -> Iterator[Faulty]:
    with open_faulty(tmp_path / "stack", tiny_llama) as opened:
        yield opened


@pytest.mark.parametrize("fault", MATRIX, ids=lambda fault: fault.name)
def test_no_fault_of_an_engine_costs_a_job_or_a_try_or_leaves_anything_behind(faulty: Faulty, fault: Fault) -> None:
    faulty.switch_on(fault.switch)
    ended, incidents = faulty.outcome(fault, faulty.submit(fault.rows()))
    for incident in incidents:
        check_incident(incident, fault)
    (explained,) = [incident for incident in incidents if incident.blame is fault.blame]
    if fault.blame in (Blame.ROW, Blame.UNKNOWN):
        assert all(incident.jobs == [ended.id] for incident in incidents)
    else:
        assert explained.tried[0].startswith("patched by plugin")
        assert explained.tried[1].startswith("unpatched: ")
    check_rows(faulty, fault, ended, explained)
    assert faulty.stack.query("SELECT max(attempts), max(expiries) FROM tasks") == [(0, 0)]

    faulty.switch_off()
    after = faulty.stack.succeeded(faulty.submit(innocent(3)))
    assert (after.progress.rows_done, after.progress.row_errors) == (3, 0)
    assert len(faulty.incidents()) == len(incidents)
    faulty.nothing_is_left()


def test_a_fault_of_one_way_to_capture_is_gone_around_by_the_other_while_it_lasts(faulty: Faulty) -> None:
    faulty.switch_on({"at": "capture", "do": "raise", "strategy": "hooks"})
    ended = faulty.stack.succeeded(faulty.submit(innocent(4)))
    assert (ended.progress.rows_done, ended.progress.row_errors) == (4, 0)
    (incident,) = faulty.incidents()
    assert (incident.kind, incident.blame) == (IncidentKind.DIED_SERVING, Blame.PATCH)
    assert faulty.file.exists()
    assert faulty.stack.pull(ended).manifest.engine["strategy"] == "collect"
    faulty.nothing_is_left()


def test_an_orphan_that_ignores_sigterm_goes_with_its_engine_when_the_worker_stops(faulty: Faulty) -> None:
    faulty.switch_on({"at": "load", "do": "orphan", "once": True})
    faulty.stack.succeeded(faulty.submit(innocent(3)))
    assert any("SIG_IGN" in _command(pid) for pid in faulty.worker.engine_pids())
    assert faulty.worker.terminate() == 0
    assert not faulty.worker.engine_pids()


def test_an_idle_engine_that_is_killed_is_reaped_and_replaced(faulty: Faulty) -> None:
    faulty.stack.succeeded(faulty.submit(innocent(3)))
    before = faulty.worker.engine_pids()
    processes.send(list(before), processes.signal.SIGKILL)
    (incident,) = until(faulty.incidents, 60)
    assert (incident.kind, incident.blame) == (IncidentKind.DIED_IDLE, Blame.UNKNOWN)
    assert incident.processes_left == 0
    assert not [pid for pid in before if Path(f"/proc/{pid}").exists()], "not even as zombies"
    faulty.stack.succeeded(faulty.submit(innocent(3)))
    faulty.nothing_is_left()


def test_rows_that_are_not_finite_are_row_errors(faulty: Faulty) -> None:
    faulty.switch_on({"at": "capture", "do": "nan", "tokens": ODD_TOKENS})
    ended = faulty.stack.succeeded(faulty.submit([*innocent(3), *innocent(1, ODD_TOKENS)]))
    (problem,) = faulty.stack.client.errors(ended.id)
    assert (problem.row_id, problem.code) == (3, "non_finite")
    assert (ended.progress.rows_done, ended.progress.row_errors) == (3, 1)
    assert faulty.stack.pull(ended).row_ids.tolist() == [0, 1, 2]
    assert not faulty.incidents()


def _command(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text()
