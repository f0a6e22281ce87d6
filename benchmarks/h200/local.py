"""The worker's own extraction without a service: the same prefill, layout, capture and seal, without leases."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np

from benchmarks.h200.shapes import VOCAB
from layertap.layout import token_bytes
from layertap.schemas.jobs import Final
from layertap.schemas.shards import Pins
from layertap.schemas.tasks import Lease, ShardCommit, ShardSpec, TaskKind
from layertap.schemas.workers import ModelFacts
from worker.engine.engine import Engine
from worker.extract import Extraction
from worker.inflight import InFlight
from worker.leases import HeldLease
from worker.plan.tokens import TokenRowsWriter
from worker.prefill import batches

SHARD_BYTES = 256 << 20
"""A quarter of the default: the first layout and the last seal weigh more in seconds than in hours."""
LANES = 3
PINS = Pins(model_hash="-", tokenizer_hash="-", chat_template_hash=None, engine_version="-", dtype="BF16")


class _Service:
    """Takes commits; nothing else is asked of it."""

    def __init__(self) -> None:
        self.commits: list[ShardCommit] = []

    async def commit_shard(self, task: str, message: ShardCommit, patience: float) -> None:
        self.commits.append(message)

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


async def plain(engine: Engine, budget: InFlight, rows: list[np.ndarray], chunk: int, extra: dict[str, Any]) -> float:
    """Seconds to prefill the rows with foreign request ids, which the capture leaves alone."""
    began = time.monotonic()

    async def send(batch: list[int], tokens: int) -> None:
        try:
            await engine.client.prefill([f"plain-{began}-{i}" for i in batch], [rows[i] for i in batch], **extra)
        finally:
            budget.release(tokens)

    async with asyncio.TaskGroup() as group:
        for batch in batches([len(row) for row in rows], chunk):
            tokens = sum(len(rows[i]) for i in batch)
            await budget.acquire(tokens)
            group.create_task(send(batch, tokens))
    return time.monotonic() - began


async def extract(
    engine: Engine, budget: InFlight, rows: list[np.ndarray], layers: list[int], storage: Path
) -> tuple[float, int]:
    """Seconds until the rows lie in sealed shards (fsync and sha256 included), and their bytes."""
    with TokenRowsWriter(storage / "tokens") as writer:
        for index, row in enumerate(rows):
            writer.add(index, row, np.ones(len(row), np.uint8))
        writer.finish()
    per_token = token_bytes(len(layers), engine.reports[0].hidden_size, engine.reports[0].dtype, True)
    leases = [_lease(spec, layers) for spec in _shards(rows, per_token)]
    service = _Service()
    keeper = SimpleNamespace(phase=lambda *args, **kwargs: None)
    extraction = Extraction(
        cast(Any, service), cast(Any, keeper), cast(Any, _Host(engine, budget)), _facts(engine), storage, 1.0
    )
    lanes = asyncio.Semaphore(LANES)

    async def work(lease: Lease) -> None:
        async with lanes:
            await extraction.run(HeldLease(lease, "wrk_benchmark", float("inf")))

    began = time.monotonic()
    async with asyncio.TaskGroup() as group:
        for lease in leases:
            group.create_task(work(lease))
    seconds = time.monotonic() - began
    written = sum(commit.rows for commit in service.commits)
    if written != len(rows):
        raise RuntimeError(f"{written} of {len(rows)} rows were written")
    return seconds, sum(commit.bytes for commit in service.commits)


def _facts(engine: Engine) -> ModelFacts:
    report = engine.reports[0]
    return ModelFacts(
        name="-", path=engine.spec.model_path, num_layers=report.num_layers, hidden_size=report.hidden_size,
        vocab_size=VOCAB, max_row_tokens=1 << 20, pins=PINS,
    )  # fmt: skip


def _shards(rows: list[np.ndarray], per_token: int) -> list[tuple[int, int, int, int]]:
    """(first row, rows, tokens, bytes) of each shard."""
    shards, first, tokens = [], 0, 0
    for index, row in enumerate(rows):
        tokens += len(row)
        if tokens * per_token >= SHARD_BYTES or index == len(rows) - 1:
            shards.append((first, index + 1 - first, tokens, tokens * per_token))
            first, tokens = index + 1, 0
    return shards


def _lease(spec: tuple[int, int, int, int], layers: list[int]) -> Lease:
    first, rows, tokens, nbytes = spec
    shard = ShardSpec(
        index=first, tokens_dir="tokens", first_row=first, rows=rows, tokens=tokens, bytes=nbytes,
        file=f"shards/{first}.safetensors", pins=PINS, dataset_sha256="-",
    )  # fmt: skip
    return Lease(
        task=f"task_{first}", kind=TaskKind.SHARD, job="job_benchmark", generation=1, secret="-", lease_seconds=1e9,
        model="-", model_path="-", layers=layers, final=Final.POST_NORM, shard=shard,
    )  # fmt: skip
