"""Claims: which task a worker is given, and the lease that says all it needs to work on it."""

from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from layertap.schemas.jobs import Final, JobState, LossMask, Overflow
from layertap.schemas.shards import Pins
from layertap.schemas.tasks import ClaimRequest, ClaimResponse, Lease, PlanSpec, ShardSpec, TaskKind
from layertap.schemas.workers import WorkerState
from layertap.storage_paths import dataset_file, shard_file, tokens_dir
from service.context import Context
from service.db.models import Job, Task
from service.jobs import progression
from service.jobs import repository as jobs
from service.problems import ConflictError
from service.tasks import endings, repository
from service.workers import repository as workers

_IDLE_SECONDS = 1.0


def claim(context: Context, body: ClaimRequest) -> ClaimResponse:
    """A lease, or the model to load first, or neither. The same request id returns the same lease while it is held.

    Raises `ConflictError` `unknown_worker` where the worker should register (again).
    """
    try:
        answer = _claim(context, body)
    except IntegrityError:
        # The same claim arrived twice at once; the other one has the lease by now.
        return _claim(context, body)
    if answer.lease is None and answer.load_model is None and endings.expire_leases(context):
        return _claim(context, body)
    return answer


def _claim(context: Context, body: ClaimRequest) -> ClaimResponse:
    clock, seconds = context.database.clock, context.settings.lease_seconds
    with context.database.write() as session:
        worker = workers.get(session, body.worker)
        if worker is None or worker.state == WorkerState.GONE:
            remedy = "register with POST /v1/workers, then claim"
            raise ConflictError(
                "unknown_worker", f"worker {body.worker} is not registered", field="worker", remedy=remedy
            )
        task = repository.held_request(session, clock, body.worker, body.request_id, seconds)
        if task is None and worker.state != WorkerState.DRAINING:
            task = _take(session, context, body)
        if task is not None:
            return ClaimResponse(lease=_lease(session, task, seconds), retry_after_seconds=0.0)
        load = None
        if TaskKind.SHARD in body.kinds and worker.state != WorkerState.DRAINING:
            load = repository.waiting_model(session, body.worker, body.loaded_model)
        return ClaimResponse(load_model=load, retry_after_seconds=_IDLE_SECONDS)


def _take(session: Session, context: Context, body: ClaimRequest) -> Task | None:
    """Plans first: they are short, and shards of a planned job can wait behind those that run."""
    clock, seconds = context.database.clock, context.settings.lease_seconds
    task = None
    if TaskKind.PLAN in body.kinds:
        task = repository.claim_plan(session, clock, body.worker, body.request_id, seconds)
        if task is not None:
            job = jobs.lock(session, task.job_id)
            assert job is not None, "a task's job is deleted only with the task"
            if job.state == JobState.QUEUED:
                progression.enter(job, JobState.PLANNING)
    if task is None and TaskKind.SHARD in body.kinds and body.loaded_model is not None:
        task = repository.claim_shard(session, clock, body.worker, body.request_id, seconds, body.loaded_model)
    return task


def _lease(session: Session, task: Task, seconds: float) -> Lease:
    job = jobs.get(session, task.job_id)
    assert job is not None, "a task's job is deleted only with the task"
    models = workers.models_of(session, [task.worker_id or ""])[task.worker_id or ""]
    path = next((model.path for model in models if model.name == task.model), "")
    plan = _plan_spec(job, task) if task.kind == TaskKind.PLAN else None
    shard = _shard_spec(job, task) if task.kind == TaskKind.SHARD else None
    return Lease(
        task=task.id,
        kind=TaskKind(task.kind),
        job=job.id,
        generation=task.generation,
        secret=task.secret,
        lease_seconds=seconds,
        model=job.model,
        model_path=path,
        layers=job.layers,
        final=Final(job.final),
        plan=plan,
        shard=shard,
    )


def _plan_spec(job: Job, task: Task) -> PlanSpec:
    return PlanSpec(
        dataset_file=dataset_file(job.dataset_id),
        tokens_dir=tokens_dir(job.id, task.generation),
        max_tokens=job.max_tokens,
        overflow=Overflow(job.overflow),
        loss_mask=LossMask(job.loss_mask),
        shard_bytes=job.shard_bytes,
    )


def _shard_spec(job: Job, task: Task) -> ShardSpec:
    assert job.tokens_generation is not None, "shards exist only once a plan is committed"
    return ShardSpec(
        index=task.index,
        tokens_dir=tokens_dir(job.id, job.tokens_generation),
        first_row=task.first_row,
        rows=task.rows,
        tokens=task.tokens,
        bytes=task.bytes,
        file=shard_file(job.id, task.index, task.generation),
        pins=Pins.model_validate(job.pins),
        dataset_sha256=job.dataset_sha256,
    )
