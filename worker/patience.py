"""Calls that may never come back: of a driver, of /proc, of a disk that hangs. Each runs in a thread of its own.

A thread that is stuck can't be stopped. It is left behind: it holds up neither the event loop, nor anybody else's
threads, nor the end of the process.
"""

import asyncio
import errno
import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

logger = logging.getLogger(__name__)

T = TypeVar("T")


async def within(seconds: float, function: Callable[..., T], *arguments: Any) -> T:
    """What the function returns or raises; `TimeoutError`, an `OSError`, when it has done neither in time."""
    call = begin(lambda: function(*arguments))
    await asyncio.wait({call}, timeout=seconds)
    if not call.done():
        raise TimeoutError(f"no answer within {seconds:g} s")
    return call.result()


class Newest(Generic[T]):
    """The newest that a function found which is called again and again, one call at a time.

    While a call hangs, and where it fails, what was found before stands; at the beginning that is `first`.
    """

    def __init__(self, function: Callable[[], T], first: T, seconds: float) -> None:
        self._function = function
        self._found = first
        self._seconds = seconds
        self._call: asyncio.Future[T] | None = None
        self._well = True

    async def find(self) -> T:
        """Calls it, unless the last call still hangs, and waits for up to `seconds`."""
        call = self._call = self._call or begin(self._function)
        await asyncio.wait({call}, timeout=self._seconds)
        if not call.done():
            self._say("has not come back within %g s", self._seconds)
            return self._found
        self._call = None
        error = call.exception()
        if error is None:
            self._found, self._well = call.result(), True
        else:
            self._say("failed: %r", error)
        return self._found

    def _say(self, what: str, *more: object) -> None:
        if self._well:
            logger.error(f"%s {what}; what it found before stands", self._function, *more)
        self._well = False


def begin(function: Callable[[], T]) -> "asyncio.Future[T]":
    """Calls the function in a thread; what it returns or raises comes in the future, an `OSError` where none starts."""
    call: Future[T] = Future()
    # From now on it can't be cancelled, as little as the thread.
    call.set_running_or_notify_cancel()

    def run() -> None:
        try:
            call.set_result(function())
        except Exception as error:  # noqa: BLE001 (raised again for whoever waits for the future)
            call.set_exception(error)

    try:
        threading.Thread(target=run, daemon=True).start()
    except RuntimeError as error:
        # The machine has no thread left.
        call.set_exception(OSError(errno.EAGAIN, str(error)))
    return asyncio.wrap_future(call)
