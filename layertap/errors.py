"""Every error that Layertap raises on purpose, under one base. Each message says what is wrong and what to do."""

from collections.abc import Sequence

from layertap.schemas.common import FieldError, Problem


class LayertapError(Exception):
    """Base of all errors of this package."""


class FormatError(LayertapError):
    """A folder that is not a pulled job, or whose format this version can't read."""


class ShardError(LayertapError):
    """A shard that is missing, short or damaged. `files` names every one found."""

    def __init__(self, message: str, files: Sequence[str]) -> None:
        super().__init__(message)
        self.files = tuple(files)

    def __reduce__(self) -> tuple[type["ShardError"], tuple[str, tuple[str, ...]]]:
        """Both arguments, so that the error crosses from a data loader's worker process."""
        return type(self), (str(self), self.files)


class MissingExtraError(LayertapError):
    """An optional dependency that the asked feature needs is not installed."""


class PullError(LayertapError):
    """A pull that could not finish; what it has downloaded so far is kept."""


class PullInterruptedError(PullError):
    """A pull that was asked to stop."""


class ConnectionFailedError(LayertapError):
    """The service could not be reached, or stopped answering, within the bounded number of tries."""


class WaitTimeoutError(LayertapError):
    """The job was still going when the caller's time was up."""


class ApiError(LayertapError):
    """The service answered with a problem: HTTP `status`, a stable `code`, `detail` for people, `errors` by field."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.detail)
        self.problem = problem
        self.status = problem.status
        self.code = problem.code
        self.detail = problem.detail
        self.errors = tuple(problem.errors)

    def __reduce__(self) -> tuple[type["ApiError"], tuple[Problem]]:
        """The problem itself, so that the error can cross processes."""
        return type(self), (self.problem,)


class InvalidRequestError(ApiError):
    """400, 413, 415 or 422: the request itself must change; `errors` says which fields and how."""


class NotAuthorizedError(ApiError):
    """401 or 403: the token is missing, unknown, or not allowed to do this."""


class NotFoundError(ApiError):
    """404: no such job, data set or shard."""


class ConflictError(ApiError):
    """409: what was asked does not fit the state the thing is in."""


class ServiceFailedError(ApiError):
    """5xx or 429: the service could not do it now."""


_BY_STATUS: dict[int, type[ApiError]] = {
    400: InvalidRequestError,
    401: NotAuthorizedError,
    403: NotAuthorizedError,
    404: NotFoundError,
    409: ConflictError,
    413: InvalidRequestError,
    415: InvalidRequestError,
    422: InvalidRequestError,
    429: ServiceFailedError,
}


def api_error(problem: Problem) -> ApiError:
    """The error class that fits the problem's status."""
    kind = ServiceFailedError if problem.status >= 500 else _BY_STATUS.get(problem.status, ApiError)
    return kind(problem)


def field_lines(errors: Sequence[FieldError]) -> list[str]:
    """One line a field: its name, the reason, and the remedy."""
    return [f"{e.field}: {e.reason}" + (f" ({e.remedy})" if e.remedy else "") for e in errors]
