"""Follows a job to its end: server-sent events where they come through, polling where they don't.

Every document seen is yielded once. A connection that breaks is taken up again, so the service may restart meanwhile.
"""

import json
import time
from collections.abc import Iterable, Iterator

import httpx
from pydantic import ValidationError

from layertap.errors import ApiError, ConnectionFailedError, ServiceFailedError, WaitTimeoutError
from layertap.schemas.jobs import Job
from layertap.transport import Transport, parsed

POLL_SECONDS = 1.0
PATIENCE_SECONDS = 60.0
"""How long the service may stay away before following it is given up."""
_SILENCE_SECONDS = 30.0


def follow(transport: Transport, job: str, timeout: float | None = None) -> Iterator[Job]:
    """The job as it is now and after each change, the ended job last.

    Raises `WaitTimeoutError` after `timeout` seconds, `ApiError` when the service refuses (an unknown job), and
    `ConnectionFailedError` when it stays away for longer than `PATIENCE_SECONDS`.
    """
    deadline = None if timeout is None else time.monotonic() + timeout
    latest: Job | None = None
    last_event: str | None = None
    stream = True
    while True:
        current = _poll(transport, job, deadline)
        if current != latest:
            latest = current
            yield current
        if current.state.terminal:
            return
        if stream:
            events = _Events(transport, job, last_event, deadline)
            for current in events:
                if current != latest:
                    latest = current
                    yield current
                if current.state.terminal:
                    return
            last_event = events.last_id
            stream = events.offered
        if deadline is not None and time.monotonic() >= deadline:
            raise WaitTimeoutError(
                f"{job} is still {latest.state if latest else 'unknown'} after {timeout:g} s; it goes on, wait again"
            )
        time.sleep(POLL_SECONDS if deadline is None else max(0.0, min(POLL_SECONDS, deadline - time.monotonic())))


def _poll(transport: Transport, job: str, deadline: float | None) -> Job:
    give_up = time.monotonic() + PATIENCE_SECONDS
    if deadline is not None:
        give_up = min(give_up, deadline)
    while True:
        try:
            return parsed(Job, transport.send("GET", f"/v1/jobs/{job}", repeatable=True))
        except (ConnectionFailedError, ServiceFailedError):
            if time.monotonic() >= give_up:
                raise
            time.sleep(POLL_SECONDS)


class _Events:
    """One connection to the job's events. Iterating ends, without an error, whenever the connection does.

    `offered` turns false when the service (or something on the way) has no event stream to give.
    """

    def __init__(self, transport: Transport, job: str, last_id: str | None, deadline: float | None) -> None:
        self._transport, self._job, self._deadline = transport, job, deadline
        self.last_id = last_id
        self.offered = True

    def __iter__(self) -> Iterator[Job]:
        headers = {"accept": "text/event-stream", **({"last-event-id": self.last_id} if self.last_id else {})}
        silence = _SILENCE_SECONDS
        if self._deadline is not None:
            silence = max(0.1, min(silence, self._deadline - time.monotonic()))
        try:
            with self._transport.http.stream(
                "GET", f"/v1/jobs/{self._job}/events", headers=headers, timeout=httpx.Timeout(silence)
            ) as response:
                kind = response.headers.get("content-type", "")
                if not response.is_success or not kind.startswith("text/event-stream"):
                    self.offered = response.status_code >= 500
                    return
                yield from self._documents(response.iter_lines())
        except (httpx.TransportError, ApiError):
            return

    def _documents(self, lines: Iterable[str]) -> Iterator[Job]:
        data: list[str] = []
        for line in lines:
            if self._deadline is not None and time.monotonic() >= self._deadline:
                return
            name, _, value = line.partition(":")
            value = value.removeprefix(" ")
            if name == "data":
                data.append(value)
            elif name == "id":
                self.last_id = value
            elif not line and data:
                job = _job("\n".join(data))
                data = []
                if job is not None:
                    yield job


def _job(text: str) -> Job | None:
    try:
        return Job.model_validate(json.loads(text), extra="ignore")
    except (ValueError, ValidationError):
        return None
