"""The rules of jobs: what may be asked for, and what cancel, retry and delete do."""

import hashlib

from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from layertap import boundaries
from layertap.schemas.datasets import RowProblem, Stage
from layertap.schemas.jobs import Job as JobView
from layertap.schemas.jobs import JobCreate, JobState
from layertap.schemas.tasks import TaskKind
from layertap.storage_paths import job_dir
from service import leases
from service.context import Context
from service.datasets import repository as datasets
from service.db.clock import utc_now
from service.db.models import Job, Model, Task
from service.ids import new_id
from service.jobs import progression, repository
from service.jobs.repository import Running
from service.jobs.space import shortage
from service.jobs.view import show
from service.leases import TaskState
from service.problems import ConflictError, InvalidError, NotFoundError, ProblemError
from service.tasks import repository as tasks
from service.workers import repository as workers

_STAGES = {"upload": Stage.UPLOAD, TaskKind.PLAN.value: Stage.PLAN, TaskKind.SHARD.value: Stage.EXTRACT}


def create(context: Context, body: JobCreate, key: str | None) -> tuple[JobView, bool]:
    """The job that `body` asks for, and whether it is new. Raises `InvalidError` naming the field at fault."""
    digest = hashlib.sha256(body.model_dump_json().encode()).hexdigest()
    if key is not None and (job := _replayed(context, key, digest)) is not None:
        return job, False
    try:
        with context.database.write() as session:
            row = _new_job(session, body, key, digest)
    except IntegrityError:
        # Another request with the same key came first.
        if key is None or (job := _replayed(context, key, digest)) is None:
            raise
        return job, False
    return show(row, Running(), utc_now()), True


def view(session: Session, job: str) -> JobView:
    """The job as the interface shows it. Raises `NotFoundError`."""
    row = repository.get(session, job)
    if row is None:
        raise NotFoundError("job", job)
    return views(session, [row])[0]


def views(session: Session, rows: list[Job]) -> list[JobView]:
    """Several jobs as the interface shows them."""
    live = [row.id for row in rows if not JobState(row.state).terminal]
    running = repository.running(session, live) if live else {}
    now = utc_now()
    return [show(row, running.get(row.id, Running()), now) for row in rows]


def show_error(row: tuple[int, str, str, str]) -> RowProblem:
    """One row without hidden states as the interface shows it."""
    row_id, kind, code, reason = row
    return RowProblem(row_id=row_id, line=row_id + 1, stage=_STAGES[kind], code=code, reason=reason)


def cancel(context: Context, job: str) -> JobView:
    """Stop a job: ready tasks end at once, workers drop leased ones. Cancelling again changes nothing."""
    with context.database.write() as session:
        row = _lock(session, job)
        if leases.cancellable(JobState(row.state)):
            progression.enter(row, JobState.CANCELLING)
            progression.tasks_ended(row, tasks.cancel_ready(session, job))
        elif row.state not in (JobState.CANCELLING, JobState.CANCELLED):
            raise ConflictError(
                "job_over",
                f"job {job} is {row.state}",
                field="job",
                remedy="only a job that is not over can be cancelled",
            )
    context.wake.set()
    with context.database.read() as session:
        return view(session, job)


def retry(context: Context, job: str) -> JobView:
    """Queue again what a failed or cancelled job has not committed.

    Raises `ConflictError` in other states, and where the storage has no room for it; the job stays as it is then.
    """
    free = context.storage.free_bytes()
    with context.database.write() as session:
        row = _lock(session, job)
        if not leases.retryable(JobState(row.state)):
            remedy = "only a failed or cancelled job can be retried"
            raise ConflictError("job_not_retryable", f"job {job} is {row.state}", field="job", remedy=remedy)
        if row.shards_total:
            assert row.bytes_total is not None, "the plan that made the shards counted their bytes"
            reason = shortage(context, session, row.bytes_total - row.bytes_done, free)
            if reason is not None:
                remedy = "make room in the storage, or wait until other jobs are over, then retry"
                raise ConflictError("not_enough_space", reason, field="job", remedy=remedy)
            row.tasks_open = tasks.reopen(session, job, TaskKind.SHARD)
            row.tokens_before = row.tokens_done
            state = JobState.RUNNING
        else:
            dataset = datasets.share(session, row.dataset_id)
            if dataset is None:
                remedy = "upload the data set again and create a new job"
                raise ConflictError(
                    "dataset_deleted", f"data set {row.dataset_id} is deleted", field="job", remedy=remedy
                )
            row.tasks_open = tasks.reopen(session, job, TaskKind.PLAN)
            row.row_errors = dataset.bad_rows
            row.rows_total = row.tokens_total = row.bytes_total = row.shards_total = None
            row.planning_at = row.running_at = None
            state = JobState.QUEUED
        row.failure_code = row.failure_reason = None
        row.finalizing_at = row.cancelling_at = row.failed_at = row.cancelled_at = None
        row.state = state.value
        if state is JobState.RUNNING:
            progression.enter(row, state)
        if row.tasks_open == 0:
            progression.enter(row, JobState.FINALIZING)
    context.wake.set()
    with context.database.read() as session:
        return view(session, job)


