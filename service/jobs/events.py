"""Server-sent events of one job: its document whenever it changes, until it is over."""

import hashlib
import time
from collections.abc import AsyncIterator, Callable

import anyio
from starlette.concurrency import run_in_threadpool

from layertap.schemas.jobs import Job
from service.context import Context

_KEEP_ALIVE_SECONDS = 15.0


async def job_events(context: Context, read: Callable[[], Job | None], last_id: str | None) -> AsyncIterator[bytes]:
    """The stream, as bytes of `text/event-stream`. `read` gives the job, or None once it is deleted.

    An event's id is a digest of the document, so a client that reconnects with `last_id` is told only what is new,
    by whichever replica.
    """
    context.event_streams += 1
    try:
        spoke = time.monotonic()
        while not context.stopping.is_set():
            job = await run_in_threadpool(read)
            if job is None:
                return
            document = job.model_dump_json()
            identity = hashlib.sha256(document.encode()).hexdigest()[:16]
            if identity != last_id:
                yield f"id: {identity}\nevent: job\ndata: {document}\n\n".encode()
                last_id, spoke = identity, time.monotonic()
            elif time.monotonic() - spoke >= _KEEP_ALIVE_SECONDS:
                yield b": keep-alive\n\n"
                spoke = time.monotonic()
            if job.state.terminal:
                return
            await anyio.sleep(context.settings.event_poll_seconds)
    finally:
        context.event_streams -= 1
