"""`/v1/datasets`."""

import errno
from typing import Annotated

from fastapi import APIRouter, Query, Request, Response
from starlette.concurrency import run_in_threadpool

from layertap.schemas.common import Page
from layertap.schemas.datasets import Dataset, RowProblem
from service.context import Context, ContextDep
from service.datasets import repository, service
from service.datasets.upload import Upload
from service.ids import new_id
from service.openapi_parts import JSONL_BODY, problems
from service.paging import After, AfterNumber, Limit, page
from service.problems import NotFoundError, ProblemError

router = APIRouter(prefix="/v1/datasets", tags=["datasets"])

_CHUNK = 1024 * 1024
Name = Annotated[str, Query(min_length=1, max_length=200, description="A name for people.")]


@router.post("", status_code=201, openapi_extra=JSONL_BODY, responses=problems(400, 415, 422, 507))
async def upload_dataset(request: Request, response: Response, context: ContextDep, name: Name = "dataset") -> Dataset:
    """Upload a data set.

    The JSONL file is the body. Every line is checked on arrival; lines that can't be used are listed at
    `/v1/datasets/{dataset}/errors`.
    """
    encoding = request.headers.get("content-encoding", "identity")
    if encoding != "identity":
        detail = f"Content-Encoding {encoding} is not supported"
        remedy = "send the file as it is, without compression"
        raise ProblemError(415, "unsupported_content_encoding", detail, field="Content-Encoding", remedy=remedy)
    try:
        dataset = await _receive(request, context, name)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        detail = "the storage is full"
        raise ProblemError(507, "storage_full", detail, field="body", remedy="free space in the storage") from error
    response.headers["Location"] = f"/v1/datasets/{dataset.id}"
    return dataset


async def _receive(request: Request, context: Context, name: str) -> Dataset:
    upload = await run_in_threadpool(Upload, context.storage, new_id("ds"))
    try:
        chunk = bytearray()
        async for part in request.stream():
            chunk += part
            if len(chunk) >= _CHUNK:
                await run_in_threadpool(upload.feed, bytes(chunk))
                chunk.clear()
        await run_in_threadpool(upload.feed, bytes(chunk))
        return await run_in_threadpool(service.complete, context.database, upload, name)
    finally:
        upload.close()


@router.get("", responses=problems(422))
def list_datasets(context: ContextDep, limit: Limit = 100, after: After = None) -> Page[Dataset]:
    """List data sets, newest first."""
    with context.database.read() as session:
        return page(repository.page(session, limit, after), limit, service.show, lambda dataset: dataset.id)


@router.get("/{dataset}", responses=problems(404))
def get_dataset(context: ContextDep, dataset: str) -> Dataset:
    """Show one data set."""
    with context.database.read() as session:
        row = repository.get(session, dataset)
    if row is None:
        raise NotFoundError("dataset", dataset)
    return service.show(row)


@router.get("/{dataset}/errors", responses=problems(404, 422))
def list_dataset_errors(
    context: ContextDep, dataset: str, limit: Limit = 100, after: AfterNumber = None
) -> Page[RowProblem]:
    """List the lines that were refused on upload.

    By line; the first 100,000 are kept.
    """
    with context.database.read() as session:
        if repository.get(session, dataset) is None:
            raise NotFoundError("dataset", dataset)
        rows = repository.errors_page(session, dataset, limit, after)
    return page(rows, limit, service.show_error, lambda problem: str(problem.row_id))


@router.delete("/{dataset}", status_code=204, responses=problems(404, 409))
def delete_dataset(context: ContextDep, dataset: str) -> None:
    """Delete a data set.

    Refused while a job that is not over reads it.
    """
    service.delete(context.database, context.storage, dataset)
