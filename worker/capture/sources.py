"""Sources: the places at which a boundary can be read, and which of them a request is after. Pure.

One boundary can be read at several places of a model that should agree. A job's rows take one of them; the rows of the
self-check take all, from the same forward, so that each is the others' witness.
"""

from collections.abc import Iterable
from enum import StrEnum
from functools import lru_cache

from worker.capture.addressing import Piece
from worker.capture.rid import Reading, unmask


class Source(StrEnum):
    """Where a state comes from.

    `hooks`: a block's entry, and the final norm for boundary L. `exits`: what the block before it returned.
    `collect`: the model's own `layers_to_capture`; boundaries 0 and L, which that does not reach, as `hooks`.
    `bare`: like `exits`, with the residual left out on purpose, to recognise a reading that forgot it. `normed`:
    the model's final norm applied once more to boundary L, as the outermost source found it.
    """

    HOOKS = "hooks"
    EXITS = "exits"
    COLLECT = "collect"
    BARE = "bare"
    NORMED = "normed"


State = tuple[Source, int]
"""A boundary as a source finds it."""


@lru_cache(maxsize=8)
def of_check(layers: int, hooks: bool, collects: bool) -> tuple[State, ...]:
    """What a row of the self-check holds, in this order, for a model of `layers` blocks.

    `hooks` says whether the blocks bear hooks, `collects` whether the model collects by itself.
    """
    inner = range(1, layers)
    found: list[State] = []
    if hooks:
        found += [(Source.HOOKS, k) for k in range(layers + 1)]
        found += [(Source.EXITS, k) for k in range(1, layers + 1)]
    if collects:
        found += [(Source.COLLECT, k) for k in (inner if hooks else range(layers + 1))]
    if hooks and collects:
        found += [(Source.BARE, k) for k in inner]
    return (*found, (Source.NORMED, layers))


_SOURCE = {Reading.HOOKS: Source.HOOKS, Reading.COLLECT: Source.COLLECT}


def of(piece: Piece, layers: int, hooks: bool, collects: bool) -> tuple[State, ...]:
    """What that piece's row asks for, in the order in which its tokens hold it."""
    if piece.rid.reading is Reading.CHECK:
        return of_check(layers, hooks, collects)
    return _of_job(piece.rid.reading, piece.rid.boundaries)


@lru_cache(maxsize=256)
def _of_job(reading: Reading, bits: int) -> tuple[State, ...]:
    return tuple((_SOURCE[reading], k) for k in unmask(bits))


def wanted(found: Iterable[Piece], layers: int, hooks: bool, collects: bool) -> frozenset[State]:
    """The union of what the pieces ask for.

    Depends on the request ids alone, so that every rank of a tensor-parallel group reads the same states.
    """
    return frozenset(state for piece in found for state in of(piece, layers, hooks, collects))
