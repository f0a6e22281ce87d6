"""The worker's own extraction without a service: the same prefill, layout, capture and seal, without leases.

A shard is deleted once it is committed, as by a consumer that is through with it: a run may be longer than the disk.
"""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np

from benchmarks.h200.memory import Look
from benchmarks.h200.shapes import VOCAB
from layertap.layout import token_bytes
from layertap.schemas.jobs import Final
from layertap.schemas.shards import Pins
from layertap.schemas.tasks import Lease, ShardCommit, ShardSpec, TaskKind
from layertap.schemas.workers import ModelFacts
from worker.engine.engine import Engine
from worker.extract import Extraction
from worker.in_hand import inflight_tokens, shard_lanes
from worker.inflight import InFlight
from worker.leases import HeldLease
from worker.plan.tokens import TokenRowsWriter
from worker.prefill import batches

SHARD_BYTES = 1 << 30
"""The service's default."""
PINS = Pins(model_hash="-", tokenizer_hash="-", chat_template_hash=None, engine_version="-", dtype="BF16")


def in_flight(chunk: int) -> InFlight:
    """The budget that a worker on a GPU has by default."""
    return InFlight(inflight_tokens(0, chunk, "cuda"))


@dataclass
class Extracted:
    """How long an extraction took, in seconds, and what it wrote; `commits` are (seconds since its start, tokens).

    `looks` is what was held meanwhile.
    """

    seconds: float = 0.0
    tokens: int = 0
    nbytes: int = 0
    commits: list[tuple[float, int]] = field(default_factory=list)
    looks: list[Look] = field(default_factory=list)

    @property
    def steady(self) -> float | None:
        """Tokens a second from the first commit to the last, which leaves out what nothing overlaps: the first layouts
        and the last seal, seconds of any job. None for fewer than ten shards."""
        if len(self.commits) < 10:
            return None
        return sum(tokens for _, tokens in self.commits[1:]) / (self.commits[-1][0] - self.commits[0][0])


class _Service:
    """Takes commits and consumes the shards; nothing else is asked of it."""

    def __init__(self, storage: Path) -> None:
        self.done = Extracted()
        self.began = time.monotonic()
        self._storage = storage

    async def commit_shard(self, task: str, message: ShardCommit, patience: float) -> None:
        self.done.tokens += message.tokens
        self.done.nbytes += message.bytes
        self.done.commits.append((time.monotonic() - self.began, message.tokens))
        await asyncio.to_thread(os.unlink, self._storage / f"shards/{task}.safetensors")

    async def row_errors(self, *args: object) -> None:
        raise RuntimeError(f"a row failed: {args}")


class _Host:
    """One engine that is there already."""

    def __init__(self, engine: Engine, budget: InFlight) -> None:
        self.budget = budget
        self._engine = engine

    @asynccontextmanager
    async def use(self, model: str) -> AsyncIterator[Engine]:
        """The engine, whatever the model is called."""
        yield self._engine

    async def ensure(self, facts: ModelFacts) -> None:
        """A benchmark whose engine dies is over."""
        raise RuntimeError("the engine died")


async def plain(engine: Engine, rows: list[np.ndarray], chunk: int, extra: dict[str, Any] | None = None) -> float:
    """Seconds to prefill the rows with foreign request ids, which the capture leaves alone."""
    began, budget = time.monotonic(), in_flight(chunk)

    async def send(batch: list[int], tokens: int) -> None:
        try:
            rids = [f"plain-{began}-{i}" for i in batch]
            await engine.client.prefill(rids, [rows[i] for i in batch], **(extra or {}))
        finally:
            budget.release(tokens)

    async with asyncio.TaskGroup() as group:
        for batch in batches([len(row) for row in rows], chunk):
            tokens = sum(len(rows[i]) for i in batch)
            await budget.acquire(tokens)
            group.create_task(send(batch, tokens))
    return time.monotonic() - began


async def extract(
    engine: Engine, rows: list[np.ndarray], chunk: int, layers: list[int], storage: Path, times: int = 1
) -> Extracted:
    """Extracts the rows into sealed shards (fsync and sha256 included), `times` over."""
    with TokenRowsWriter(storage / "tokens") as writer:
        for index, row in enumerate(rows):
            writer.add(index, row, np.ones(len(row), np.uint8))
        writer.finish()
    per_token = token_bytes(len(layers), engine.reports[0].hidden_size, engine.reports[0].dtype, True)
    service = _Service(storage)
    keeper = SimpleNamespace(phase=lambda *args, **kwargs: None)
    host = _Host(engine, in_flight(chunk))
    extraction = Extraction(
        cast(Any, service), cast(Any, keeper), cast(Any, host), _facts(engine), storage, 1.0, asyncio.Lock()
    )
    shards = list(_shards(rows, per_token))
    leases = (_lease(spec, layers, f"task_{again}x{spec[0]}") for again in range(times) for spec in shards)

    async def lane() -> None:
        for lease in leases:
            await extraction.run(HeldLease(lease, "wrk_benchmark", float("inf")))

    async with asyncio.TaskGroup() as group:
        for _ in range(shard_lanes(0, "cuda")):
            group.create_task(lane())
    service.done.seconds = time.monotonic() - service.began
    if service.done.tokens != times * sum(map(len, rows)):
        raise RuntimeError(f"{service.done.tokens} tokens were written, not {times} times those of the rows")
    return service.done


def _facts(engine: Engine) -> ModelFacts:
    report = engine.reports[0]
    return ModelFacts(
        name="-", path=engine.spec.model_path, num_layers=report.num_layers, hidden_size=report.hidden_size,
        vocab_size=VOCAB, max_row_tokens=1 << 20, pins=PINS,
    )  # fmt: skip


def _shards(rows: list[np.ndarray], per_token: int) -> Iterator[tuple[int, int, int, int]]:
    """(first row, rows, tokens, bytes) of each shard."""
    first, tokens = 0, 0
    for index, row in enumerate(rows):
        tokens += len(row)
        if tokens * per_token >= SHARD_BYTES or index == len(rows) - 1:
            yield first, index + 1 - first, tokens, tokens * per_token
            first, tokens = index + 1, 0


def _lease(spec: tuple[int, int, int, int], layers: list[int], task: str) -> Lease:
    first, rows, tokens, nbytes = spec
    shard = ShardSpec(
        index=first, tokens_dir="tokens", first_row=first, rows=rows, tokens=tokens, bytes=nbytes,
        file=f"shards/{task}.safetensors", pins=PINS, dataset_sha256="-",
    )  # fmt: skip
    return Lease(
        task=task, kind=TaskKind.SHARD, job="job_benchmark", generation=1, secret="-", lease_seconds=1e9,
        model="-", model_path="-", layers=layers, final=Final.POST_NORM, shard=shard,
    )  # fmt: skip
