"""Whose fault a failed launch was: what to try next, and what the tries say. Pure.

After a patched launch fails, the same engine is started once unpatched. If that is healthy, the patched one is tried
once more, since a transient fault blames nobody; if it fails again, the patch is to blame, and the next way to attach
is tried. If the unpatched one fails too, the environment is to blame and no patch.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from layertap.schemas.incidents import Blame
from worker.engine.spec import Strategy
from worker.patch.installer import InstallerName


@dataclass(frozen=True)
class Way:
    """How an engine is patched: the installer, and the strategy by which the capture reads."""

    installer: InstallerName
    strategy: Strategy = "hooks"

    def __str__(self) -> str:
        return f"{self.installer}, {self.strategy}"


@dataclass(frozen=True)
class Attempt:
    """One start: in which way (None: unpatched), and whether the engine came up healthy."""

    way: Way | None
    healthy: bool


@dataclass(frozen=True)
class Try:
    """Start next in this way; None starts it unpatched."""

    way: Way | None


@dataclass(frozen=True)
class Settled:
    """Nothing more to try. `serving`: the last start serves, else nothing does; `blame` is for the first failure."""

    blame: Blame
    serving: bool


def ways(installers: Sequence[InstallerName], strategies: Sequence[Strategy]) -> list[Way]:
    """Every way to try, the preferred first: each strategy with the first installer, then the other installers."""
    first, *others = installers
    return [*(Way(first, strategy) for strategy in strategies), *(Way(name, strategies[0]) for name in others)]


def next_step(attempts: Sequence[Attempt], ways: Sequence[Way]) -> Try | Settled:
    """What to do after these attempts; `ways` are the ways to patch, the preferred first (at least one)."""
    if not attempts:
        return Try(ways[0])
    last = attempts[-1]
    failed = [a.way for a in attempts if a.way is not None and not a.healthy]
    if last.way is None:
        return Try(failed[-1]) if last.healthy else Settled(Blame.ENVIRONMENT, serving=False)
    if last.healthy:
        blamed = {way for way in failed if failed.count(way) > 1}
        return Settled(Blame.PATCH if blamed else Blame.NOBODY, serving=True)
    if len(failed) == 1:
        return Try(None)
    untried = [way for way in ways if way not in failed]
    return Try(untried[0]) if untried else Settled(Blame.PATCH, serving=False)
