"""Paired measurement: two ways to do the same work, run in turn (A B A B …), compared pair by pair.

Whatever else the machine does meanwhile slows both members of a pair, so the ratio holds where the seconds would not.
"""

import statistics
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

Run = Callable[[], Awaitable[float]]
"""Does the work once and returns the seconds it took."""


@dataclass(frozen=True)
class Spread:
    """Median, least and greatest of some measurements."""

    median: float
    least: float
    greatest: float
    count: int

    @staticmethod
    def of(values: list[float]) -> "Spread":
        """Of at least one value."""
        return Spread(statistics.median(values), min(values), max(values), len(values))


@dataclass(frozen=True)
class Budget:
    """How often to measure: `most` rounds, fewer once `seconds` are spent, but never fewer than `fewest`."""

    seconds: float
    fewest: int = 3
    most: int = 7


async def in_turn(runs: Mapping[str, Run], budget: Budget) -> dict[str, list[float]]:
    """Runs all of `runs` once a round, in their order; seconds of each, round by round."""
    taken: dict[str, list[float]] = {name: [] for name in runs}
    began = time.monotonic()
    for done in range(budget.most):
        spent = time.monotonic() - began
        if done >= budget.fewest and spent + spent / done > budget.seconds:
            break
        for name, run in runs.items():
            seconds = await run()
            taken[name].append(seconds)
            print(f"round {done + 1}, {name}: {seconds:.2f} s", flush=True)
    return taken


def ratio(numerator: list[float], denominator: list[float]) -> Spread:
    """How many times the numerator's seconds are the denominator's, round by round."""
    return Spread.of([n / d for n, d in zip(numerator, denominator, strict=True)])


def rate(amount: float, seconds: list[float]) -> Spread:
    """`amount` a second, round by round."""
    return Spread.of([amount / taken for taken in seconds])


def timed(work: Callable[[], object]) -> float:
    """Seconds that `work` takes."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


@dataclass(frozen=True)
class Ratio:
    """One claim: `name` in a few words, its measured `value`, and the least that is aimed for, if anything is."""

    name: str
    value: Spread
    aim: float | None = None

    @property
    def met(self) -> bool | None:
        """Whether the median reaches the aim; None without one."""
        return None if self.aim is None else self.value.median >= self.aim


@dataclass(frozen=True)
class Rate:
    """An absolute figure that goes with a ratio; it says as much about the machine as about Layertap."""

    name: str
    value: Spread
    unit: str


@dataclass(frozen=True)
class Result:
    """What one benchmark found. `facts` says what was measured; `seconds` are the raw times behind the ratios."""

    name: str
    title: str
    ratios: list[Ratio]
    rates: list[Rate]
    facts: dict[str, str | int | float]
    seconds: dict[str, list[float]]

    def as_json(self) -> dict[str, Any]:
        """Plain values, rounded to what a measurement can tell."""
        return {name: _rounded(value) for name, value in asdict(self).items()}


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return [_rounded(item) for item in value] if isinstance(value, list) else value
