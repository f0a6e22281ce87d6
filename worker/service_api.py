"""The worker's side of the protocol: one method a message, over HTTP, with the errors a worker acts on.

A service that cannot be reached is waited for, within a bound that the caller gives; a lease that is no longer held is
`LeaseLostError`, and the task must be dropped.
"""

import asyncio
import time
from typing import TypeVar

import httpx
from pydantic import BaseModel, ValidationError

from layertap.schemas.common import Problem
from layertap.schemas.incidents import Incident, IncidentReport
from layertap.schemas.tasks import (
    ClaimRequest,
    ClaimResponse,
    ControlRequest,
    ControlResponse,
    Goodbye,
    PlanCommit,
    Release,
    RowErrorsReport,
    ShardCommit,
    TaskAck,
    TaskFailure,
)
from layertap.schemas.workers import Worker, WorkerRegister
from layertap.transport import may_have_proxy

M = TypeVar("M", bound=BaseModel)

REQUEST_TIMEOUT_S = 30.0
_BACKOFF_FIRST_S, _BACKOFF_MOST_S = 0.2, 3.0


class ServiceError(Exception):
    """The service refused a message for a reason that a repetition would not mend."""

    def __init__(self, status: int, code: str, detail: str) -> None:
        super().__init__(f"{code} ({status}): {detail}")
        self.status, self.code = status, code


class LeaseLostError(ServiceError):
    """The lease named in the message is no longer held."""


class ServiceUnreachableError(Exception):
    """The service gave no usable answer within the bound."""


def error_of(response: httpx.Response) -> ServiceError:
    """The error that a refusal means."""
    try:
        problem = Problem.model_validate_json(response.content)
    except ValidationError:
        return ServiceError(response.status_code, "not_a_problem", response.text[:500])
    kind = LeaseLostError if problem.code == "lease_lost" else ServiceError
    return kind(response.status_code, problem.code, problem.detail)


def transient(response: httpx.Response) -> bool:
    """Whether the same message may be answered differently in a moment."""
    return response.status_code >= 500 or response.status_code == 429


class ServiceApi:
    """An open connection to the service; close it with `aclose`."""

    def __init__(self, url: str, token: str | None) -> None:
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        proxy = may_have_proxy(httpx.URL(url).host)
        self._http = httpx.AsyncClient(base_url=url, headers=headers, timeout=REQUEST_TIMEOUT_S, trust_env=proxy)

    async def aclose(self) -> None:
        """Closes the connection."""
        await self._http.aclose()

    async def register(self, message: WorkerRegister, patience: float) -> Worker:
        """Tells the service of this worker and its models; waits up to `patience` seconds for the service."""
        return await self._post("/v1/workers", message, Worker, patience)

    async def control(self, worker: str, message: ControlRequest) -> ControlResponse:
        """One control poll, not repeated."""
        return await self._post(f"/v1/workers/{worker}/control", message, ControlResponse, 0)

    async def goodbye(self, worker: str, message: Goodbye) -> None:
        """Says that the worker ends; tried once."""
        await self._post(f"/v1/workers/{worker}/goodbye", message, Worker, 0)

    async def claim(self, message: ClaimRequest, patience: float) -> ClaimResponse:
        """Asks for a task; repeatable, since the message carries a request id."""
        return await self._post("/v1/tasks/claim", message, ClaimResponse, patience)

    async def commit_plan(self, task: str, message: PlanCommit, patience: float) -> TaskAck:
        """Hands in a plan."""
        return await self._post(f"/v1/tasks/{task}/commit-plan", message, TaskAck, patience)

    async def commit_shard(self, task: str, message: ShardCommit, patience: float) -> TaskAck:
        """Hands in a shard; repeatable."""
        return await self._post(f"/v1/tasks/{task}/commit-shard", message, TaskAck, patience)

    async def row_errors(self, task: str, message: RowErrorsReport, patience: float) -> TaskAck:
        """Reports rows given up; repeatable."""
        return await self._post(f"/v1/tasks/{task}/row-errors", message, TaskAck, patience)

    async def fail(self, task: str, message: TaskFailure, patience: float) -> TaskAck:
        """Says that the task failed for a reason of its own."""
        return await self._post(f"/v1/tasks/{task}/fail", message, TaskAck, patience)

    async def release(self, task: str, message: Release, patience: float) -> TaskAck:
        """Hands the task back unharmed."""
        return await self._post(f"/v1/tasks/{task}/release", message, TaskAck, patience)

    async def report_incident(self, message: IncidentReport, patience: float) -> Incident:
        """Hands in an incident, or what was found out about it since; repeatable. The answer carries no evidence."""
        return await self._post("/v1/incidents", message, Incident, patience)

    async def _post(self, path: str, message: BaseModel, answer: type[M], patience: float) -> M:
        deadline = time.monotonic() + patience
        backoff = _BACKOFF_FIRST_S
        body = message.model_dump_json()
        while True:
            trouble: str
            try:
                response = await self._http.post(path, content=body, headers={"Content-Type": "application/json"})
            except httpx.TransportError as error:
                trouble = f"{type(error).__name__}: {error}"
            else:
                if response.is_success:
                    return answer.model_validate_json(response.content or b"{}")
                if not transient(response):
                    raise error_of(response)
                trouble = f"HTTP {response.status_code}"
            if time.monotonic() + backoff > deadline:
                raise ServiceUnreachableError(f"{path}: {trouble}")
            await asyncio.sleep(backoff)
            backoff = min(2 * backoff, _BACKOFF_MOST_S)
