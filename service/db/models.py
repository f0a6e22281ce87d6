"""The tables. What each column means is said where it is not plain from its name; rules live elsewhere."""

from datetime import UTC, datetime
from typing import Any

from sqlalchemy import (
    JSON,
    BigInteger,
    DateTime,
    Dialect,
    Double,
    ForeignKey,
    Index,
    String,
    Text,
    TypeDecorator,
    text,
)
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column


class UtcDateTime(TypeDecorator[datetime]):
    """A moment in UTC, aware in Python on every database."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        """Only aware moments are stored."""
        return None if value is None else value.astimezone(UTC)

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        """SQLite drops the zone; it was UTC."""
        if value is None:
            return None
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)


class Base(DeclarativeBase):
    """Base of every table."""

    type_annotation_map = {  # noqa: RUF012 (SQLAlchemy reads the plain class attribute)
        int: BigInteger,
        float: Double,
        str: Text,
        datetime: UtcDateTime,
        dict[str, Any]: JSON,
        dict[str, str]: JSON,
        list[int]: JSON,
        list[str]: JSON,
    }


class Dataset(Base):
    """An uploaded file. Hidden until `complete`: its bad lines are written in batches before that."""

    __tablename__ = "datasets"

    id: Mapped[str] = mapped_column(String(64), primary_key=True)
    name: Mapped[str]
    bytes: Mapped[int]
    sha256: Mapped[str] = mapped_column(String(64))
    rows: Mapped[int]
    bad_rows: Mapped[int]
    complete: Mapped[bool]
    created_at: Mapped[datetime]


class DatasetError(Base):
    """A line that was refused on upload."""

    __tablename__ = "dataset_errors"

    dataset_id: Mapped[str] = mapped_column(ForeignKey("datasets.id", ondelete="CASCADE"), primary_key=True)
    row_id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    code: Mapped[str] = mapped_column(String(64))
    reason: Mapped[str]


class Model(Base):
    """What jobs may name: the facts of the latest registration under that name. Outlives the workers."""

    __tablename__ = "models"

    name: Mapped[str] = mapped_column(String(512), primary_key=True)
    path: Mapped[str] = mapped_column(index=True)
    num_layers: Mapped[int]
    hidden_size: Mapped[int]
    max_row_tokens: Mapped[int]


class Worker(Base):
    """A worker process. `seen_deadline` is on the clock of leases: past it the worker counts as lost.

    `figures` are the latest it reported, replaced whole at every control poll.
    """

    __tablename__ = "workers"

    id: Mapped[str] = mapped_column(String(64), primary_key=True)
    host: Mapped[str]
    version: Mapped[str]
    state: Mapped[str] = mapped_column(String(16))
    loaded_model: Mapped[str | None]
    status: Mapped[str | None]
    figures: Mapped[dict[str, Any] | None]
    registered_at: Mapped[datetime]
    seen_at: Mapped[datetime]
    seen_deadline: Mapped[float]


class WorkerModel(Base):
    """A model as one worker knows it. `pins_key` is a digest of its pins: equal keys, equal pins."""

    __tablename__ = "worker_models"

    worker_id: Mapped[str] = mapped_column(ForeignKey("workers.id", ondelete="CASCADE"), primary_key=True)
    name: Mapped[str] = mapped_column(String(512), primary_key=True)
    path: Mapped[str]
    pins_key: Mapped[str] = mapped_column(String(64))


class Job(Base):
    """A job. `tasks_open` counts its tasks that have not ended and changes only under this row's lock."""

    __tablename__ = "jobs"
    __table_args__ = (Index("ix_jobs_state", "state", "id"), Index("ix_jobs_dataset", "dataset_id"))

    id: Mapped[str] = mapped_column(String(64), primary_key=True)
    state: Mapped[str] = mapped_column(String(16))
    idempotency_key: Mapped[str | None] = mapped_column(String(255), unique=True)
    request_digest: Mapped[str] = mapped_column(String(64))

    dataset_id: Mapped[str] = mapped_column(String(64))
    dataset_sha256: Mapped[str] = mapped_column(String(64))
    model: Mapped[str] = mapped_column(String(512))
    num_layers: Mapped[int]
    hidden_size: Mapped[int]
    layers: Mapped[list[int]]
    preset: Mapped[str | None] = mapped_column(String(32))
    final: Mapped[str] = mapped_column(String(32))
    max_tokens: Mapped[int | None]
    overflow: Mapped[str] = mapped_column(String(32))
    loss_mask: Mapped[str] = mapped_column(String(32))
    shard_bytes: Mapped[int]
    labels: Mapped[dict[str, str]] = mapped_column("metadata", JSON)

    tokens_generation: Mapped[int | None]
    """Generation of the plan that was committed: names the folder of tokenised rows."""
    pins: Mapped[dict[str, Any] | None]
    pins_key: Mapped[str | None] = mapped_column(String(64))
    engine: Mapped[dict[str, Any]]
    tasks_open: Mapped[int]

    rows_total: Mapped[int | None]
    tokens_total: Mapped[int | None]
    bytes_total: Mapped[int | None]
    shards_total: Mapped[int | None]
    rows_done: Mapped[int] = mapped_column(default=0)
    tokens_done: Mapped[int] = mapped_column(default=0)
    bytes_done: Mapped[int] = mapped_column(default=0)
    """Planned bytes of the committed shards; `bytes_total` less this is still reserved."""
    shards_done: Mapped[int] = mapped_column(default=0)
    row_errors: Mapped[int] = mapped_column(default=0)
    tokens_before: Mapped[int] = mapped_column(default=0)
    """`tokens_done` when the job last began to run; the rate counts from there."""

    failure_code: Mapped[str | None] = mapped_column(String(64))
    failure_reason: Mapped[str | None]

    created_at: Mapped[datetime]
    planning_at: Mapped[datetime | None]
    running_at: Mapped[datetime | None]
    finalizing_at: Mapped[datetime | None]
    cancelling_at: Mapped[datetime | None]
    succeeded_at: Mapped[datetime | None]
    failed_at: Mapped[datetime | None]
    cancelled_at: Mapped[datetime | None]


