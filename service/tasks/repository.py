"""Every statement about tasks. Each transition of a lease is one guarded statement: it changes a row only where exactly
the lease it names still holds the task.
"""

from collections.abc import Sequence
from typing import Any

from sqlalchemy import Select, delete, func, insert, select, update
from sqlalchemy.orm import Session

from layertap.schemas.tasks import Heartbeat, Held, TaskKind, TaskRowProblem
from service.db.clock import Clock
from service.db.models import DatasetError, Job, RowError, Task, WorkerModel
from service.ids import new_secret
from service.leases import Next, TaskState

_INSERT_BATCH = 1000
_MAX_TEXT = 200


def get(session: Session, task: str) -> Task | None:
    """The task of that id, as it is now."""
    return session.scalar(select(Task).where(Task.id == task).execution_options(populate_existing=True))


def held_request(session: Session, clock: Clock, worker: str, request_id: str, seconds: float) -> Task | None:
    """The task that this very claim was given before and that is held still, its lease renewed."""
    statement = (
        update(Task)
        .where(Task.worker_id == worker, Task.request_id == request_id, Task.state == TaskState.LEASED)
        .values(deadline=clock.now() + seconds)
        .returning(Task)
    )
    return session.scalar(statement)


def claim_plan(session: Session, clock: Clock, worker: str, request_id: str, seconds: float) -> Task | None:
    """Lease the oldest job's plan task, among the models that the worker registered.

    The job's row is locked along with the task's, both skipping what is locked, so that the caller may change the job.
    """
    oldest = (
        select(Task.id)
        .join(Job, Job.id == Task.job_id)
        .join(WorkerModel, (WorkerModel.worker_id == worker) & (WorkerModel.name == Task.model))
        .where(Task.state == TaskState.READY, Task.kind == TaskKind.PLAN)
        .order_by(Task.job_id)
        .limit(1)
        .with_for_update(of=[Task, Job], skip_locked=True, key_share=True)
    )
    return _lease(session, oldest, clock, worker, request_id, seconds)


def claim_shard(
    session: Session, clock: Clock, worker: str, request_id: str, seconds: float, model: str
) -> Task | None:
    """Lease a shard of `model` that was planned with the pins the worker registered: oldest job, then lowest index."""
    pins = select(WorkerModel.pins_key).where(WorkerModel.worker_id == worker, WorkerModel.name == model)
    oldest = (
        select(Task.id)
        .where(
            Task.state == TaskState.READY,
            Task.kind == TaskKind.SHARD,
            Task.model == model,
            Task.pins_key == pins.scalar_subquery(),
        )
        .order_by(Task.job_id, Task.index)
        .limit(1)
        .with_for_update(skip_locked=True, key_share=True)
    )
    return _lease(session, oldest, clock, worker, request_id, seconds)


def waiting_model(session: Session, worker: str, loaded: str | None) -> str | None:
    """Another model the worker knows, of which the oldest job with a ready shard is waiting."""
    query = (
        select(Task.model)
        .join(
            WorkerModel,
            (WorkerModel.worker_id == worker)
            & (WorkerModel.name == Task.model)
            & (WorkerModel.pins_key == Task.pins_key),
        )
        .where(Task.state == TaskState.READY, Task.kind == TaskKind.SHARD)
        .order_by(Task.job_id, Task.index)
        .limit(1)
    )
    return session.scalar(query.where(Task.model != loaded) if loaded is not None else query)


def _lease(
    session: Session, chosen: Select[str], clock: Clock, worker: str, request_id: str, seconds: float
) -> Task | None:
    statement = (
        update(Task)
        .where(Task.id == chosen.scalar_subquery(), Task.state == TaskState.READY)
        .values(
            state=TaskState.LEASED.value,
            generation=Task.generation + 1,
            secret=new_secret(),
            worker_id=worker,
            request_id=request_id,
            deadline=clock.now() + seconds,
            rows_done=0,
            tokens_done=0,
            phase="",
            tokens_per_second=None,
        )
        .returning(Task)
        .execution_options(synchronize_session=False)
    )
    return session.scalar(statement)


def renew(session: Session, clock: Clock, task: str, beat: Heartbeat, seconds: float) -> bool:
    """Move the deadline and note the progress; False where the lease is lost."""
    values = {
        "deadline": clock.now() + seconds,
        "rows_done": max(0, beat.rows_done),
        "tokens_done": max(0, beat.tokens_done),
        "phase": beat.phase[:_MAX_TEXT],
        "tokens_per_second": beat.tokens_per_second,
    }
    return _change(session, task, beat, values)


def hold(session: Session, task: str, held: Held) -> bool:
    """Keep the lease from ending until this transaction does; False where it is lost."""
    return _change(session, task, held, {"generation": held.generation})


def commit_plan(session: Session, task: str, held: Held, values: dict[str, Any]) -> bool:
    """End the lease of a plan with `values`; False where it is lost."""
    return _change(session, task, held, values)


def commit_shard(session: Session, task: str, held: Held, values: dict[str, Any]) -> bool:
    """Record the shard of this lease; False where the lease is lost."""
    return _change(session, task, held, {**values, "state": TaskState.DONE.value})


def end(session: Session, task: str, held: Held, after: Next, failure: tuple[str, str] | None) -> bool:
    """End the lease without a result; False where it is lost."""
    return _change(session, task, held, _ended(after, failure))


def expire(session: Session, clock: Clock, task: str, generation: int, after: Next, failure: tuple[str, str]) -> bool:
    """End a lease whose deadline is past; False where it was renewed or ended meanwhile."""
    statement = (
        update(Task)
        .where(
            Task.id == task,
            Task.generation == generation,
            Task.state == TaskState.LEASED,
            Task.deadline <= clock.now(),
        )
        .values(**_ended(after, failure))
        .returning(Task.id)
        .execution_options(synchronize_session=False)
    )
    return session.execute(statement).first() is not None


