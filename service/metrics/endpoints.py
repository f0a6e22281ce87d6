"""`/metrics`."""

from fastapi import APIRouter, Response
from fastapi.responses import PlainTextResponse
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from service.context import ContextDep
from service.metrics import exposition, repository

router = APIRouter(tags=["metrics"])


@router.get("/metrics", response_class=PlainTextResponse)
def show_metrics(context: ContextDep) -> Response:
    """Show the figures of workers and jobs in Prometheus' text format.

    They are read from the database at that moment. With a token, it is asked for here too.
    """
    with context.database.read() as session:
        found = repository.snapshot(session)
    return Response(exposition.text(found), media_type=CONTENT_TYPE_LATEST)
