"""A shard's prefill over as many engines as it takes: rows that are written stay written when an engine dies.

After a death the rows that were in flight are tried again with nothing beside them, halved while the engine dies again,
until the row that kills it stands alone and is set aside. Everything else goes on.
"""

import asyncio
import errno
import logging
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

from layertap.layout import ShardLayout
from layertap.schemas.jobs import Final
from layertap.schemas.workers import ModelFacts
from worker.capture.counters import Counters, writer_of
from worker.capture.rid import Rid, mask
from worker.capture.session import Ledger, Session, publish, sessions_dir, withdraw
from worker.engine.client import EngineDownError, EngineGoneError
from worker.engine.engine import Engine
from worker.engine.host import EngineHost, NoEngineError
from worker.engine.self_check import READINGS
from worker.engine.spec import chunk_tokens
from worker.leases import HeldLease, LeaseKeeper
from worker.prefill import Prefill, RowFailure, StorageWriteError
from worker.suspects import Suspects

logger = logging.getLogger(__name__)

_PREFILL_GRACE_S = 60.0
_PAUSE_S, _PAUSE_MOST_S = 1.0, 8.0
_INCIDENT_S = 300.0
"""Longer than the watchdog takes to miss a port, to gather evidence, to end its engine and to report."""
_LAST_WRITE_S, _LAST_WRITE_POLL_S = 60.0, 0.002
_MOST_ENGINES = 40
"""Engines one lease may wear out: enough to find several rows that kill among many in flight."""


class EngineKeepsDyingError(Exception):
    """The engine died too often for one lease."""


