"""`/healthz` and `/readyz`."""

from fastapi import APIRouter, Response
from sqlalchemy import text
from sqlalchemy.exc import SQLAlchemyError

from layertap.schemas.common import Health
from service import VERSION
from service.context import Context, ContextDep
from service.db.migrate import at_head

router = APIRouter(tags=["health"])
_OK = "ok"


@router.get("/healthz")
async def alive() -> Health:
    """Whether the process answers."""
    return Health(status="ok", version=VERSION)


@router.get("/readyz", responses={503: {"model": Health, "description": "Something is missing; `checks` says what"}})
def ready(response: Response, context: ContextDep) -> Health:
    """Whether the database answers at the right revision and the storage can be written."""
    checks = {"database": _database(context), "storage": _storage(context)}
    fine = all(check == _OK for check in checks.values())
    response.status_code = 200 if fine else 503
    return Health(status="ok" if fine else "unavailable", version=VERSION, checks=checks)


def _database(context: Context) -> str:
    try:
        with context.database.read() as session:
            session.execute(text("SELECT 1"))
            return _OK if at_head(session.connection()) else "the database is at another revision; restart the service"
    except SQLAlchemyError as error:
        return f"the database does not answer: {type(error).__name__}"


def _storage(context: Context) -> str:
    try:
        context.storage.check_writable()
    except OSError as error:
        return f"the storage can't be written: {error.strerror}"
    return _OK
