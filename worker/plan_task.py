"""One plan task, from lease to commit: the plan process tokenises, the worker reports what it says."""

from contextlib import aclosing
from pathlib import Path

from layertap.schemas.tasks import PlanCommit, RowErrorsReport
from layertap.schemas.workers import ModelFacts
from worker.extract import COMMIT_PATIENCE_S
from worker.leases import COMMIT_PHASE, HeldLease, LeaseKeeper
from worker.plan.messages import PlanProgressLine, PlanRequest, PlanResultLine, RowErrorsLine
from worker.plan.process import plan_lines
from worker.service_api import ServiceApi

QUIET_SECONDS = 120.0
"""How long the plan process may say nothing: a tokenizer may take a minute to load."""


async def run_plan(
    api: ServiceApi, keeper: LeaseKeeper, held: HeldLease, storage: Path, facts: ModelFacts, max_row_tokens: int
) -> None:
    """Makes and commits the plan of a lease; rows may have `max_row_tokens` tokens at the most.

    Raises `PlanError`, `LeaseLostError`, `ServiceUnreachableError`.
    """
    lease = held.lease
    assert lease.plan is not None
    request = PlanRequest(
        storage=storage,
        spec=lease.plan,
        layers=lease.layers,
        final=lease.final,
        model=facts.model_copy(update={"max_row_tokens": max_row_tokens}),
    )
    proof = held.proof.model_dump()
    async with aclosing(plan_lines(request, QUIET_SECONDS)) as lines:
        async for line in lines:
            keeper.phase(held, "plan", QUIET_SECONDS)
            match line:
                case RowErrorsLine():
                    await api.row_errors(lease.task, RowErrorsReport(**proof, errors=line.errors), COMMIT_PATIENCE_S)
                case PlanResultLine():
                    keeper.phase(held, COMMIT_PHASE, COMMIT_PATIENCE_S)
                    commit = PlanCommit(
                        **proof,
                        shards=line.shards,
                        rows=line.rows,
                        tokens=line.tokens,
                        row_errors=line.row_errors,
                        pins=facts.pins,
                    )
                    await api.commit_plan(lease.task, commit, COMMIT_PATIENCE_S)
                case PlanProgressLine():
                    pass