@dataclass
class ShardPrefill:
    """One lease's way through the engine. `rows` are the token ids [S_i], int32; `partial` is the laid-out file."""

    host: EngineHost
    keeper: LeaseKeeper
    facts: ModelFacts
    held: HeldLease
    layout: ShardLayout
    partial: Path
    rows: Sequence[npt.NDArray[np.int32]]
    restart_seconds: float
    failures: dict[int, RowFailure] = field(default_factory=dict)
    engine: dict[str, object] = field(default_factory=dict)
    _suspects: Suspects = field(default_factory=Suspects)
    _guilty: dict[int, Engine] = field(default_factory=dict)
    """Rows found guilty, with the engine that each killed."""
    _written: set[int] = field(default_factory=set)
    _nonfinite: dict[int, int] = field(default_factory=dict)
    _sent: Counter[int] = field(default_factory=Counter)

    async def run(self) -> dict[int, RowFailure]:
        """Why each failed row failed, by index; every other row is in the file, and `engine` says what wrote it.

        Raises `EngineKeepsDyingError`, `EngineUnavailableError`, `StorageWriteError`.
        """
        pause = _PAUSE_S
        met: Engine | None = None
        for _ in range(_MOST_ENGINES):
            try:
                async with self.host.use(self.facts.name) as engine:
                    pause = min(2 * pause, _PAUSE_MOST_S) if engine is met else _PAUSE_S
                    met = engine
                    await self._with(engine)
                break
            except (EngineDownError, NoEngineError) as error:
                logger.warning("%s: %s", self.held.lease.task, error)
            self.keeper.phase(self.held, "engine restart", self.restart_seconds)
            # It may be taken for alive until the watchdog misses its port, and engines must not be counted that never
            # were: all pauses together are longer than that takes.
            await asyncio.sleep(pause)
            await self.host.ensure(self.facts)
            await self._set_guilty_aside()
        else:
            raise EngineKeepsDyingError(f"the engine died {_MOST_ENGINES} times under this task")
        await self._wait_for_incidents()
        for row in self._guilty:
            self.failures.setdefault(row, RowFailure("kills_engine", "the engine failed with this row alone in flight"))
        for row, count in self._nonfinite.items():
            self.failures.setdefault(row, RowFailure("non_finite", f"{count} tokens hold a NaN or an infinity"))
        return self.failures

    async def _with(self, engine: Engine) -> None:
        """Prefills what is left on this engine. Raises `EngineDownError` with the suspects brought up to date."""
        lease = self.held.lease
        final = lease.final is Final.POST_NORM
        rid = Rid(mask(lease.layers), final, lease.task, lease.generation, 0, 0, READINGS[engine.strategy])
        ledger = self._ledger(engine, rid)
        publish(engine.directory, rid.session, Session.at(self.partial, ledger, self.layout))
        self.keeper.phase(self.held, "prefill", _PREFILL_GRACE_S, ledger.path)
        batch_tokens = chunk_tokens(engine.spec.chunked_prefill_size, engine.spec.device)
        work = Prefill(engine.client, self.host.budget, self.held, ledger, rid, batch_tokens, self.failures, self._sent)
        if (counters := Counters.open(engine.directory)) is not None:
            work.queue = partial(counters.given_and_done, writer_of(rid.session))
        finished = False
        try:
            await self._clear_suspects(work, engine)
            # Sent again, a row would still be on its way into the file when it already counts as written.
            self._remember(ledger)
            try:
                await work.run(self.rows, self._left())
            except EngineDownError:
                self._suspects.accuse(work.in_flight)
                raise
            finished = True
            self.engine = engine.describe()
            self.host.budget.recover()
        finally:
            self._remember(ledger)
            ledger.close_session()
            withdraw(engine.directory, rid.session)
            if not finished:
                with suppress(EngineDownError):
                    await asyncio.shield(work.abort(work.in_flight))
        await _at_rest(ledger)

    async def _clear_suspects(self, work: Prefill, engine: Engine) -> None:
        while self._suspects.group:
            try:
                await work.run_alone(self.rows, [row for row in self._suspects.group if row not in self._written])
            except EngineGoneError:
                raise
            except EngineDownError:
                if (row := self._suspects.convicted()) is not None:
                    self._guilty[row] = engine
                raise
            self._suspects.cleared()

    async def _wait_for_incidents(self) -> None:
        """The last row may have been found guilty before the watchdog found its engine dead."""
        began = time.monotonic()
        while not self._guilty.keys() <= self.failures.keys() and time.monotonic() - began < _INCIDENT_S:
            self.keeper.phase(self.held, "incident", _INCIDENT_S)
            await asyncio.sleep(_PAUSE_S)
            await self._set_guilty_aside()

    async def _set_guilty_aside(self) -> None:
        """Notes the rows found guilty, with the incident, which is known once the dead engine is over with."""
        for row, engine in self._guilty.items():
            if row not in self.failures and (incident := await self.host.blame_row(engine)) is not None:
                reason = f"the engine died or hung with this row alone in flight; see incident {incident}"
                self.failures[row] = RowFailure("kills_engine", reason)

    def _left(self) -> list[int]:
        done = self._written | self.failures.keys() | self._guilty.keys()
        return [i for i in range(len(self.rows)) if i not in done]

    def _ledger(self, engine: Engine, rid: Rid) -> Ledger:
        ledger = Ledger.create(sessions_dir(engine.directory) / f"{rid.session}.ledger", self.layout.lengths)
        for row in self._written:
            ledger.written[row] = ledger.lengths[row]
        return ledger

    def _remember(self, ledger: Ledger) -> None:
        for row in np.flatnonzero(ledger.written == ledger.lengths).tolist():
            self._written.add(row)
            if ledger.nonfinite[row]:
                self._nonfinite[row] = int(ledger.nonfinite[row])


async def _at_rest(ledger: Ledger) -> None:
    """Waits for the write under way when the session was closed, as of a row given up. Raises `StorageWriteError`."""
    closed = time.monotonic()
    while ledger.in_writing:
        if time.monotonic() - closed > _LAST_WRITE_S:
            raise StorageWriteError(errno.ETIMEDOUT)
        await asyncio.sleep(_LAST_WRITE_POLL_S)
