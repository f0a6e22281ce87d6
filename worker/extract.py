"""One shard task, from lease to commit: lay the file out, prefill its rows, compact, seal, hand in.

Whatever ends the work early leaves nothing behind: requests are aborted, the session is withdrawn, the partial file is
removed. A sealed file is never deleted here, since its commit may have arrived.
"""

import asyncio
import json
import logging
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from layertap.layout import ShardLayout
from layertap.schemas.jobs import Final
from layertap.schemas.shards import FORMAT_VERSION
from layertap.schemas.tasks import (
    MAX_ROW_ERRORS_PER_CALL,
    Lease,
    RowErrorsReport,
    ShardCommit,
    ShardSpec,
    TaskRowProblem,
)
from layertap.schemas.workers import ModelFacts
from worker import shard_writer
from worker.engine.host import EngineHost
from worker.in_hand import MOST_LANES
from worker.leases import COMMIT_PHASE, HeldLease, LeaseKeeper
from worker.patience import begin, within
from worker.plan.tokens import TokenRows
from worker.prefill import RowFailure
from worker.service_api import ServiceApi
from worker.shard_prefill import ShardPrefill
from worker.shard_writer import ShardRows

logger = logging.getLogger(__name__)

LAYOUT_SECONDS = 300.0
SEAL_BYTES_PER_SECOND = 20e6
COMMIT_PATIENCE_S = 600.0
_PREFILL_GRACE_S = 60.0
_REMOVE_S = 5.0


@dataclass(frozen=True)
class Extraction:
    """What a shard task works with."""

    api: ServiceApi
    keeper: LeaseKeeper
    host: EngineHost
    facts: ModelFacts
    storage: Path
    restart_seconds: float
    layouts: asyncio.Lock
    """One layout at a time: where reserving space takes long, the first shard is ready the sooner."""

    async def run(self, held: HeldLease) -> None:
        """Extracts and commits the shard of a lease.

        Raises `LeaseLostError`, `EngineKeepsDyingError`, `EngineUnavailableError`, `StorageWriteError`, `OSError` or
        `ServiceUnreachableError`.
        """
        lease, spec = held.lease, _shard_spec(held.lease)
        final = self.storage / spec.file
        self.keeper.phase(held, "layout", LAYOUT_SECONDS)
        tokens = await asyncio.to_thread(TokenRows.open, self.storage / spec.tokens_dir)
        wanted = range(spec.first_row, spec.first_row + spec.rows)
        rows, ids = await asyncio.to_thread(_load_rows, tokens, wanted)
        layout = self._layout(lease, spec, tokens.lengths[wanted.start : wanted.stop].tolist())
        self.keeper.phase(held, "turn to lay out", LAYOUT_SECONDS * MOST_LANES)
        async with self.layouts:
            self.keeper.phase(held, "layout", LAYOUT_SECONDS)
            part = await _lay_out(final, layout, rows)
        try:
            work = ShardPrefill(self.host, self.keeper, self.facts, held, layout, part, ids, self.restart_seconds)
            failures = await work.run()
            await self._report(held, rows, failures)
            if len(failures) == spec.rows:
                await _remove(part)
                commit = ShardCommit(
                    **held.proof.model_dump(), bytes=0, sha256="", rows=0, tokens=0, row_errors=len(failures)
                )
            else:
                commit = await self._seal(held, layout, rows, part, final, set(failures), work.engine)
        except BaseException:
            await _remove(part)
            raise
        self.keeper.phase(held, COMMIT_PHASE, COMMIT_PATIENCE_S)
        await self.api.commit_shard(lease.task, commit, COMMIT_PATIENCE_S)
        logger.info("%s committed: shard %d, %d rows, %d tokens", lease.task, spec.index, commit.rows, commit.tokens)

    async def _report(self, held: HeldLease, rows: ShardRows, failures: dict[int, RowFailure]) -> None:
        problems = [
            TaskRowProblem(row_id=int(rows.row_ids[row]), code=failure.code, reason=failure.reason[:2000])
            for row, failure in sorted(failures.items())
        ]
        for start in range(0, len(problems), MAX_ROW_ERRORS_PER_CALL):
            report = RowErrorsReport(
                **held.proof.model_dump(), errors=problems[start : start + MAX_ROW_ERRORS_PER_CALL]
            )
            await self.api.row_errors(held.lease.task, report, COMMIT_PATIENCE_S)

    async def _seal(
        self,
        held: HeldLease,
        layout: ShardLayout,
        rows: ShardRows,
        part: Path,
        final: Path,
        failed: set[int],
        engine: dict[str, object],
    ) -> ShardCommit:
        self.keeper.phase(held, "seal", _PREFILL_GRACE_S + layout.nbytes / SEAL_BYTES_PER_SECOND)
        layout = layout.with_metadata(self._metadata(held.lease, engine))
        if failed:
            layout = await asyncio.to_thread(shard_writer.compact, part, layout, rows, failed)
        else:
            await asyncio.to_thread(shard_writer.write_header, part, layout)
        sha256 = await asyncio.to_thread(shard_writer.seal, part, final)
        return ShardCommit(
            **held.proof.model_dump(),
            bytes=layout.nbytes,
            sha256=sha256,
            rows=len(layout.lengths),
            tokens=layout.tokens,
            row_errors=len(failed),
            engine=engine,
        )

    def _layout(self, lease: Lease, spec: ShardSpec, lengths: list[int]) -> ShardLayout:
        return ShardLayout.of(
            lengths,
            lease.layers,
            self.facts.hidden_size,
            spec.pins.dtype,
            lease.final is Final.POST_NORM,
            self._metadata(lease, {}),
        )

    def _metadata(self, lease: Lease, engine: dict[str, object]) -> dict[str, str]:
        """The shard's own account of itself; `engine` is known only once the rows are written."""
        spec = _shard_spec(lease)
        facts = {
            "format_version": FORMAT_VERSION,
            "job": lease.job,
            "shard": spec.index,
            "generation": lease.generation,
            "layers": lease.layers,
            "num_layers": self.facts.num_layers,
            "final": lease.final,
            "model": lease.model,
            "dataset_sha256": spec.dataset_sha256,
            "pins": spec.pins.model_dump(),
            "engine": engine,
        }
        return {"layertap": json.dumps(facts, sort_keys=True)}


