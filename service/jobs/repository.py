"""Every query about jobs and the rows that were given up. A job's row lock comes before those of its tasks, always."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from sqlalchemy import delete, func, literal, select, text, union_all
from sqlalchemy.orm import Session

from layertap.schemas.figures import WorkerFigures
from layertap.schemas.jobs import JobState
from layertap.schemas.tasks import TaskKind
from service.db.models import DatasetError, Job, RowError, Task, Worker
from service.figures import standing
from service.leases import TaskState

_RESERVATION_LOCK = 0x7265736572766521
"""Advisory lock on Postgres under which free space is compared with what is reserved."""


@dataclass
class Running:
    """What the leased shards of a job report: rows and tokens that are done but not committed, and how fast it goes.

    `speeds` are tokens a second, one a shard; `workers` the figures of those that hold them, by worker.
    """

    rows: int = 0
    tokens: int = 0
    speeds: list[float | None] = field(default_factory=list)
    workers: dict[str, WorkerFigures] = field(default_factory=dict)


def get(session: Session, job: str) -> Job | None:
    """The job of that id."""
    return session.get(Job, job)


def lock(session: Session, job: str) -> Job | None:
    """The job, its row locked until the transaction ends, as it is now."""
    query = select(Job).where(Job.id == job).with_for_update(key_share=True)
    return session.scalar(query.execution_options(populate_existing=True))


def by_key(session: Session, key: str) -> Job | None:
    """The job that was created with this idempotency key."""
    return session.scalar(select(Job).where(Job.idempotency_key == key))


def page(session: Session, limit: int, after: str | None, state: JobState | None) -> Sequence[Job]:
    """Newest first, one more than `limit`."""
    query = select(Job).order_by(Job.id.desc()).limit(limit + 1)
    if after is not None:
        query = query.where(Job.id < after)
    if state is not None:
        query = query.where(Job.state == state.value)
    return session.scalars(query).all()


def running(session: Session, jobs: Sequence[str]) -> dict[str, Running]:
    """What the leased shards of `jobs` report, by job; jobs without any are absent."""
    query = (
        select(Task.job_id, Task.rows_done, Task.tokens_done, Task.tokens_per_second, Worker)
        .outerjoin(Worker, Worker.id == Task.worker_id)
        .where(Task.job_id.in_(jobs), Task.kind == TaskKind.SHARD, Task.state == TaskState.LEASED)
    )
    found: dict[str, Running] = {}
    for job, rows, tokens, speed, worker in session.execute(query):
        running = found.setdefault(job, Running())
        running.rows += rows
        running.tokens += tokens
        running.speeds.append(speed)
        if worker is not None and (figures := standing(worker)) is not None:
            running.workers[worker.id] = figures
    return found


def finishable(session: Session, limit: int) -> Sequence[str]:
    """Jobs all of whose tasks have ended, and that wait for their manifest."""
    states = [JobState.FINALIZING.value, JobState.CANCELLING.value]
    query = select(Job.id).where(Job.state.in_(states), Job.tasks_open == 0).order_by(Job.id).limit(limit)
    return session.scalars(query).all()


def reserved_bytes(session: Session, postgres: bool) -> int:
    """Bytes that running jobs have planned and not yet committed. On Postgres, other plans wait from here on."""
    if postgres:
        session.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _RESERVATION_LOCK})
    query = select(func.sum(Job.bytes_total - Job.bytes_done)).where(Job.state == JobState.RUNNING)
    return int(session.scalar(query) or 0)


def known(session: Session, jobs: Sequence[str]) -> set[str]:
    """Those of `jobs` that exist."""
    return set(session.scalars(select(Job.id).where(Job.id.in_(jobs))))


def remove(session: Session, job: str) -> None:
    """Delete the job, its tasks and its row errors."""
    session.execute(delete(Job).where(Job.id == job))


def errors_page(session: Session, job: Job, limit: int, after: int | None) -> list[tuple[int, str, str, str]]:
    """Rows without hidden states as (row id, stage, code, reason), ascending, one more than `limit`.

    Those of a task count once the lease that reported them has committed.
    """
    uploaded = select(
        DatasetError.row_id.label("row_id"),
        literal("upload").label("kind"),
        DatasetError.code.label("code"),
        DatasetError.reason.label("reason"),
    ).where(DatasetError.dataset_id == job.dataset_id)
    worked = (
        select(RowError.row_id, Task.kind, RowError.code, RowError.reason)
        .join(Task, (Task.id == RowError.task_id) & (Task.generation == RowError.generation))
        .where(RowError.job_id == job.id, Task.state == TaskState.DONE)
    )
    if after is not None:
        uploaded = uploaded.where(DatasetError.row_id > after)
        worked = worked.where(RowError.row_id > after)
    both = union_all(uploaded, worked).subquery()
    query = select(both.c.row_id, both.c.kind, both.c.code, both.c.reason).order_by(both.c.row_id).limit(limit + 1)
    return [(row_id, kind, code, reason) for row_id, kind, code, reason in session.execute(query)]
