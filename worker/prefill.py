"""Streams a shard's rows through the engine and sees each one written.

Rows go out in small batches under the in-flight budget. A row is done when the ledger shows its last byte written, not
when the engine has answered. A row that the engine refuses or never answers, or whose states never arrive, is given up
by itself; that the engine itself hangs is for the watchdog to say, which is quicker.
"""

import asyncio
import errno
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import numpy.typing as npt

from worker.capture.rid import Rid
from worker.capture.session import Ledger
from worker.engine.client import (
    EngineClient,
    EngineDownError,
    EngineGoneError,
    EngineRefusedError,
    RowsFailedError,
    RowsTimedOutError,
)
from worker.inflight import InFlight
from worker.leases import HeldLease

logger = logging.getLogger(__name__)

_BATCH_ROWS = 32
_WRITE_POLL_FIRST_S, _WRITE_POLL_MOST_S = 0.001, 0.02
_WRITE_STALL_S = 60.0
_ATTEMPTS = 2


class StorageWriteError(Exception):
    """The capture could not write the shard."""

    def __init__(self, number: int) -> None:
        super().__init__(f"writing the shard failed: {errno.errorcode.get(number, number)}")
        self.full = number in (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True)
class RowFailure:
    """Why a row has no states."""

    code: str
    reason: str


