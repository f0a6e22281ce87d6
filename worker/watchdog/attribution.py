"""Whose fault a failed launch was: what to try next, and what the tries say. Pure.

After a patched launch fails, the same engine is started once unpatched. If that is healthy, the patched one is tried
once more, since a transient fault blames nobody; if it fails again, the patch is to blame, and the next way to attach
is tried. If the unpatched one fails too, the environment is to blame and no patch.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from layertap.schemas.incidents import Blame


@dataclass(frozen=True)
class Attempt:
    """One start: by which installer (None: unpatched), and whether the engine came up healthy."""

    installer: str | None
    healthy: bool


@dataclass(frozen=True)
class Try:
    """Start next with this installer; None starts it unpatched."""

    installer: str | None


@dataclass(frozen=True)
class Settled:
    """Nothing more to try. `serving`: the last start serves, else nothing does; `blame` is for the first failure."""

    blame: Blame
    serving: bool


def next_step(attempts: Sequence[Attempt], installers: Sequence[str]) -> Try | Settled:
    """What to do after these attempts; `installers` are the ways to attach, the preferred first (at least one)."""
    if not attempts:
        return Try(installers[0])
    last = attempts[-1]
    failed = [a.installer for a in attempts if a.installer is not None and not a.healthy]
    if last.installer is None:
        return Try(failed[-1]) if last.healthy else Settled(Blame.ENVIRONMENT, serving=False)
    if last.healthy:
        blamed = {name for name in failed if failed.count(name) > 1}
        return Settled(Blame.PATCH if blamed else Blame.NOBODY, serving=True)
    if len(failed) == 1:
        return Try(None)
    untried = [name for name in installers if name not in failed]
    return Try(untried[0]) if untried else Settled(Blame.PATCH, serving=False)
