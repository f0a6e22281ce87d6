"""One shard task, from lease to commit: lay the file out, prefill its rows, compact, seal, hand in.

Whatever ends the work early leaves nothing behind: requests are aborted, the session is withdrawn, the partial file is
removed. A sealed file is never deleted here, since its commit may have arrived.
"""

import asyncio
import json
import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
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
from worker import shard_writer
from worker.capture.rid import Rid, mask
from worker.capture.session import Ledger, Session, publish, sessions_dir, withdraw
from worker.engine.client import EngineDownError
from worker.engine.engine import Engine
from worker.engine.spec import chunk_tokens
from worker.inflight import InFlight
from worker.leases import COMMIT_PHASE, HeldLease, LeaseKeeper
from worker.plan.tokens import TokenRows
from worker.prefill import Prefill, RowFailure
from worker.service_api import ServiceApi
from worker.shard_writer import ShardRows

logger = logging.getLogger(__name__)

LAYOUT_SECONDS = 300.0
SEAL_BYTES_PER_SECOND = 20e6
COMMIT_PATIENCE_S = 600.0
_PREFILL_GRACE_S = 60.0


@dataclass(frozen=True)
class Extraction:
    """What a shard task works with."""

    api: ServiceApi
    keeper: LeaseKeeper
    engine: Engine
    budget: InFlight
    storage: Path

    async def run(self, held: HeldLease) -> None:
        """Extracts and commits the shard of a lease.

        Raises `LeaseLostError`, `EngineDownError`, `StorageWriteError`, `OSError` or `ServiceUnreachableError`.
        """
        lease, spec = held.lease, _shard_spec(held.lease)
        final = self.storage / spec.file
        self.keeper.phase(held, "layout", LAYOUT_SECONDS)
        tokens = await asyncio.to_thread(TokenRows.open, self.storage / spec.tokens_dir)
        wanted = range(spec.first_row, spec.first_row + spec.rows)
        rows, ids = await asyncio.to_thread(_load_rows, tokens, wanted)
        layout = self._layout(lease, spec, tokens.lengths[wanted.start : wanted.stop].tolist())
        partial = await asyncio.to_thread(shard_writer.lay_out, final, layout, rows)
        try:
            failures = await self._prefill(held, layout, partial, ids)
            await self._report(held, rows, failures)
            if len(failures) == spec.rows:
                partial.unlink()
                commit = ShardCommit(
                    **held.proof.model_dump(), bytes=0, sha256="", rows=0, tokens=0, row_errors=len(failures)
                )
            else:
                commit = await self._seal(held, layout, rows, partial, final, set(failures))
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
        self.keeper.phase(held, COMMIT_PHASE, COMMIT_PATIENCE_S)
        await self.api.commit_shard(lease.task, commit, COMMIT_PATIENCE_S)
        logger.info("%s committed: shard %d, %d rows, %d tokens", lease.task, spec.index, commit.rows, commit.tokens)

    async def _prefill(
        self, held: HeldLease, layout: ShardLayout, partial: Path, ids: Sequence[np.ndarray]
    ) -> dict[int, RowFailure]:
        lease, run_dir = held.lease, self.engine.directory
        rid = Rid(mask(lease.layers), lease.final is Final.POST_NORM, lease.task, lease.generation, 0, 0)
        ledger = Ledger.create(sessions_dir(run_dir) / f"{rid.session}.ledger", layout.lengths)
        publish(run_dir, rid.session, _session(partial, ledger, layout))
        self.keeper.phase(held, "prefill", _PREFILL_GRACE_S, ledger.path)
        batch_tokens = chunk_tokens(self.engine.spec.chunked_prefill_size, self.engine.spec.device)
        work = Prefill(self.engine.client, self.budget, held, ledger, rid, batch_tokens)
        finished = False
        try:
            await work.run(ids)
            finished = True
        finally:
            ledger.close_session()
            withdraw(run_dir, rid.session)
            if not finished:
                with suppress(EngineDownError):
                    await asyncio.shield(self.engine.client.abort(rid.lease_prefix))
        for row in np.flatnonzero(ledger.nonfinite):
            work.failures.setdefault(
                int(row), RowFailure("non_finite", f"{ledger.nonfinite[row]} tokens hold a NaN or an infinity")
            )
        return work.failures

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
        self, held: HeldLease, layout: ShardLayout, rows: ShardRows, partial: Path, final: Path, failed: set[int]
    ) -> ShardCommit:
        self.keeper.phase(held, "seal", _PREFILL_GRACE_S + layout.nbytes / SEAL_BYTES_PER_SECOND)
        if failed:
            layout = await asyncio.to_thread(shard_writer.compact, partial, layout, rows, failed)
        sha256 = await asyncio.to_thread(shard_writer.seal, partial, final)
        return ShardCommit(
            **held.proof.model_dump(),
            bytes=layout.nbytes,
            sha256=sha256,
            rows=len(layout.lengths),
            tokens=layout.tokens,
            row_errors=len(failed),
            engine=self.engine.describe(),
        )

    def _layout(self, lease: Lease, spec: ShardSpec, lengths: list[int]) -> ShardLayout:
        report = self.engine.reports[0]
        facts = {
            "format_version": FORMAT_VERSION,
            "job": lease.job,
            "shard": spec.index,
            "generation": lease.generation,
            "layers": lease.layers,
            "num_layers": report.num_layers,
            "final": lease.final,
            "model": lease.model,
            "dataset_sha256": spec.dataset_sha256,
            "pins": spec.pins.model_dump(),
            "engine": self.engine.describe(),
        }
        return ShardLayout.of(
            lengths,
            lease.layers,
            report.hidden_size,
            report.dtype,
            lease.final is Final.POST_NORM,
            {"layertap": json.dumps(facts, sort_keys=True)},
        )


def _shard_spec(lease: Lease) -> ShardSpec:
    assert lease.shard is not None
    return lease.shard


def _session(partial: Path, ledger: Ledger, layout: ShardLayout) -> Session:
    final = layout.tensors.get("final_hidden_state")
    return Session(
        file=str(partial.resolve()),
        ledger=str(ledger.path.resolve()),
        hidden_start=layout.tensors["hidden_states"].start,
        hidden_token_bytes=layout.hidden_token_bytes,
        final_start=None if final is None else final.start,
        final_token_bytes=layout.final_token_bytes,
    )


def _load_rows(tokens: TokenRows, wanted: range) -> tuple[ShardRows, list[np.ndarray]]:
    ids = [np.asarray(tokens.input_ids(i)) for i in wanted]
    masks = [np.asarray(tokens.loss_mask(i)) for i in wanted]
    row_ids = np.asarray(tokens.row_ids[wanted.start : wanted.stop], dtype=np.int64)
    return ShardRows(np.concatenate(ids), np.concatenate(masks), row_ids), ids
