"""When a lease may be renewed: work that advances, or a phase inside its deadline, and nothing else."""

from pathlib import Path

import pytest

from worker.capture.session import Ledger
from worker.lease_keeper import Held, due, may_renew, observe


def _held(ledger: Ledger | None = None, phase_deadline: float = 0.0, advanced_at: float = 0.0) -> Held:
    return Held(
        task="task_A",
        worker="wrk_A",
        generation=1,
        secret="s",
        lease_seconds=30,
        valid_until=30,
        next_renewal=10,
        stall_seconds=60,
        phase="x",
        phase_deadline=phase_deadline,
        ledger=ledger,
        advanced_at=advanced_at,
    )


@pytest.mark.parametrize(("now", "renewed"), [(99.0, True), (100.0, False), (500.0, False)])
def test_a_phase_is_renewed_inside_its_deadline_only(now: float, renewed: bool) -> None:
    assert may_renew(_held(phase_deadline=100.0), now) is renewed


def test_captured_tokens_keep_a_lease_and_their_absence_loses_it(tmp_path: Path) -> None:
    ledger = Ledger.create(tmp_path / "ledger", [10, 10])
    held = _held(ledger)
    observe(held, now=100.0)
    assert may_renew(held, now=159.0)
    assert not may_renew(held, now=161.0)
    ledger.written[0] = 3
    observe(held, now=161.0)
    assert (held.rows, held.tokens) == (0, 3)
    assert may_renew(held, now=220.0)
    observe(held, now=230.0)
    assert not may_renew(held, now=230.0)


def test_progress_is_reported_sooner_than_a_third_of_the_lease(tmp_path: Path) -> None:
    ledger = Ledger.create(tmp_path / "ledger", [10, 10])
    held = _held(ledger)
    held.reported = (0, 0)
    observe(held, now=0.5)
    assert not due(held, now=1.5)
    ledger.written[0] = 3
    observe(held, now=1.5)
    assert not due(held, now=0.9)
    assert due(held, now=1.5)
    held.reported = (0, 3)
    assert not due(held, now=9.9)
    assert due(held, now=10.0)
