"""`/v1/incidents`, and the incidents of one job."""

from typing import Annotated, Any

from fastapi import APIRouter, Query, Response

from layertap.schemas.common import Page
from layertap.schemas.incidents import Incident, IncidentReport
from service.context import ContextDep
from service.incidents import repository, service
from service.jobs import repository as jobs
from service.openapi_parts import problems
from service.paging import After, Limit, page
from service.problems import NotFoundError

router = APIRouter(prefix="/v1/incidents", tags=["incidents"])
jobs_router = APIRouter(prefix="/v1/jobs", tags=["incidents"])

JobFilter = Annotated[str | None, Query(max_length=64, description="Only those that hit a task of this job.")]
WorkerFilter = Annotated[str | None, Query(max_length=64, description="Only those of this worker.")]
_REPEAT: dict[int | str, dict[str, Any]] = {200: {"model": Incident, "description": "A repeat"}}


@router.post("", status_code=201, responses={**_REPEAT, **problems(404, 409, 413, 422)})
def report_incident(body: IncidentReport, response: Response, context: ContextDep) -> Incident:
    """Report an incident.

    For workers. A repeat with the same id may change blame, what was tried, what was left, and the tasks; the evidence
    stays that of the first report. Evidence longer than 1 MiB is cut, log and stacks first. The answer carries none.
    """
    incident, new = service.report(context, body)
    response.status_code = 201 if new else 200
    response.headers["Location"] = f"/v1/incidents/{incident.id}"
    return incident


@router.get("", responses=problems(422))
def list_incidents(
    context: ContextDep, limit: Limit = 100, after: After = None, job: JobFilter = None, worker: WorkerFilter = None
) -> Page[Incident]:
    """List incidents, newest first.

    Without their evidence; ask for one by its id to see that. The newest 1,000 are kept.
    """
    with context.database.read() as session:
        views = service.views(session, repository.page(session, limit, after, job, worker))
    return page(views, limit, lambda incident: incident, lambda incident: incident.id)


@router.get("/{incident}", responses=problems(404))
def get_incident(context: ContextDep, incident: str) -> Incident:
    """Show one incident with its evidence."""
    with context.database.read() as session:
        return service.view(session, incident)


@jobs_router.get("/{job}/incidents", responses=problems(404, 422))
def list_job_incidents(context: ContextDep, job: str, limit: Limit = 100, after: After = None) -> Page[Incident]:
    """List the incidents that hit a job, newest first.

    Without their evidence.
    """
    with context.database.read() as session:
        if jobs.get(session, job) is None:
            raise NotFoundError("job", job)
        views = service.views(session, repository.page(session, limit, after, job))
    return page(views, limit, lambda incident: incident, lambda incident: incident.id)
