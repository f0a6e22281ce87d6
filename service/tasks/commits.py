"""Commits: a plan becomes shard tasks, a shard file becomes part of the job's result, each exactly once."""

import hashlib
from typing import Any

from sqlalchemy.orm import Session

from layertap.schemas.jobs import JobState
from layertap.schemas.tasks import PlanCommit, RowErrorsReport, ShardCommit, TaskAck, TaskKind
from layertap.storage_paths import shard_file
from service import leases
from service.context import Context
from service.db.clock import utc_now
from service.db.models import Job, Task
from service.ids import new_id
from service.jobs import progression
from service.jobs.space import shortage
from service.leases import TaskState
from service.problems import ConflictError, InvalidError, LeaseLostError, NotFoundError
from service.tasks import repository
from service.tasks.endings import locked, rules
from service.workers.service import pins_key


def save_row_errors(context: Context, task: str, body: RowErrorsReport) -> TaskAck:
    """Note rows that the lease's holder gave up. Raises `LeaseLostError`."""
    with context.database.write() as session:
        row = _get(session, task)
        if not repository.hold(session, task, body):
            raise LeaseLostError(task, body.generation)
        repository.save_row_errors(session, row, body.generation, body.errors)
    return TaskAck(task=task, state=TaskState.LEASED.value)


def commit_shard(context: Context, task: str, body: ShardCommit) -> TaskAck:
    """Take a shard into the job's result. Said again by the same lease it is answered and not counted.

    Raises `LeaseLostError`; `ConflictError` `shard_missing` where the file is not there with that size;
    `InvalidError` where rows were lost or invented.
    """
    with context.database.read() as session:
        row = _get(session, task)
    if _repeated(row, body, body.sha256):
        return TaskAck(task=task, state=TaskState.DONE.value)
    _check_shard(context, row, body)
    with context.database.write() as session:
        found = locked(session, task)
        if found is None:
            raise NotFoundError("task", task)
        row, job = found
        values = {
            "sha256": body.sha256,
            "committed_bytes": body.bytes,
            "committed_rows": body.rows,
            "committed_tokens": body.tokens,
            "committed_at": utc_now(),
            "failure_code": None,
            "failure_reason": None,
        }
        if not repository.commit_shard(session, task, body, values):
            if _repeated(row, body, body.sha256):
                return TaskAck(task=task, state=TaskState.DONE.value)
            raise LeaseLostError(task, body.generation)
        _count_shard(session, job, row, body)
    if job.tasks_open == 0:
        context.wake.set()
    return TaskAck(task=task, state=TaskState.DONE.value)


def _check_shard(context: Context, row: Task, body: ShardCommit) -> None:
    if row.kind != TaskKind.SHARD:
        raise _wrong_kind(row, "commit-plan")
    if not leases.held(rules(row), body.generation, body.secret):
        raise LeaseLostError(row.id, body.generation)
    if body.rows + body.row_errors != row.rows:
        detail = f"{body.rows} rows and {body.row_errors} row errors do not make the {row.rows} rows of the shard"
        remedy = "commit every row of the shard, or report it as a row error"
        raise InvalidError("rows_do_not_add_up", detail, field="rows", remedy=remedy)
    if body.rows == 0:
        return
    file = shard_file(row.job_id, row.index, body.generation)
    size = context.storage.size(file)
    if size != body.bytes:
        there = "is not there" if size is None else f"has {size} bytes, not {body.bytes}"
        remedy = "write the shard whole, under this name, and commit again"
        raise ConflictError("shard_missing", f"{file} {there}", field="bytes", remedy=remedy)


def _count_shard(session: Session, job: Job, row: Task, body: ShardCommit) -> None:
    errors = repository.settle_row_errors(session, row.id, body.generation, job.dataset_id)
    if errors != body.row_errors:
        detail = f"the commit counts {body.row_errors} row errors, but {errors} were posted"
        remedy = "post every row error with the same lease before the commit"
        raise InvalidError("row_errors_do_not_add_up", detail, field="row_errors", remedy=remedy)
    job.rows_done += body.rows
    job.tokens_done += body.tokens
    job.bytes_done += row.bytes
    job.shards_done += 1
    job.row_errors += errors
    if body.engine:
        job.engine = body.engine
    progression.tasks_ended(job, 1)