def _ended(after: Next, failure: tuple[str, str] | None) -> dict[str, Any]:
    values: dict[str, Any] = {"state": after.state.value, "attempts": after.attempts, "expiries": after.expiries}
    if failure is not None:
        values["failure_code"], values["failure_reason"] = failure
    return values


def _change(session: Session, task: str, held: Held, values: dict[str, Any]) -> bool:
    statement = (
        update(Task)
        .where(
            Task.id == task,
            Task.generation == held.generation,
            Task.secret == held.secret,
            Task.state == TaskState.LEASED,
        )
        .values(**values)
        .returning(Task.id)
        .execution_options(synchronize_session=False)
    )
    return session.execute(statement).first() is not None


def expired(session: Session, clock: Clock, limit: int) -> Sequence[str]:
    """Tasks whose lease ran out, the longest past first."""
    query = select(Task.id).where(Task.state == TaskState.LEASED, Task.deadline <= clock.now())
    return session.scalars(query.order_by(Task.deadline).limit(limit)).all()


def leased_by(session: Session, worker: str) -> Sequence[Task]:
    """The tasks that a worker holds."""
    return session.scalars(select(Task).where(Task.worker_id == worker, Task.state == TaskState.LEASED)).all()


def grant_full_terms(session: Session, clock: Clock, seconds: float) -> None:
    """Give every lease a full term from now on: the clock has started anew."""
    session.execute(update(Task).where(Task.state == TaskState.LEASED).values(deadline=clock.now() + seconds))


def add_shards(session: Session, rows: list[dict[str, Any]]) -> None:
    """Insert a plan's shard tasks, as dicts of the columns, in batches."""
    for start in range(0, len(rows), _INSERT_BATCH):
        session.execute(insert(Task), rows[start : start + _INSERT_BATCH])


def cancel_ready(session: Session, job: str) -> int:
    """Cancel the job's ready tasks; how many there were."""
    statement = update(Task).where(Task.job_id == job, Task.state == TaskState.READY)
    return _count(session, statement.values(state=TaskState.CANCELLED.value).returning(Task.id))


def reopen(session: Session, job: str, kind: TaskKind) -> int:
    """Queue the job's tasks of `kind` again that committed nothing, with every try; how many there were.

    A plan is queued again even if it is done: it left nothing to extract.
    """
    statement = update(Task).where(Task.job_id == job, Task.kind == kind)
    if kind is TaskKind.SHARD:
        statement = statement.where(Task.state != TaskState.DONE)
    values = {
        "state": TaskState.READY.value,
        "attempts": 0,
        "expiries": 0,
        "failure_code": None,
        "failure_reason": None,
    }
    return _count(session, statement.values(**values).returning(Task.id))


def _count(session: Session, statement: Any) -> int:
    return len(session.execute(statement.execution_options(synchronize_session=False)).all())


def committed_shards(session: Session, job: str) -> list[Task]:
    """The job's committed shards that have rows, by index."""
    return list(session.scalars(_committed(job).order_by(Task.index)))


def committed_page(session: Session, job: str, limit: int, after: int | None) -> Sequence[Task]:
    """The job's committed shards that have rows, by index, one more than `limit`."""
    query = _committed(job).order_by(Task.index).limit(limit + 1)
    return session.scalars(query.where(Task.index > after) if after is not None else query).all()


def committed_shard(session: Session, job: str, index: int) -> Task | None:
    """The job's committed shard of that index, if it has rows."""
    return session.scalar(_committed(job).where(Task.index == index))


def _committed(job: str) -> Select[Task]:
    return select(Task).where(
        Task.job_id == job, Task.kind == TaskKind.SHARD, Task.state == TaskState.DONE, Task.committed_rows > 0
    )


def states(session: Session, job: str) -> set[TaskState]:
    """The states that the job's tasks are in."""
    return {TaskState(state) for state in session.scalars(select(Task.state).where(Task.job_id == job).distinct())}


def first_failure(session: Session, job: str) -> Task | None:
    """The failed task of the job with the lowest index."""
    query = select(Task).where(Task.job_id == job, Task.state == TaskState.FAILED)
    return session.scalar(query.order_by(Task.kind, Task.index).limit(1))


def save_row_errors(session: Session, task: Task, generation: int, errors: Sequence[TaskRowProblem]) -> None:
    """Note rows given up under one lease, replacing what was said of the same rows before."""
    by_row = {error.row_id: error for error in errors}
    if not by_row:
        return
    mine = (RowError.task_id == task.id) & (RowError.generation == generation)
    session.execute(delete(RowError).where(mine, RowError.row_id.in_(by_row)))
    rows = [
        {
            "task_id": task.id,
            "generation": generation,
            "job_id": task.job_id,
            "row_id": error.row_id,
            "code": error.code,
            "reason": error.reason,
        }
        for error in by_row.values()
    ]
    session.execute(insert(RowError), rows)


def settle_row_errors(session: Session, task: str, generation: int, dataset: str) -> int:
    """Keep only what the committing lease reported, less the lines refused on upload; how many rows that are."""
    session.execute(delete(RowError).where(RowError.task_id == task, RowError.generation != generation))
    uploaded = select(DatasetError.row_id).where(DatasetError.dataset_id == dataset)
    session.execute(delete(RowError).where(RowError.task_id == task, RowError.row_id.in_(uploaded)))
    return int(session.scalar(select(func.count()).where(RowError.task_id == task)) or 0)


def drop_row_errors(session: Session, task: str) -> None:
    """Forget what was reported under every lease of the task."""
    session.execute(delete(RowError).where(RowError.task_id == task))
