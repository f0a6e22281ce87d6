"""Errors of the service and the one place that turns any of them into an RFC 9457 problem response.

Every problem carries `type` (`urn:layertap:problem:<code>`), a stable `code`, and `errors`, each naming the field at
fault, the reason, and the remedy.
"""

import logging
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from sqlalchemy.exc import DataError, OperationalError, TimeoutError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import Match

from layertap.schemas.common import FieldError, Problem

MEDIA_TYPE = "application/problem+json"
RETRY_AFTER = {"Retry-After": "1"}
_METHODS = ("DELETE", "GET", "HEAD", "PATCH", "POST", "PUT")
_log = logging.getLogger(__name__)


class ProblemError(Exception):
    """A request that can't be answered as asked."""

    def __init__(
        self,
        status: int,
        code: str,
        detail: str,
        *,
        field: str,
        remedy: str | None,
        errors: Sequence[FieldError] = (),
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(detail)
        self.headers = dict(headers or {})
        self.problem = Problem(
            type=f"urn:layertap:problem:{code}",
            title=code.replace("_", " ").capitalize(),
            status=status,
            detail=detail,
            code=code,
            errors=list(errors) or [FieldError(field=field, reason=detail, remedy=remedy)],
        )


class NotFoundError(ProblemError):
    """Nothing of that kind has that id."""

    def __init__(self, what: str, identifier: str) -> None:
        super().__init__(
            404,
            f"{what.replace(' ', '_')}_not_found",
            f"there is no {what} {identifier!r}",
            field=what.replace(" ", "_"),
            remedy=f"list what exists and use the id of a {what} from there",
        )


class ConflictError(ProblemError):
    """The request does not fit the state that the resource is in."""

    def __init__(self, code: str, detail: str, *, field: str, remedy: str) -> None:
        super().__init__(409, code, detail, field=field, remedy=remedy)


class LeaseLostError(ConflictError):
    """The named lease is not the one that holds the task."""

    def __init__(self, task: str, generation: int) -> None:
        super().__init__(
            "lease_lost",
            f"generation {generation} does not hold task {task}",
            field="generation",
            remedy="drop the task at once and claim another",
        )


class InvalidError(ProblemError):
    """A field of the request has a value that can't be used."""

    def __init__(self, code: str, detail: str, *, field: str, remedy: str, errors: Sequence[FieldError] = ()) -> None:
        super().__init__(422, code, detail, field=field, remedy=remedy, errors=errors)


def response(error: ProblemError, instance: str | None = None) -> JSONResponse:
    """The response of one error."""
    problem = error.problem.model_copy(update={"instance": instance})
    return JSONResponse(
        problem.model_dump(mode="json"), status_code=problem.status, media_type=MEDIA_TYPE, headers=error.headers
    )


def install(app: FastAPI) -> None:
    """Make every error of `app` a problem response."""

    def answer(request: Request, error: ProblemError) -> JSONResponse:
        return response(error, request.url.path)

    async def on_problem(request: Request, exc: Exception) -> JSONResponse:
        assert isinstance(exc, ProblemError)
        return answer(request, exc)

    async def on_validation(request: Request, exc: Exception) -> JSONResponse:
        assert isinstance(exc, RequestValidationError)
        return answer(request, _validation(exc))

    async def on_http(request: Request, exc: Exception) -> JSONResponse:
        assert isinstance(exc, HTTPException)
        return answer(request, _http(request, exc))

    async def on_database(request: Request, exc: Exception) -> JSONResponse:
        _log.warning("database: %s", exc)
        return answer(request, _unavailable())

    async def on_unstorable(request: Request, exc: Exception) -> JSONResponse:
        return answer(request, _unstorable())

    async def on_disconnect(request: Request, exc: Exception) -> JSONResponse:
        return answer(request, _disconnected())

    async def on_any(request: Request, exc: Exception) -> JSONResponse:
        _log.error("%s %s failed", request.method, request.url.path, exc_info=exc)
        return answer(request, _internal())

    app.add_exception_handler(ProblemError, on_problem)
    app.add_exception_handler(RequestValidationError, on_validation)
    app.add_exception_handler(HTTPException, on_http)
    app.add_exception_handler(OperationalError, on_database)
    app.add_exception_handler(TimeoutError, on_database)
    for unstorable in (DataError, UnicodeEncodeError, OverflowError):
        app.add_exception_handler(unstorable, on_unstorable)
    app.add_exception_handler(ClientDisconnect, on_disconnect)
    app.add_exception_handler(Exception, on_any)


def _validation(exc: RequestValidationError) -> ProblemError:
    errors = [_field_error(error) for error in exc.errors()]
    detail = "; ".join(f"{e.field}: {e.reason}" for e in errors[:3])
    return ProblemError(422, "invalid_request", detail, field="body", remedy=None, errors=errors)


def _field_error(error: Mapping[str, Any]) -> FieldError:
    location = [str(part) for part in error["loc"]]
    if error["type"] == "json_invalid":
        return FieldError(field="body", reason=f"not valid JSON: {error['msg']}", remedy="send one JSON object")
    if len(location) > 1 and location[0] in ("body", "query", "path", "header"):
        location = location[1:]
    remedies = {"missing": "add the field", "extra_forbidden": "remove the field, or correct its spelling"}
    reason = str(error["msg"])
    remedy = remedies.get(error["type"], "send a value as the field's schema in the API description asks")
    return FieldError(field=".".join(location), reason=reason, remedy=remedy)


def _http(request: Request, exc: HTTPException) -> ProblemError:
    if exc.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        allowed = ", ".join(_allowed_methods(request))
        detail = f"{request.method} is not possible on {request.url.path}"
        return ProblemError(
            405, "method_not_allowed", detail, field="method", remedy=f"use {allowed}", headers={"Allow": allowed}
        )
    if exc.status_code == HTTPStatus.NOT_FOUND:
        detail = f"nothing is at {request.url.path}"
        return ProblemError(404, "not_found", detail, field="path", remedy="see the paths in the API description")
    code = HTTPStatus(exc.status_code).phrase.lower().replace(" ", "_").replace("-", "_")
    remedy = "send the request as the API description says"
    return ProblemError(exc.status_code, code, str(exc.detail), field="request", remedy=remedy, headers=exc.headers)


def _allowed_methods(request: Request) -> list[str]:
    """Every method that some route of the app takes at the request's path (the router names those of one route)."""

    def taken(method: str) -> bool:
        scope = {**request.scope, "method": method}
        return any(route.matches(scope)[0] is Match.FULL for route in request.app.routes)

    return [method for method in _METHODS if taken(method)]


def _unavailable() -> ProblemError:
    detail = "the database did not answer in time"
    remedy = "repeat the request after a moment"
    return ProblemError(503, "database_unavailable", detail, field="service", remedy=remedy, headers=RETRY_AFTER)


def _unstorable() -> InvalidError:
    detail = "a value has a NUL, a lone surrogate, or a number beyond 64 bits"
    return InvalidError("unstorable_value", detail, field="request", remedy="send plain text and 64-bit numbers")


def _disconnected() -> ProblemError:
    detail = "the connection ended before the request was complete"
    return ProblemError(400, "incomplete_request", detail, field="body", remedy="send the whole request again")


def _internal() -> ProblemError:
    detail = "the service failed to answer; its log says why"
    return ProblemError(500, "internal_error", detail, field="service", remedy="look into the log of the service")
