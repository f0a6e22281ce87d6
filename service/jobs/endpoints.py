"""`/v1/jobs`."""

from typing import Annotated

from fastapi import APIRouter, Header, Query, Response
from fastapi.responses import StreamingResponse

from layertap.schemas.common import Page
from layertap.schemas.datasets import RowProblem
from layertap.schemas.jobs import Job, JobCreate, JobState
from service.context import ContextDep
from service.jobs import repository, service
from service.jobs.events import job_events
from service.openapi_parts import problems
from service.paging import After, AfterNumber, Limit, page
from service.problems import RETRY_AFTER, NotFoundError, ProblemError

router = APIRouter(prefix="/v1/jobs", tags=["jobs"])

IdempotencyKey = Annotated[
    str | None,
    Header(alias="Idempotency-Key", min_length=1, max_length=255, description="Makes the request safe to repeat."),
]
LastEventId = Annotated[str | None, Header(alias="Last-Event-ID", description="Id of the last event received.")]
StateFilter = Annotated[JobState | None, Query(description="Only jobs in this state.")]


@router.post("", status_code=202, responses={200: {"model": Job, "description": "A repeat"}, **problems(422)})
def create_job(body: JobCreate, response: Response, context: ContextDep, idempotency_key: IdempotencyKey = None) -> Job:
    """Create a job.

    Poll the URL in `Location`, or follow its `/events`. With an `Idempotency-Key` the request may be repeated.
    """
    job, new = service.create(context, body, idempotency_key)
    response.status_code = 202 if new else 200
    response.headers["Location"] = f"/v1/jobs/{job.id}"
    response.headers.update(RETRY_AFTER)
    return job


@router.get("", responses=problems(422))
def list_jobs(context: ContextDep, limit: Limit = 100, after: After = None, state: StateFilter = None) -> Page[Job]:
    """List jobs, newest first."""
    with context.database.read() as session:
        views = service.views(session, list(repository.page(session, limit, after, state)))
    return page(views, limit, lambda job: job, lambda job: job.id)


@router.get("/{job}", responses=problems(404))
def get_job(context: ContextDep, job: str) -> Job:
    """Show one job."""
    with context.database.read() as session:
        return service.view(session, job)


@router.post("/{job}/cancel", status_code=202, responses=problems(404, 409))
def cancel_job(context: ContextDep, job: str) -> Job:
    """Cancel a job.

    Shards that are committed stay.
    """
    return service.cancel(context, job)


@router.post("/{job}/retry", status_code=202, responses=problems(404, 409))
def retry_job(context: ContextDep, job: str) -> Job:
    """Queue again what a failed or cancelled job has not committed."""
    return service.retry(context, job)


@router.delete("/{job}", status_code=204, responses=problems(404, 409))
def delete_job(context: ContextDep, job: str) -> None:
    """Delete a job that is over, with its shards."""
    service.delete(context, job)


@router.get("/{job}/errors", responses=problems(404, 422))
def list_job_errors(context: ContextDep, job: str, limit: Limit = 100, after: AfterNumber = None) -> Page[RowProblem]:
    """List the rows that have no hidden states, by row.

    They were refused on upload, when planning, or when extracting.
    """
    with context.database.read() as session:
        row = repository.get(session, job)
        if row is None:
            raise NotFoundError("job", job)
        errors = repository.errors_page(session, row, limit, after)
    return page(errors, limit, service.show_error, lambda problem: str(problem.row_id))


@router.get(
    "/{job}/events",
    response_class=StreamingResponse,
    responses={
        200: {"description": "Events `job`, each the job's document", "content": {"text/event-stream": {}}},
        **problems(404, 503),
    },
)
def follow_job(context: ContextDep, job: str, last_event_id: LastEventId = None) -> StreamingResponse:
    """Follow a job by server-sent events.

    Its document comes on every change, until the job is over. `Last-Event-ID` leaves out what was seen.
    """

    def read() -> Job | None:
        try:
            with context.database.read() as session:
                return service.view(session, job)
        except NotFoundError:
            return None

    if read() is None:
        raise NotFoundError("job", job)
    if context.event_streams >= context.settings.max_event_streams:
        detail, remedy = "as many streams are open as the service allows", "poll the job instead"
        raise ProblemError(503, "too_many_streams", detail, field="service", remedy=remedy, headers=RETRY_AFTER)
    return StreamingResponse(
        job_events(context, read, last_event_id),
        media_type="text/event-stream",
        headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"},
    )
