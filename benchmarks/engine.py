"""The engine as a worker runs it, and the two passes over rows that are compared: plain prefill and extraction.

Both send the same batches under the same in-flight budget to the same process. A plain pass names its requests so that
the capture takes them for somebody else's; an extraction names them as a worker does and ends with a sealed shard.
"""

import asyncio
import itertools
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.rows import Ids, spread
from layertap import boundaries
from layertap.layout import ShardLayout
from layertap.schemas.jobs import Final, Preset
from layertap.schemas.tasks import Lease, TaskKind
from worker import models, shard_writer
from worker.capture.rid import Rid, mask
from worker.capture.session import Ledger, Session, publish, sessions_dir, withdraw
from worker.engine import processes
from worker.engine.engine import MARK, Engine, EngineLaunchError
from worker.engine.self_check import check
from worker.engine.spec import EngineSpec, chunk_tokens
from worker.in_hand import inflight_tokens
from worker.inflight import InFlight
from worker.leases import HeldLease
from worker.prefill import Prefill, batches
from worker.shard_writer import ShardRows
from worker.watchdog.evidence import redact, tail

LAUNCH_SECONDS = 240.0
PREFILL_SECONDS = 120.0
_WARM_UP_ROWS = 6
_count = itertools.count()


def threads() -> int:
    """OpenMP threads that the engine, and whatever it is compared with, is told to use: the cores there are."""
    return len(os.sched_getaffinity(0))


@dataclass(frozen=True)
class Passes:
    """A serving engine and the rows to send it. The states are those of preset `eagle3`, and the final one."""

    engine: Engine
    budget: InFlight
    rows: Sequence[Ids]
    layers: list[int]
    folder: Path

    @property
    def tokens(self) -> int:
        """Tokens of a pass."""
        return sum(len(row) for row in self.rows)

    @property
    def layout(self) -> ShardLayout:
        """The shard that an extraction writes."""
        report = self.engine.reports[0]
        lengths = [len(row) for row in self.rows]
        return ShardLayout.of(lengths, self.layers, report.hidden_size, report.dtype, True)

    @property
    def shard(self) -> Path:
        """Where an extraction leaves it."""
        return self.folder / "shard.safetensors"

    async def plain(self) -> float:
        """Prefills every row and keeps nothing; seconds until the engine has answered the last."""
        number = next(_count)
        began = time.perf_counter()
        async with asyncio.TaskGroup() as sending:
            for batch in batches([len(row) for row in self.rows], self._batch_tokens):
                tokens = sum(len(self.rows[i]) for i in batch)
                await self.budget.acquire(tokens)
                task = sending.create_task(self._send_plain(batch, number))
                task.add_done_callback(partial(self._release, tokens))
        return time.perf_counter() - began

    async def extract(self) -> float:
        """Prefills every row into a shard; seconds from the empty file to the durable one with its sha256 known."""
        self.shard.unlink(missing_ok=True)
        layout = self.layout
        ids = np.concatenate(self.rows)
        rows = ShardRows(ids, np.ones(len(ids), np.uint8), np.arange(len(self.rows), dtype=np.int64))
        began = time.perf_counter()
        partial_file = await asyncio.to_thread(shard_writer.lay_out, self.shard, layout, rows)
        await self._prefill(layout, partial_file)
        await asyncio.to_thread(shard_writer.seal, partial_file, self.shard)
        return time.perf_counter() - began

    async def _prefill(self, layout: ShardLayout, file: Path) -> None:
        run_dir = self.engine.directory
        rid = Rid(mask(self.layers), True, f"task_bench{next(_count)}", 1, 0, 0)
        ledger = Ledger.create(sessions_dir(run_dir) / f"{rid.session}.ledger", layout.lengths)
        publish(run_dir, rid.session, Session.at(file, ledger, layout))
        work = Prefill(self.engine.client, self.budget, _held(rid, self.layers), ledger, rid, self._batch_tokens)
        try:
            await work.run(self.rows, range(len(self.rows)))
        finally:
            ledger.close_session()
            withdraw(run_dir, rid.session)
        if work.failures or ledger.nonfinite.any():
            raise RuntimeError(f"rows without states: {work.failures}, {ledger.nonfinite.sum()} tokens not finite")

    async def _send_plain(self, batch: list[int], number: int) -> None:
        rids = [f"plain-{number}-{i:05d}." for i in batch]
        outcomes = await self.engine.client.prefill(rids, [self.rows[i] for i in batch])
        if any(outcome is not None for outcome in outcomes):
            raise RuntimeError(f"the engine aborted a row: {outcomes}")

    def some(self, tokens: int, fewest: int) -> "Passes":
        """The same with about `tokens` tokens of the rows, at least `fewest` rows."""
        return replace(self, rows=spread(self.rows, tokens, fewest))

    @property
    def _batch_tokens(self) -> int:
        return chunk_tokens(self.engine.spec.chunked_prefill_size, self.engine.spec.device)

    def _release(self, tokens: int, _: "asyncio.Task[None]") -> None:
        self.budget.release(tokens)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """The engine's processes stopped: an idle scheduler polls, which would slow whatever else is measured."""
        pids = processes.marked(MARK, str(self.engine.directory), prefix=True)
        processes.send(pids, signal.SIGSTOP)
        try:
            yield
        finally:
            processes.send(pids, signal.SIGCONT)


@asynccontextmanager
async def serving(model: Path, rows: Sequence[Ids], folder: Path) -> AsyncIterator[Passes]:
    """The engine with the settings of a worker on this CPU, self-checked and warm; ended at the end."""
    os.environ["OMP_NUM_THREADS"] = str(threads())
    facts = models.facts(model)
    engine = Engine(EngineSpec.of(facts, "cpu"), folder / "engine", PREFILL_SECONDS)
    try:
        await engine.launch(LAUNCH_SECONDS)
    except EngineLaunchError as error:
        raise RuntimeError(f"{error}\n{redact(tail(engine.log_path, 60))}") from error
    try:
        await check(engine, facts)
        layers = boundaries.resolve(None, Preset.EAGLE3, facts.num_layers)
        budget = InFlight(inflight_tokens(0, chunk_tokens(0, "cpu"), "cpu"))
        passes = Passes(engine, budget, rows, layers, folder)
        small = passes.some(0, _WARM_UP_ROWS)
        await small.plain()
        await small.extract()
        yield passes
    finally:
        await engine.stop()


def _held(rid: Rid, layers: list[int]) -> HeldLease:
    lease = Lease(
        task=rid.task,
        kind=TaskKind.SHARD,
        job="job_bench",
        generation=rid.generation,
        secret="",
        lease_seconds=3600.0,
        model="",
        model_path="",
        layers=layers,
        final=Final.POST_NORM,
    )
    return HeldLease(lease, "wrk_bench", time.monotonic() + lease.lease_seconds)
