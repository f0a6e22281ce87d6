"""`/v1/tasks`: what workers say about the tasks they hold."""

from fastapi import APIRouter

from layertap.schemas.tasks import (
    ClaimRequest,
    ClaimResponse,
    Heartbeat,
    HeartbeatResponse,
    PlanCommit,
    Release,
    RowErrorsReport,
    ShardCommit,
    TaskAck,
    TaskFailure,
)
from service.context import ContextDep
from service.openapi_parts import problems
from service.problems import LeaseLostError, NotFoundError
from service.tasks import claims, commits, endings, repository

router = APIRouter(prefix="/v1/tasks", tags=["tasks"])
_PROBLEMS = problems(404, 409, 422)


@router.post("/claim", responses=problems(409, 422))
def claim_task(body: ClaimRequest, context: ContextDep) -> ClaimResponse:
    """Claim a task.

    The same `request_id` returns the same lease while it is held.
    """
    return claims.claim(context, body)


@router.post("/{task}/heartbeat", responses=_PROBLEMS)
def renew_task(task: str, body: Heartbeat, context: ContextDep) -> HeartbeatResponse:
    """Renew the lease and report progress."""
    seconds = context.settings.lease_seconds
    with context.database.write() as session:
        if not repository.renew(session, context.database.clock, task, body, seconds):
            if repository.get(session, task) is None:
                raise NotFoundError("task", task)
            raise LeaseLostError(task, body.generation)
    return HeartbeatResponse(lease_seconds=seconds)


@router.post("/{task}/row-errors", responses=_PROBLEMS)
def report_row_errors(task: str, body: RowErrorsReport, context: ContextDep) -> TaskAck:
    """Report rows that are given up.

    They count once the task commits; may be repeated.
    """
    return commits.save_row_errors(context, task, body)


@router.post("/{task}/commit-plan", responses=_PROBLEMS)
def commit_plan(task: str, body: PlanCommit, context: ContextDep) -> TaskAck:
    """Commit a plan.

    Its shards become tasks. The answer's state is `failed` where they do not fit the storage.
    """
    return commits.commit_plan(context, task, body)


@router.post("/{task}/commit-shard", responses=_PROBLEMS)
def commit_shard(task: str, body: ShardCommit, context: ContextDep) -> TaskAck:
    """Commit a shard whose file is in the storage.

    May be repeated; it counts once.
    """
    return commits.commit_shard(context, task, body)


@router.post("/{task}/fail", responses=_PROBLEMS)
def fail_task(task: str, body: TaskFailure, context: ContextDep) -> TaskAck:
    """Fail a task.

    It caused the failure, which costs it an attempt.
    """
    return endings.fail(context, task, body)


@router.post("/{task}/release", responses=_PROBLEMS)
def release_task(task: str, body: Release, context: ContextDep) -> TaskAck:
    """Release a task.

    It is handed back unharmed, at no cost.
    """
    return endings.release(context, task, body)
