"""How leases end without a commit: failure, release, expiry. The job's row is locked before the task's changes."""

from collections.abc import Callable

from sqlalchemy.orm import Session

from layertap.schemas.tasks import Held, Release, TaskAck, TaskFailure, TaskKind
from service import leases
from service.context import Context
from service.db.models import Job, Task
from service.jobs import progression
from service.jobs import repository as jobs
from service.leases import Next, TaskState
from service.problems import LeaseLostError, NotFoundError
from service.tasks import repository

_EXPIRED_PER_ROUND = 100


def fail(context: Context, task: str, body: TaskFailure) -> TaskAck:
    """The task caused a failure. Raises `LeaseLostError`."""
    failure = (body.code, body.reason)
    return _end(
        context,
        task,
        body,
        failure,
        lambda row, job: leases.after_failure(rules(row), body.retryable, progression.cancelling(job), context.bounds),
    )


def release(context: Context, task: str, body: Release) -> TaskAck:
    """The worker hands the task back. Raises `LeaseLostError`."""
    return _end(
        context, task, body, None, lambda row, job: leases.after_release(rules(row), progression.cancelling(job))
    )


def release_all(context: Context, worker: str) -> None:
    """Release every lease of a worker that ended."""
    with context.database.read() as session:
        held = repository.leased_by(session, worker)
    for task in held:
        proof = Release(worker=worker, generation=task.generation, secret=task.secret)
        try:
            release(context, task.id, proof)
        except LeaseLostError:
            continue


def expire_leases(context: Context) -> int:
    """Apply the expiry of leases that ran out, a bounded number of them; how many ended."""
    clock = context.database.clock
    with context.database.read() as session:
        found = repository.expired(session, clock, _EXPIRED_PER_ROUND)
    return sum(_expire(context, task) for task in found)


def _expire(context: Context, task: str) -> bool:
    with context.database.write() as session:
        found = locked(session, task)
        if found is None:
            return False
        row, job = found
        after = leases.after_expiry(rules(row), progression.cancelling(job), context.bounds)
        reason = f"the lease of worker {row.worker_id} expired; {after.expiries} expired in all"
        clock = context.database.clock
        if not repository.expire(session, clock, task, row.generation, after, ("lease_expired", reason)):
            return False
        _settle(session, row, job, after)
    if job.tasks_open == 0:
        context.wake.set()
    return True


def _end(
    context: Context,
    task: str,
    held: Held,
    failure: tuple[str, str] | None,
    rule: Callable[[Task, Job], Next],
) -> TaskAck:
    with context.database.write() as session:
        found = locked(session, task)
        if found is None:
            raise NotFoundError("task", task)
        row, job = found
        after = rule(row, job)
        if not repository.end(session, task, held, after, failure):
            raise LeaseLostError(task, held.generation)
        _settle(session, row, job, after)
    if job.tasks_open == 0:
        context.wake.set()
    return TaskAck(task=task, state=after.state.value)


def _settle(session: Session, task: Task, job: Job, after: Next) -> None:
    repository.drop_row_errors(session, task.id)
    if after.state.open:
        return
    if task.kind == TaskKind.PLAN and after.state is TaskState.FAILED:
        failed = repository.get(session, task.id)
        assert failed is not None
        progression.fail(job, failed.failure_code or "plan_failed", failed.failure_reason or "")
    progression.tasks_ended(job, 1)


def locked(session: Session, task: str) -> tuple[Task, Job] | None:
    """The task and its job, the job's row locked; None where there is no such task."""
    row = repository.get(session, task)
    if row is None:
        return None
    job = jobs.lock(session, row.job_id)
    row = repository.get(session, task)
    return None if job is None or row is None else (row, job)


def rules(task: Task) -> leases.Task:
    """The part of a task that the lease rules look at."""
    return leases.Task(
        state=TaskState(task.state),
        generation=task.generation,
        secret=task.secret,
        attempts=task.attempts,
        expiries=task.expiries,
        deadline=task.deadline,
        sha256=task.sha256,
    )
