"""Request ids: everything that every rank must know to act alike stands in the id itself.

Ranks run collectives while they read the residual stream, so whether, how and what to read may depend on nothing but
the batch. How is a letter in the id, the boundaries are a bit mask in it. Each id ends with a terminator: SGLang aborts
what begins with an id, and no id is a prefix of another.
"""

import re
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache


class Reading(StrEnum):
    """How a row's states are read: by hooks on the blocks, by the model's own collection, or by every way at once."""

    HOOKS = "h"
    COLLECT = "c"
    CHECK = "x"


_PATTERN = re.compile(r"lt1\.([hcx])\.([0-9a-f]+)\.([01])\.([A-Za-z0-9_-]+)\.(\d+)\.(\d+)\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class Rid:
    """One attempt at one row of one leased task.

    `boundaries` has bit k set for boundary k; `final` asks for the final hidden state; `row` is the row's index within
    the task's shard; `attempt` counts how often this lease sent the row. With `Reading.CHECK` the boundaries are not
    looked at: what is read then is `sources.of_check`.
    """

    boundaries: int
    final: bool
    task: str
    generation: int
    row: int
    attempt: int
    reading: Reading = Reading.HOOKS

    def __str__(self) -> str:
        return f"{self.lease_prefix}{self.row}.{self.attempt}."

    @property
    def lease_prefix(self) -> str:
        """What the ids of all rows of this lease start with, and no other's."""
        return f"lt1.{self.reading}.{self.boundaries:x}.{self.final:d}.{self.task}.{self.generation}."

    @property
    def session(self) -> str:
        """Names the capture session this row belongs to."""
        return f"{self.task}.{self.generation}"


def mask(boundaries: list[int] | tuple[int, ...]) -> int:
    """The bit mask of `boundaries`."""
    return sum(1 << k for k in set(boundaries))


@lru_cache(maxsize=256)
def unmask(bits: int) -> tuple[int, ...]:
    """The ascending boundaries of a bit mask."""
    return tuple(k for k in range(bits.bit_length()) if bits >> k & 1)


def parse(rid: object) -> Rid | None:
    """The parts of a Layertap request id, or None for anybody else's."""
    found = _PATTERN.fullmatch(rid) if isinstance(rid, str) else None
    if found is None:
        return None
    reading, bits, final, task, generation, row, attempt = found.groups()
    return Rid(int(bits, 16), final == "1", task, int(generation), int(row), int(attempt), Reading(reading))