def commit_plan(context: Context, task: str, body: PlanCommit) -> TaskAck:
    """Take a plan: its shards become tasks in the same transaction. Said again by the same lease it is only answered.

    The answer's state is `done`; `failed` where the plan's bytes do not fit the storage; `cancelled` where the job was
    cancelled meanwhile. Raises `LeaseLostError`, or `InvalidError` where the shards do not cover the rows.
    """
    _check_plan(body)
    digest = hashlib.sha256(body.model_dump_json(exclude={"worker"}).encode()).hexdigest()
    free = context.storage.free_bytes()
    with context.database.write() as session:
        found = locked(session, task)
        if found is None:
            raise NotFoundError("task", task)
        row, job = found
        if row.kind != TaskKind.PLAN:
            raise _wrong_kind(row, "commit-shard")
        if _repeated(row, body, digest):
            return TaskAck(task=task, state=TaskState.DONE.value)
        state = _plan_state(context, session, job, body, free)
        values: dict[str, Any] = {"state": state.value, "sha256": digest, "committed_at": utc_now()}
        if not repository.commit_plan(session, task, body, values):
            raise LeaseLostError(task, body.generation)
        if state is TaskState.DONE:
            _run(session, job, row, body)
        progression.tasks_ended(job, 1)
    if job.tasks_open == 0:
        context.wake.set()
    return TaskAck(task=task, state=state.value)


def _check_plan(body: PlanCommit) -> None:
    next_row = 0
    for index, shard in enumerate(body.shards):
        if shard.first_row != next_row:
            detail = f"it starts at row {shard.first_row}, the shards before it end at row {next_row}"
            remedy = "let the shards cover every row once, in order"
            raise InvalidError("plan_has_gaps", detail, field=f"shards.{index}.first_row", remedy=remedy)
        next_row += shard.rows
    for field, total, summed in (
        ("rows", body.rows, next_row),
        ("tokens", body.tokens, sum(shard.tokens for shard in body.shards)),
    ):
        if total != summed:
            detail = f"the shards hold {summed} {field}, not {total}"
            raise InvalidError("plan_does_not_add_up", detail, field=field, remedy="send the sum over the shards")


def _plan_state(context: Context, session: Session, job: Job, body: PlanCommit, free: int) -> TaskState:
    """What the plan's task becomes; notes on the job why it can't go on."""
    if job.state == JobState.CANCELLING:
        return TaskState.CANCELLED
    reason = shortage(context, session, sum(shard.bytes for shard in body.shards), free)
    if reason is not None:
        progression.fail(job, "not_enough_space", reason)
        return TaskState.FAILED
    return TaskState.DONE


def _run(session: Session, job: Job, row: Task, body: PlanCommit) -> None:
    job.row_errors += repository.settle_row_errors(session, row.id, body.generation, job.dataset_id)
    job.rows_total, job.tokens_total = body.rows, body.tokens
    job.bytes_total = sum(shard.bytes for shard in body.shards)
    job.shards_total = len(body.shards)
    if not body.shards:
        progression.fail(job, "no_rows", "no row of the data set is left to extract; its errors say why")
        return
    job.tokens_generation = body.generation
    job.pins = body.pins.model_dump()
    job.pins_key = pins_key(body.pins)
    job.tasks_open += len(body.shards)
    progression.enter(job, JobState.RUNNING)
    session.flush()
    repository.add_shards(
        session,
        [
            {
                "id": new_id("task"),
                "job_id": job.id,
                "kind": TaskKind.SHARD.value,
                "index": index,
                "model": job.model,
                "pins_key": job.pins_key,
                "state": TaskState.READY.value,
                **shard.model_dump(),
            }
            for index, shard in enumerate(body.shards)
        ],
    )


def _get(session: Session, task: str) -> Task:
    row = repository.get(session, task)
    if row is None:
        raise NotFoundError("task", task)
    return row


def _repeated(row: Task, body: PlanCommit | ShardCommit, sha256: str) -> bool:
    return leases.repeats_commit(rules(row), body.generation, body.secret, sha256)


def _wrong_kind(row: Task, verb: str) -> InvalidError:
    return InvalidError("wrong_kind", f"task {row.id} is a {row.kind} task", field="task", remedy=f"use {verb}")
