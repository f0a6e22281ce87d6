"""Addressing: which rows of a forward batch are ours, and where in their sample they lie. Pure.

A prefill batch concatenates pieces of requests: request j contributes `seq_lens[j]` rows of the batch, which are the
positions `prefix_lens[j] …` of its sample. Chunked prefill is just a piece with a prefix.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from worker.capture.rid import Reading, Rid, parse


@dataclass(frozen=True, slots=True)
class Piece:
    """Batch rows `[start, start + count)` are positions `[position, position + count)` of the row named by `rid`."""

    rid: Rid
    start: int
    count: int
    position: int


def pieces(rids: Sequence[object], prefix_lens: Sequence[int], seq_lens: Sequence[int]) -> list[Piece]:
    """Our pieces of a batch, in batch order. Raises `ValueError` if the three sequences disagree in length."""
    found: list[Piece] = []
    start = 0
    for rid, prefix, count in zip(rids, prefix_lens, seq_lens, strict=True):
        ours = parse(rid)
        if ours is not None and count > 0:
            found.append(Piece(ours, start, int(count), int(prefix)))
        start += count
    return found


def runs(found: Sequence[Piece]) -> list[list[Piece]]:
    """The pieces grouped into runs that are adjacent in the batch and ask for the same states."""
    grouped: list[list[Piece]] = []
    for piece in found:
        last = grouped[-1][-1] if grouped else None
        if last is not None and last.start + last.count == piece.start and _asked(last) == _asked(piece):
            grouped[-1].append(piece)
        else:
            grouped.append([piece])
    return grouped


def cut(run: Sequence[Piece], most_rows: int) -> list[list[Piece]]:
    """A run as runs of at most `most_rows` batch rows, a piece that lies across being cut into two."""
    parts: list[list[Piece]] = [[]]
    room = most_rows
    for whole in run:
        piece = whole
        while piece.count > room:
            if room:
                parts[-1].append(replace(piece, count=room))
                piece = Piece(piece.rid, piece.start + room, piece.count - room, piece.position + room)
            parts.append([])
            room = most_rows
        parts[-1].append(piece)
        room -= piece.count
    return parts


def _asked(piece: Piece) -> tuple[Reading, int, bool]:
    return piece.rid.reading, piece.rid.boundaries, piece.rid.final
