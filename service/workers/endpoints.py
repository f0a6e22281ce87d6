"""`/v1/workers` and `/v1/models`."""

from fastapi import APIRouter, Response

from layertap.schemas.common import Page
from layertap.schemas.tasks import ControlRequest, ControlResponse, Goodbye
from layertap.schemas.workers import Model, Worker, WorkerRegister
from service.context import ContextDep
from service.openapi_parts import problems
from service.paging import After, Limit, page
from service.workers import repository, service

router = APIRouter(prefix="/v1/workers", tags=["workers"])
models_router = APIRouter(prefix="/v1/models", tags=["models"])


@router.post("", status_code=201, responses=problems(409, 422))
def register_worker(body: WorkerRegister, response: Response, context: ContextDep) -> Worker:
    """Register a worker and the models it can serve.

    May be repeated.
    """
    response.headers["Location"] = "/v1/workers"
    return service.register(context, body)


@router.get("", responses=problems(422))
def list_workers(context: ContextDep, limit: Limit = 100, after: After = None) -> Page[Worker]:
    """List workers, by id."""
    with context.database.read() as session:
        rows = repository.page(session, limit, after)
        models = repository.models_of(session, [row.id for row in rows])
    return page(rows, limit, lambda row: service.show(row, models[row.id]), lambda worker: worker.id)


@router.post("/{worker}/control", responses=problems(422))
def control_worker(worker: str, body: ControlRequest, context: ContextDep) -> ControlResponse:
    """Report the worker's state and learn which tasks it must drop."""
    return service.control(context, worker, body)


@router.post("/{worker}/goodbye", responses=problems(404, 422))
def end_worker(worker: str, body: Goodbye, context: ContextDep) -> Worker:
    """Say that the worker ends.

    Its leases are released.
    """
    return service.goodbye(context, worker)


@models_router.get("", responses=problems(422))
def list_models(context: ContextDep, limit: Limit = 100, after: After = None) -> Page[Model]:
    """List the models that jobs may name."""
    with context.database.read() as session:
        rows = repository.models_page(session, limit, after)
    return page(rows, limit, service.show_model, lambda model: model.name)