class Task(Base):
    """A leased unit of work. `model` and `pins_key` repeat the job's, so that a claim reads one table.

    A task is `ready` only while its job may be worked on: whatever stops a job ends its ready tasks in the same
    transaction.
    """

    __tablename__ = "tasks"
    __table_args__ = (
        Index("uq_tasks_place", "job_id", "kind", "index", unique=True),
        Index(
            "ix_tasks_ready",
            "kind",
            "model",
            "pins_key",
            "job_id",
            "index",
            sqlite_where=text("state = 'ready'"),
            postgresql_where=text("state = 'ready'"),
        ),
        Index(
            "ix_tasks_deadline",
            "deadline",
            sqlite_where=text("state = 'leased'"),
            postgresql_where=text("state = 'leased'"),
        ),
        Index(
            "uq_tasks_request",
            "worker_id",
            "request_id",
            unique=True,
            sqlite_where=text("state = 'leased'"),
            postgresql_where=text("state = 'leased'"),
        ),
    )

    id: Mapped[str] = mapped_column(String(64), primary_key=True)
    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id", ondelete="CASCADE"))
    kind: Mapped[str] = mapped_column(String(16))
    index: Mapped[int]
    model: Mapped[str] = mapped_column(String(512))
    pins_key: Mapped[str] = mapped_column(String(64))
    state: Mapped[str] = mapped_column(String(16))

    generation: Mapped[int] = mapped_column(default=0)
    secret: Mapped[str] = mapped_column(String(64), default="")
    worker_id: Mapped[str | None] = mapped_column(String(64))
    request_id: Mapped[str | None] = mapped_column(String(64))
    deadline: Mapped[float] = mapped_column(default=0.0)
    attempts: Mapped[int] = mapped_column(default=0)
    expiries: Mapped[int] = mapped_column(default=0)
    rows_done: Mapped[int] = mapped_column(default=0)
    tokens_done: Mapped[int] = mapped_column(default=0)
    phase: Mapped[str] = mapped_column(default="")
    tokens_per_second: Mapped[float | None]

    first_row: Mapped[int] = mapped_column(default=0)
    rows: Mapped[int] = mapped_column(default=0)
    tokens: Mapped[int] = mapped_column(default=0)
    bytes: Mapped[int] = mapped_column(default=0)

    sha256: Mapped[str | None] = mapped_column(String(64))
    committed_bytes: Mapped[int | None]
    committed_rows: Mapped[int | None]
    committed_tokens: Mapped[int | None]
    committed_at: Mapped[datetime | None]
    failure_code: Mapped[str | None] = mapped_column(String(64))
    failure_reason: Mapped[str | None]


class RowError(Base):
    """A row that a worker gave up under one lease; it counts once that lease has committed."""

    __tablename__ = "row_errors"
    __table_args__ = (Index("ix_row_errors_job", "job_id", "row_id"),)

    task_id: Mapped[str] = mapped_column(ForeignKey("tasks.id", ondelete="CASCADE"), primary_key=True)
    generation: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    row_id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    job_id: Mapped[str] = mapped_column(String(64))
    code: Mapped[str] = mapped_column(String(64))
    reason: Mapped[str]


class Incident(Base):
    """What went wrong with a worker's engine. It refers to no job or task, so that it outlives them.

    `arrival` is made by the service and sorts by time, which the worker's `id` does not.
    """

    __tablename__ = "incidents"
    __table_args__ = (Index("ix_incidents_worker", "worker_id", "arrival"),)

    id: Mapped[str] = mapped_column(String(64), primary_key=True)
    arrival: Mapped[str] = mapped_column(String(64), unique=True)
    worker_id: Mapped[str] = mapped_column(String(64))
    model: Mapped[str] = mapped_column(String(512))
    kind: Mapped[str] = mapped_column(String(32))
    phase: Mapped[str]
    blame: Mapped[str] = mapped_column(String(32))
    reason: Mapped[str]
    tried: Mapped[list[str]]
    processes_left: Mapped[int]
    gpu_bytes_left: Mapped[int | None]
    happened_at: Mapped[datetime]
    reported_at: Mapped[datetime]
    evidence: Mapped[str] = mapped_column(deferred=True)
    """JSON. Up to a megabyte, so it is read only where it is asked for, and is the last column."""


class IncidentCount(Base):
    """How many incidents of a kind were ever reported. Only the newest are kept, so they can't be counted."""

    __tablename__ = "incident_counts"

    kind: Mapped[str] = mapped_column(String(32), primary_key=True)
    count: Mapped[int]


class IncidentTask(Base):
    """A task that an incident hit, and the job it was of; null where the service did not know the task."""

    __tablename__ = "incident_tasks"
    __table_args__ = (Index("ix_incident_tasks_job", "job_id"),)

    incident_id: Mapped[str] = mapped_column(ForeignKey("incidents.id", ondelete="CASCADE"), primary_key=True)
    task_id: Mapped[str] = mapped_column(String(64), primary_key=True)
    job_id: Mapped[str | None] = mapped_column(String(64))