def _shard_spec(lease: Lease) -> ShardSpec:
    assert lease.shard is not None
    return lease.shard


async def _lay_out(final: Path, layout: ShardLayout, rows: ShardRows) -> Path:
    """The partial file, laid out; none is left where that fails or is given up."""
    laying = asyncio.create_task(asyncio.to_thread(shard_writer.lay_out, final, layout, rows))
    try:
        return await asyncio.shield(laying)
    except BaseException:
        if laying.done():
            await _remove(shard_writer.partial_path(final))
        else:
            # A thread can't be stopped, and might create the file only now.
            laying.add_done_callback(partial(_remove_laid, shard_writer.partial_path(final)))
        raise


async def _remove(path: Path) -> None:
    """Removes a file that nobody needs. While a write to it hangs its removal does too, and is not waited for long."""
    try:
        await within(_REMOVE_S, partial(path.unlink, missing_ok=True))
    except OSError as error:
        logger.warning("%s is not removed yet: %s", path, error)


def _remove_laid(path: Path, laid: asyncio.Task[Path]) -> None:
    begin(partial(path.unlink, missing_ok=True))
    if not laid.cancelled() and (error := laid.exception()) is not None:
        logger.warning("%s, of a lease given up: %s", path, error)


def _load_rows(tokens: TokenRows, wanted: range) -> tuple[ShardRows, list[np.ndarray]]:
    ids = [np.asarray(tokens.input_ids(i)) for i in wanted]
    masks = [np.asarray(tokens.loss_mask(i)) for i in wanted]
    row_ids = np.asarray(tokens.row_ids[wanted.start : wanted.stop], dtype=np.int64)
    return ShardRows(np.concatenate(ids), np.concatenate(masks), row_ids), ids