@dataclass
class Prefill:
    """One shard's way through the engine. `rid` names row 0, attempt 0; `failures` is by row index.

    `sent` counts how often the lease sent each row: the engine may still know an id that has failed, and refuses it a
    second time. `queue` says how many runs of states the shard's writer has been given, and is through with.
    """

    client: EngineClient
    budget: InFlight
    held: HeldLease
    ledger: Ledger
    rid: Rid
    batch_tokens: int
    failures: dict[int, RowFailure] = field(default_factory=dict)
    sent: Counter[int] = field(default_factory=Counter)
    queue: Callable[[], tuple[int, int]] = lambda: (0, 0)
    in_flight: dict[int, str] = field(default_factory=dict)

    async def run(self, rows: Sequence[npt.NDArray[np.int32]], todo: Sequence[int]) -> None:
        """Prefills the rows [S_i] with indices `todo`, beside whatever else is in flight.

        Raises `EngineDownError` or `StorageWriteError`; rows that fail alone are noted in `failures`. After an error
        `in_flight` holds the rows that were under way, and their ids.
        """
        try:
            async with asyncio.TaskGroup() as sending:
                for batch in batches([len(rows[i]) for i in todo], self.batch_tokens):
                    await self.held.confirmed()
                    chosen = [todo[i] for i in batch]
                    tokens = sum(len(rows[i]) for i in chosen)
                    since = await self.budget.acquire(tokens)
                    task = sending.create_task(self._send(chosen, rows, attempt=0))
                    # Not in the task itself: one that is cancelled before its first step would never give it back.
                    task.add_done_callback(partial(self._give_back, tokens, since))
        except ExceptionGroup as group:
            raise _first(group) from group

    async def run_alone(self, rows: Sequence[npt.NDArray[np.int32]], todo: Sequence[int]) -> None:
        """Like `run`, with nothing else in flight.

        Raises `EngineGoneError` where the engine had ended before any of the rows was sent.
        """
        await self.held.confirmed()
        async with self.budget.alone():
            # What was alone in flight before may just have killed it.
            await self.client.answers()
            left = [row for row in todo if row not in self.failures]
            for batch in batches([len(rows[i]) for i in left], self.batch_tokens):
                await self._send([left[i] for i in batch], rows, attempt=0)

    async def abort(self, rows: Iterable[int]) -> None:
        """Ends these rows, which are in flight, in the engine. Raises `EngineDownError`."""
        # One by one: SGLang 0.5.23 knows no prefixes where it has one tokenizer.
        for rid in [self.in_flight[row] for row in rows]:
            await self.client.abort(rid)

    def _give_back(self, tokens: int, since: float, _: asyncio.Task[None]) -> None:
        self.budget.release(tokens, since)

    async def _send(self, batch: list[int], rows: Sequence[npt.NDArray[np.int32]], attempt: int) -> None:
        rids = [self._next_rid(row) for row in batch]
        self.in_flight.update(zip(batch, rids, strict=True))
        try:
            outcomes = await self.client.prefill(rids, [rows[i] for i in batch])
        except EngineRefusedError as error:
            self._landed(batch)
            await self._refused(batch, rows, attempt, str(error))
            return
        except RowsTimedOutError as error:
            await self._timed_out(batch, rows, attempt, error.seconds)
            return
        except RowsFailedError as error:
            await self._failed(batch, rows, attempt, error)
            return
        # The engine has answered for these: whatever kills it from now on is not theirs.
        self._landed(batch)
        answered = [row for row, outcome in zip(batch, outcomes, strict=True) if outcome is None]
        missing = await self._written(answered)
        why = {
            row: RowFailure("capture_incomplete", "the engine answered but not all states arrived") for row in missing
        }
        for row, outcome in zip(batch, outcomes, strict=True):
            if outcome is not None:
                why[row] = RowFailure("engine_aborted", outcome)
        await self._once_more(why, rows, attempt)

    async def _failed(
        self, batch: list[int], rows: Sequence[npt.NDArray[np.int32]], attempt: int, error: RowsFailedError
    ) -> None:
        """Tries the rows of a failed request once more, where the engine answers for others still."""
        try:
            await self.client.answers()
        except EngineGoneError as gone:
            raise EngineDownError(f"{error}; then {gone}") from error
        # A list fails for one of its rows; the others may be under way still.
        await self._late(batch, rows, attempt, RowFailure("engine_aborted", str(error)))

    async def _timed_out(
        self, batch: list[int], rows: Sequence[npt.NDArray[np.int32]], attempt: int, seconds: float
    ) -> None:
        reason = f"the engine gave no answer within {seconds:g} s, with this row alone in its request"
        await self._late(batch, rows, attempt, RowFailure("timed_out", reason))

    async def _late(
        self, batch: list[int], rows: Sequence[npt.NDArray[np.int32]], attempt: int, failure: RowFailure
    ) -> None:
        """Aborts the rows of a request that have not arrived, and no other; those that have are done."""
        late = [row for row in batch if not self.ledger.complete(row)]
        logger.warning("%s: %s: %d of %d rows are late", self.rid.session, failure.code, len(late), len(batch))
        await self.abort(late)
        self._landed(batch)
        await self._once_more(dict.fromkeys(late, failure), rows, attempt)

    async def _once_more(self, why: dict[int, RowFailure], rows: Sequence[npt.NDArray[np.int32]], attempt: int) -> None:
        """Sends the rows that did not come through again, each in a request of its own, or gives them up."""
        if attempt + 1 >= _ATTEMPTS:
            self.failures.update(why)
            return
        try:
            # Side by side, or rows that never answer would each be waited for in turn.
            async with asyncio.TaskGroup() as sending:
                for row in why:
                    sending.create_task(self._send([row], rows, attempt + 1))
        except ExceptionGroup as group:
            raise _first(group) from group

    async def _refused(
        self, batch: list[int], rows: Sequence[npt.NDArray[np.int32]], attempt: int, reason: str
    ) -> None:
        if len(batch) == 1:
            self.failures[batch[0]] = RowFailure("engine_refused", reason)
            return
        # The engine refuses a whole list for one row in it; alone, the others are taken.
        for row in batch:
            await self._send([row], rows, attempt)

    async def _written(self, rows: list[int]) -> list[int]:
        """Waits until the rows are in the file; returns those that stopped getting there.

        Raises `StorageWriteError` for a write that failed, or that has not come back for a minute or two.
        """
        pause, advanced, seen = _WRITE_POLL_FIRST_S, time.monotonic(), -1
        mark: int | None = None
        while left := [row for row in rows if not self.ledger.complete(row)]:
            if self.ledger.errno:
                raise StorageWriteError(self.ledger.errno)
            tokens = int(self.ledger.written.sum())
            if tokens != seen:
                advanced, seen, mark = time.monotonic(), tokens, None
            elif time.monotonic() - advanced > _WRITE_STALL_S:
                given, done = self.queue()
                if self.ledger.in_writing or (mark is not None and done < mark):
                    # The storage stands still, which is no fault of these rows.
                    raise StorageWriteError(errno.ETIMEDOUT)
                if mark is None and done < given:
                    # They may wait behind a write to another file.
                    mark, advanced = given, time.monotonic()
                else:
                    return left
            await asyncio.sleep(pause)
            pause = min(2 * pause, _WRITE_POLL_MOST_S)
        return []

    def _next_rid(self, row: int) -> str:
        self.sent[row] += 1
        return str(replace(self.rid, row=row, attempt=self.sent[row] - 1))

    def _landed(self, batch: list[int]) -> None:
        for row in batch:
            self.in_flight.pop(row, None)


def batches(lengths: Sequence[int], batch_tokens: int) -> Iterator[list[int]]:
    """Row indices in order, as many a batch as fit `batch_tokens` (at least one) and the row limit."""
    batch: list[int] = []
    tokens = 0
    for index, length in enumerate(lengths):
        if batch and (tokens + length > batch_tokens or len(batch) == _BATCH_ROWS):
            yield batch
            batch, tokens = [], 0
        batch.append(index)
        tokens += length
    if batch:
        yield batch


def _first(group: ExceptionGroup[Exception]) -> Exception:
    error: Exception = group
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return error
