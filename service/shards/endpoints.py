"""`/v1/jobs/{job}/shards` and `/v1/jobs/{job}/manifest`."""

import hashlib
from typing import Annotated, Any

from fastapi import APIRouter, Path, Request
from fastapi.responses import Response

from layertap.schemas.common import Page
from layertap.schemas.shards import Manifest
from layertap.schemas.shards import Shard as ShardView
from layertap.storage_paths import manifest_file, shard_file, shard_name
from service.context import Context, ContextDep
from service.db.models import Task
from service.jobs import repository as jobs
from service.openapi_parts import problems
from service.paging import AfterNumber, Limit, page
from service.problems import NotFoundError, ProblemError
from service.shards.download import send_file
from service.tasks import repository as tasks

router = APIRouter(prefix="/v1/jobs/{job}", tags=["shards"])

Index = Annotated[int, Path(ge=0, le=2**62)]
_BINARY: dict[str, Any] = {"content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}}
_DOWNLOAD: dict[int | str, dict[str, Any]] = {
    200: {"description": "The whole file", **_BINARY},
    206: {"description": "The asked range", **_BINARY},
    304: {"description": "Unchanged"},
    **problems(404, 416, 422, 500),
}


@router.get("/shards", responses=problems(404, 422))
def list_shards(context: ContextDep, job: str, limit: Limit = 100, after: AfterNumber = None) -> Page[ShardView]:
    """List the committed shards, by index.

    `after` is an index.
    """
    with context.database.read() as session:
        if jobs.get(session, job) is None:
            raise NotFoundError("job", job)
        rows = tasks.committed_page(session, job, limit, after)
    return page(rows, limit, _show, lambda shard: str(shard.index))


@router.get("/shards/{index}", responses=problems(404, 422))
def get_shard(context: ContextDep, job: str, index: Index) -> ShardView:
    """Show one committed shard."""
    return _show(_shard(context, job, index))


@router.head("/shards/{index}/content", response_class=Response, responses=_DOWNLOAD)
@router.get("/shards/{index}/content", response_class=Response, responses=_DOWNLOAD)
def download_shard(request: Request, context: ContextDep, job: str, index: Index) -> Response:
    """Download a shard, whole or by `Range`."""
    row = _shard(context, job, index)
    path = context.storage.path(shard_file(job, index, row.generation))
    return send_file(request, path, row.sha256 or "", "application/octet-stream")


@router.head("/manifest", response_class=Response, responses={200: {"model": Manifest}, **problems(404, 422)})
@router.get("/manifest", response_class=Response, responses={200: {"model": Manifest}, **problems(404, 422)})
def get_manifest(request: Request, context: ContextDep, job: str) -> Response:
    """Download the manifest.

    It is there once the job is over; `complete` is false where the job failed or was cancelled.
    """
    with context.database.read() as session:
        if jobs.get(session, job) is None:
            raise NotFoundError("job", job)
    path = context.storage.path(manifest_file(job))
    try:
        content = path.read_bytes()
    except FileNotFoundError as error:
        detail = f"job {job} is not over, so it has no manifest"
        remedy = "wait until the job is over"
        raise ProblemError(404, "manifest_not_ready", detail, field="job", remedy=remedy) from error
    return send_file(request, path, hashlib.sha256(content).hexdigest(), "application/json")


def _shard(context: Context, job: str, index: int) -> Task:
    with context.database.read() as session:
        row = tasks.committed_shard(session, job, index)
    if row is None:
        raise NotFoundError("shard", f"{job}/{index}")
    return row


def _show(row: Task) -> ShardView:
    assert row.committed_at is not None, "only committed shards are shown"
    return ShardView(
        job=row.job_id,
        index=row.index,
        generation=row.generation,
        file=shard_name(row.index, row.generation),
        bytes=row.committed_bytes or 0,
        sha256=row.sha256 or "",
        rows=row.committed_rows or 0,
        tokens=row.committed_tokens or 0,
        committed_at=row.committed_at,
    )
