"""The ring of pinned memory: never more than its size, never two slots on one byte, never a wait that cannot end."""

import random
import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from worker.capture.pinned import PinnedRing, Slot

SIZE = 100


def _ring() -> PinnedRing:
    return PinnedRing(torch.zeros(SIZE, dtype=torch.uint8))


def _fits_now(ring: PinnedRing, nbytes: int) -> Slot | None:
    try:
        return ring.take(nbytes, timeout=0)
    except TimeoutError:
        return None


@given(st.lists(st.integers(1, SIZE), max_size=60), st.randoms(use_true_random=False))
def test_slots_never_overlap_and_always_come(sizes: list[int], order: random.Random) -> None:
    ring, out = _ring(), list[tuple[Slot, int]]()
    for number, nbytes in enumerate(sizes, start=1):
        while (slot := _fits_now(ring, nbytes)) is None:
            any_of_them, mark = out.pop(order.randrange(len(out)))
            assert (any_of_them.memory == mark).all()
            ring.give(any_of_them)
        assert slot.memory.shape == (nbytes,)
        slot.memory.fill_(number)
        out.append((slot, number))
        assert sum(held.memory.numel() for held, _ in out) <= ring.used <= SIZE
    for slot, mark in out:
        assert (slot.memory == mark).all()


def test_the_whole_ring_is_given_once_all_else_is_back() -> None:
    ring = _ring()
    first = ring.take(60, timeout=0)
    ring.give(first)
    assert ring.take(SIZE, timeout=0).memory.shape == (SIZE,)


@pytest.mark.parametrize("nbytes", [0, SIZE + 1])
def test_what_can_never_fit_is_refused_at_once(nbytes: int) -> None:
    with pytest.raises(ValueError, match="do not fit 100 bytes"):
        _ring().take(nbytes, timeout=60)


def test_room_that_nobody_gives_back_is_not_waited_for_without_end() -> None:
    ring = _ring()
    ring.take(70, timeout=0)
    with pytest.raises(TimeoutError, match="the writer is stuck"):
        ring.take(40, timeout=0.01)


def test_whoever_waits_goes_on_when_the_oldest_is_back() -> None:
    ring = _ring()
    oldest = ring.take(70, timeout=0)
    giving = threading.Timer(0.05, lambda: ring.give(oldest))
    giving.start()
    assert ring.take(40, timeout=30).memory.shape == (40,)
    giving.join()
