"""What becomes of a tokenised row before it has a place in a shard: its length, and what of it is supervised. Pure."""

import numpy as np

from layertap.rows import RowError
from layertap.schemas.jobs import LossMask, Overflow
from worker.plan.render import Ids, Mask


class OverflowRefusedError(Exception):
    """A row is too long and the job said `overflow: "error"`: nothing of the job is extracted."""


def limit(max_tokens: int | None, engine_limit: int) -> int:
    """The longest row in tokens: the job's `max_tokens`, never beyond what the engine accepts."""
    return engine_limit if max_tokens is None else min(max_tokens, engine_limit)


def settle(ids: Ids, mask: Mask, longest: int, overflow: Overflow, loss_mask: LossMask) -> tuple[Ids, Mask]:
    """The row as it will be extracted: at most `longest` tokens, at least one of them supervised.

    `truncate` keeps the first tokens. `skip` raises `RowError` with code `too_long`, so that the row is left out and
    listed; `error` raises `OverflowRefusedError`, which ends the job. A row of no tokens is a `RowError` with code
    `empty_row`, one without a supervised token `nothing_supervised`. One token is enough for a row.
    """
    if not len(ids):
        raise RowError("empty_row", "the row has no tokens")
    if len(ids) > longest:
        if overflow is Overflow.ERROR:
            raise OverflowRefusedError(f"{len(ids)} tokens, {longest} are allowed; overflow is error")
        if overflow is Overflow.SKIP:
            raise RowError("too_long", f"{len(ids)} tokens, {longest} are allowed; overflow is skip")
        ids, mask = ids[:longest], mask[:longest]
    if loss_mask is LossMask.ALL:
        mask = np.ones(len(ids), np.uint8)
    if not mask.any():
        raise RowError(
            "nothing_supervised",
            f"no token of the row's {len(ids)} is supervised; "
            'give it an assistant turn within max_tokens, or use loss_mask "all"',
        )
    return ids, mask
