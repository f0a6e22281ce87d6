"""When the worker gives up a lease in its hand."""

import time

import pytest
from leases import shard_lease

from layertap.schemas.jobs import Final
from worker.leases import COMMIT_PHASE, HeldLease, LeaseKeeper


@pytest.fixture
def keeper() -> LeaseKeeper:
    """Without its process: nothing is renewed."""
    return LeaseKeeper("wrk_a", "http://127.0.0.1:1", None, 60)


@pytest.fixture
def held(keeper: LeaseKeeper) -> HeldLease:
    return keeper.hold(shard_lease(final=Final.NONE), time.monotonic(), "layout", 60)


@pytest.mark.parametrize("lost", [True, False])
def test_work_on_a_dropped_lease_ends(held: HeldLease, lost: bool) -> None:
    held.drop("cancelled", lost)
    assert held.dropped.is_set()
    assert (held.drop_reason, held.lost) == ("cancelled", lost)


@pytest.mark.parametrize("lost", [True, False])
def test_a_commit_on_its_way_is_not_given_up(keeper: LeaseKeeper, held: HeldLease, lost: bool) -> None:
    keeper.phase(held, COMMIT_PHASE, 600)
    held.drop("the service does not count it as held", lost)
    assert not held.dropped.is_set()


def test_the_first_reason_to_give_up_a_lease_stays(held: HeldLease) -> None:
    held.drop("lost", lost=True)
    held.drop("cancelled", lost=False)
    assert (held.drop_reason, held.lost) == ("lost", True)
