"""From readings of counters to rates: how fast now, over a window of ten seconds, and on the mean. Pure.

A reading is taken whenever there is occasion; rates are right however far apart readings lie.
"""

from collections import deque
from dataclasses import dataclass

from layertap.schemas.figures import WorkerFigures
from worker.capture.counters import Counted

WINDOW_S = 10.0
_SHORTEST_S = 0.2
"""Readings closer together than this give no rate."""


@dataclass(frozen=True)
class Reading:
    """Counters at a moment of the monotonic clock. `in_flight`: rows are in the engine. `gpu_busy` is in per cent."""

    at: float
    counted: Counted
    in_flight: bool
    gpu_busy: int | None = None


class Window:
    """A counter's rate over the last `WINDOW_S` seconds."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, float]] = deque()

    def add(self, at: float, value: float) -> None:
        """The counter stood at `value` then."""
        self._seen.append((at, value))
        # The newest reading that is as old as the window stays, so that the window is covered whole.
        while len(self._seen) > 2 and at - self._seen[1][0] >= WINDOW_S:
            self._seen.popleft()

    def clear(self) -> None:
        """Another counter from here on."""
        self._seen.clear()

    def rate(self) -> float | None:
        """Growth a second, never negative; None before two readings lie far enough apart."""
        if not self._seen:
            return None
        (began, first), (ended, last) = self._seen[0], self._seen[-1]
        return max(0.0, last - first) / (ended - began) if ended - began >= _SHORTEST_S else None


class Pace:
    """How one engine fares. `plain` is its speed without capture, in tokens a second."""

    def __init__(self, plain: float | None) -> None:
        self._plain = plain
        self._tokens, self._bytes, self._wait, self._write = Window(), Window(), Window(), Window()
        self._recent: deque[Reading] = deque()
        self._busy_seconds = 0.0
        self._busy_tokens = 0

    def add(self, reading: Reading) -> None:
        """Takes a reading in."""
        at, counted = reading.at, reading.counted
        if self._recent:
            before = self._recent[-1]
            moved = counted.tokens - before.counted.tokens
            if moved > 0 or before.in_flight:
                self._busy_seconds += at - before.at
                self._busy_tokens += max(0, moved)
        for window, value in (
            (self._tokens, counted.tokens),
            (self._bytes, counted.bytes),
            (self._wait, counted.wait_seconds),
            (self._write, counted.write_seconds),
        ):
            window.add(at, value)
        self._recent.append(reading)
        while at - self._recent[0].at > WINDOW_S:
            self._recent.popleft()

    def figures(self) -> WorkerFigures | None:
        """What there is to say; None before two readings."""
        tokens, nbytes = self._tokens.rate(), self._bytes.rate()
        if tokens is None or nbytes is None:
            return None
        mean = self._busy_tokens / self._busy_seconds if self._busy_seconds >= _SHORTEST_S else None
        fills = [r.counted.pinned_bytes / r.counted.pinned_limit for r in self._recent if r.counted.pinned_limit]
        gpu = [r.gpu_busy / 100 for r in self._recent if r.gpu_busy is not None]
        return WorkerFigures(
            tokens_per_second=round(tokens, 1),
            tokens_per_second_mean=None if mean is None else round(mean, 1),
            bytes_per_second=round(nbytes),
            plain_tokens_per_second=self._plain,
            plain_share=round(tokens / self._plain, 3) if self._plain else None,
            pool_fill=_share(_mean(fills)),
            writer_wait=_share(self._wait.rate()),
            writer_busy=_share(self._write.rate()),
            queued_runs=self._recent[-1].counted.queued_runs,
            gpu_use=_share(_mean(gpu)),
        )


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _share(value: float | None) -> float | None:
    return None if value is None else round(min(1.0, max(0.0, value)), 3)
