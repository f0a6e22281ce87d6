"""Readings of counters become rates: over a sliding window, and on the mean while rows are in the engine."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from layertap.schemas.figures import WorkerFigures
from worker.capture.counters import Counted
from worker.pace import WINDOW_S, Pace, Reading, Window

GIB = 1 << 30


def reading(at: float, tokens: int, busy: bool = True, gpu: int | None = None, **more: Any) -> Reading:
    """Tokens of ten bytes each, and whatever else is counted."""
    nothing = Counted(tokens, 10 * tokens, 0.0, 0.0, queued_runs=0, pinned_bytes=0, pinned_limit=0)
    return Reading(at, replace(nothing, **more), busy, gpu)


def paced(*readings: Reading, plain: float | None = None) -> WorkerFigures:
    pace = Pace(plain)
    for each in readings:
        pace.add(each)
    figures = pace.figures()
    assert figures is not None
    return figures


def test_a_rate_needs_two_readings_apart() -> None:
    window = Window()
    assert window.rate() is None
    window.add(100.0, 5)
    assert window.rate() is None
    window.add(100.1, 50)
    assert window.rate() is None
    window.add(100.5, 55)
    assert window.rate() == 100.0
    window.clear()
    assert window.rate() is None


def test_what_lies_before_the_window_does_not_count() -> None:
    window = Window()
    for second in range(100):
        window.add(second, 1000 * min(second, 80))
    assert window.rate() == 0.0
    assert Window().rate() is None


def test_the_window_is_covered_whole_when_readings_are_rare() -> None:
    window = Window()
    for at, value in ((0, 0), (30, 300), (60, 1200)):
        window.add(at, value)
    assert window.rate() == 30.0


@given(st.lists(st.tuples(st.floats(0.25, 3.0), st.integers(0, 10_000)), min_size=60, max_size=60))
def test_the_rate_is_that_of_about_the_last_ten_seconds(steps: list[tuple[float, int]]) -> None:
    window, at, value, seen = Window(), 0.0, 0, []
    for seconds, growth in steps:
        at, value = at + seconds, value + growth
        window.add(at, value)
        seen.append((at, value))
    began, first = max((s for s in seen if at - s[0] >= WINDOW_S), default=seen[0])
    assert WINDOW_S <= at - began <= WINDOW_S + 3.0
    assert window.rate() == pytest.approx((value - first) / (at - began))


def test_a_counter_that_starts_anew_gives_no_negative_rate() -> None:
    window = Window()
    window.add(0, 1000)
    window.add(1, 10)
    assert window.rate() == 0.0


def test_figures_are_rates_and_shares_of_what_is_counted() -> None:
    figures = paced(
        reading(0, 500, gpu=50),
        reading(
            10, 2500, gpu=100, wait_seconds=2.5, write_seconds=9, queued_runs=3, pinned_bytes=GIB, pinned_limit=2 * GIB
        ),
        plain=250,
    )
    assert (figures.tokens_per_second, figures.tokens_per_second_mean) == (200, 200)
    assert figures.bytes_per_second == 2000
    assert (figures.plain_tokens_per_second, figures.plain_share) == (250, 0.8)
    assert (figures.writer_wait, figures.writer_busy, figures.queued_runs) == (0.25, 0.9, 3)
    assert (figures.pool_fill, figures.gpu_use) == (0.5, 0.75)


def test_what_is_not_there_is_null() -> None:
    figures = paced(reading(0, 0), reading(1, 10))
    assert (figures.plain_share, figures.pool_fill, figures.gpu_use) == (None, None, None)
    assert Pace(100).figures() is None


def test_the_mean_leaves_out_the_time_without_rows() -> None:
    pace = Pace(None)
    for at, tokens, busy in ((0, 0, False), (100, 0, True), (101, 50, True), (103, 300, False), (900, 300, False)):
        pace.add(reading(at, tokens, busy))
    figures = pace.figures()
    assert figures is not None
    assert (figures.tokens_per_second_mean, figures.tokens_per_second) == (100, 0)


def test_shares_stay_shares() -> None:
    figures = paced(
        reading(0, 0), reading(1, 0, wait_seconds=1.5, write_seconds=7, pinned_bytes=3 * GIB, pinned_limit=GIB)
    )
    assert (figures.writer_wait, figures.writer_busy, figures.pool_fill) == (1, 1, 1)
