"""One HTTP connection pool to the service: base address, token, problem responses as errors, bounded retries.

A request that may be repeated without harm is retried with back-off when the connection breaks or the service says that
it can't answer now. Any other request is repeated only when it is known never to have been sent.
"""

import os
import random
import time
from collections.abc import Mapping
from typing import Any, TypeVar

import httpx
from pydantic import BaseModel, ValidationError

import layertap
from layertap.errors import ApiError, ConnectionFailedError, api_error
from layertap.schemas.common import Problem

DEFAULT_URL = "http://127.0.0.1:8178"
RETRIED_STATUSES = frozenset({429, 502, 503, 504})
_LOOPBACK = ("127.0.0.1", "localhost", "::1")


def may_have_proxy(host: str) -> bool:
    """Whether a proxy named in the environment is meant for that host: not for a service on this machine."""
    return host not in _LOOPBACK


M = TypeVar("M", bound=BaseModel)


class Transport:
    """Sends requests to one service. `tries` bounds how often one request is sent; close it when done."""

    def __init__(self, url: str | None = None, token: str | None = None, timeout: float = 30.0, tries: int = 6) -> None:
        self.url = (url or os.environ.get("LAYERTAP_URL") or DEFAULT_URL).rstrip("/")
        try:
            parsed = httpx.URL(self.url)
        except (httpx.InvalidURL, ValueError) as e:
            raise ConnectionFailedError(f"{self.url!r} is no URL ({e}); use http://HOST:PORT") from None
        if parsed.scheme not in ("http", "https") or not parsed.host:
            raise ConnectionFailedError(f"{self.url!r} is no http URL; use http://HOST:PORT")
        token = token or os.environ.get("LAYERTAP_TOKEN")
        headers = {"user-agent": f"layertap/{layertap.__version__}"}
        if token:
            headers["authorization"] = f"Bearer {token}"
        self._tries = tries
        self.http = httpx.Client(
            base_url=self.url,
            headers=headers,
            timeout=httpx.Timeout(timeout, connect=min(timeout, 10.0)),
            trust_env=may_have_proxy(parsed.host),
        )

    def close(self) -> None:
        """Closes every connection."""
        self.http.close()

    def send(
        self,
        method: str,
        path: str,
        *,
        repeatable: bool,
        params: Mapping[str, Any] | None = None,
        json: Any = None,
        headers: Mapping[str, str] | None = None,
    ) -> httpx.Response:
        """The response, known to be a success. Raises `ApiError` or `ConnectionFailedError`."""
        for attempt in range(self._tries):
            last = attempt == self._tries - 1
            try:
                response = self.http.request(method, path, params=params, json=json, headers=headers)
            except httpx.TransportError as e:
                if last or not (repeatable or isinstance(e, httpx.ConnectError)):
                    raise self.unreachable(e) from e
                time.sleep(backoff(attempt))
                continue
            if response.is_success:
                return response
            if method == "DELETE" and response.status_code == 404 and attempt:
                # The try before did it and its answer was lost.
                return response
            if last or not repeatable or response.status_code not in RETRIED_STATUSES:
                raise problem_of(response)
            time.sleep(retry_after(response, backoff(attempt)))
        raise AssertionError("the loop above returns or raises")

    def unreachable(self, error: httpx.TransportError) -> ConnectionFailedError:
        """What to tell about a broken connection."""
        why = str(error) or type(error).__name__
        return ConnectionFailedError(
            f"no answer from {self.url} ({why}); is the service running there? "
            "Start one with `layertap up`, or set LAYERTAP_URL"
        )


def parsed(model: type[M], response: httpx.Response) -> M:
    """The response's JSON as `model`, fields of a newer service ignored; else raises `ConnectionFailedError`."""
    try:
        return model.model_validate_json(response.content, extra="ignore")
    except ValidationError as e:
        raise ConnectionFailedError(
            f"{response.request.url} did not answer as a Layertap service does ({e.error_count()} fields differ); "
            "check the address and that client and service are of the same version"
        ) from None


def problem_of(response: httpx.Response) -> ApiError:
    """The error for a response that is no success, whatever its body. The body must have been read."""
    try:
        return api_error(Problem.model_validate_json(response.content))
    except ValidationError:
        text = response.text.strip()[:200]
        return api_error(
            Problem(
                type="about:blank",
                title=response.reason_phrase,
                status=response.status_code,
                code="unexpected_response",
                detail=f"{response.request.url} answered {response.status_code} {response.reason_phrase}"
                + (f": {text}" if text else ""),
            )
        )


def backoff(attempt: int) -> float:
    """Seconds to wait after the failed try number `attempt` (from 0): doubling from 0.2 to 4, with jitter."""
    ceiling = min(4.0, 0.2 * 2.0**attempt)
    return ceiling * (0.5 + random.random() / 2)


def retry_after(response: httpx.Response, otherwise: float) -> float:
    """Seconds that the service asks to wait, at most 10; `otherwise` where it says nothing readable."""
    value = response.headers.get("retry-after", "")
    return min(10.0, float(value)) if value.isdecimal() else otherwise