def delete(context: Context, job: str) -> None:
    """Delete a job that is over, with its files. Raises `ConflictError` while it is not."""
    try:
        with context.database.write() as session:
            row = _lock(session, job)
            if not JobState(row.state).terminal:
                raise ConflictError("job_not_over", f"job {job} is {row.state}", field="job", remedy="cancel it first")
            context.storage.mark_deletion(job_dir(job))
            repository.remove(session, job)
    except ProblemError:
        raise
    except BaseException:
        settle_deletion(context, job)
        raise
    context.storage.remove_folder(job_dir(job))


def settle_deletion(context: Context, job: str) -> None:
    """Bring a marked deletion to its end: the folder goes where the job's row is gone, else the marker."""
    folder = job_dir(job)
    if not context.storage.marked(folder):
        return
    # A deletion sets its marker under the row's lock, so one that is under way is waited for.
    with context.database.write() as session:
        if repository.lock(session, job) is not None:
            context.storage.unmark(folder)
            return
    context.storage.remove_folder(folder)


def _lock(session: Session, job: str) -> Job:
    row = repository.lock(session, job)
    if row is None:
        raise NotFoundError("job", job)
    return row


def _replayed(context: Context, key: str, digest: str) -> JobView | None:
    with context.database.read() as session:
        row = repository.by_key(session, key)
        if row is None:
            return None
        if row.request_digest != digest:
            detail = f"the key was used for job {row.id} with another body"
            remedy = "use a new key for a new request"
            raise InvalidError("idempotency_key_reused", detail, field="Idempotency-Key", remedy=remedy)
        return view(session, row.id)


def _new_job(session: Session, body: JobCreate, key: str | None, digest: str) -> Job:
    dataset = datasets.share(session, body.dataset)
    if dataset is None:
        detail = f"there is no data set {body.dataset!r}"
        raise InvalidError("unknown_dataset", detail, field="dataset", remedy="upload one with POST /v1/datasets")
    model = _model(session, body.model)
    layers = _layers(body, model)
    if body.max_tokens is not None and body.max_tokens > model.max_row_tokens:
        detail = f"{body.max_tokens} is more than model {model.name} accepts"
        remedy = f"ask for at most {model.max_row_tokens}, or leave it out"
        raise InvalidError("max_tokens_too_large", detail, field="max_tokens", remedy=remedy)
    job = Job(
        id=new_id("job"),
        state=JobState.QUEUED.value,
        idempotency_key=key,
        request_digest=digest,
        dataset_id=dataset.id,
        dataset_sha256=dataset.sha256,
        model=model.name,
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        layers=layers,
        preset=body.preset,
        final=body.final.value,
        max_tokens=body.max_tokens,
        overflow=body.overflow.value,
        loss_mask=body.loss_mask.value,
        shard_bytes=body.shard_bytes,
        labels=body.metadata,
        engine={},
        tasks_open=1,
        row_errors=dataset.bad_rows,
        created_at=utc_now(),
    )
    session.add(job)
    session.flush()
    plan = Task(id=new_id("task"), job_id=job.id, kind=TaskKind.PLAN.value, index=0, model=job.model, pins_key="")
    plan.state = TaskState.READY.value
    session.add(plan)
    session.flush()
    return job


def _model(session: Session, asked: str) -> Model:
    model = workers.model(session, asked)
    if model is not None:
        return model
    names = workers.model_names(session)
    known = (
        f"name one of: {', '.join(names)}" if names else "start a worker that serves it; no worker has registered yet"
    )
    if asked.startswith(("/", ".", "~")) or "\\" in asked or ".." in asked.split("/"):
        detail = f"the path {asked!r} is none that a worker registered"
        raise InvalidError("model_not_allowed", detail, field="model", remedy=known)
    raise InvalidError("unknown_model", f"no worker registered a model {asked!r}", field="model", remedy=known)


def _layers(body: JobCreate, model: Model) -> list[int]:
    try:
        return boundaries.resolve(body.layers, body.preset, model.num_layers)
    except boundaries.BoundaryError as error:
        field = "preset" if body.preset is not None and body.layers is None else "layers"
        remedy = f"name boundaries within 0 to {model.num_layers}, each once, or a preset"
        raise InvalidError("invalid_layers", str(error), field=field, remedy=remedy) from error
