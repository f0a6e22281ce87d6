"""uvicorn's h11 protocol with deadlines: connections that send no request, slow headers or a stalled body are closed.

uvicorn itself only ends connections that are idle after a response.
"""

import asyncio
from typing import Any

import h11
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from service.settings import Settings


def deadline_protocol(settings: Settings) -> type[H11Protocol]:
    """The protocol class with the deadlines of `settings`."""

    class Deadlines(_Deadlines):
        header_seconds = settings.header_seconds
        body_stall_seconds = settings.body_stall_seconds

    return Deadlines


class _Deadlines(H11Protocol):
    header_seconds: float
    body_stall_seconds: float

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._deadline: asyncio.TimerHandle | None = None
        self._in_headers = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        # Between requests uvicorn's keep-alive timer is at work.
        if self.conn.their_state is not h11.IDLE or self.conn.trailing_data[0]:
            self._watch()
        else:
            self._cancel()

    def _watch(self) -> None:
        """Set the deadline that fits what the client is expected to send."""
        if self.transport.is_closing():
            self._cancel()
        elif self.conn.their_state is h11.IDLE:
            if not self._in_headers:
                self._start_headers()
        elif self.conn.their_state is h11.SEND_BODY:
            self._cancel()
            self._deadline = self.loop.call_later(self.body_stall_seconds, self._body_stalled)
        else:
            self._cancel()

    def _start_headers(self) -> None:
        """Headers have one deadline as a whole: sending them byte by byte does not move it."""
        self._cancel()
        self._in_headers = True
        self._deadline = self.loop.call_later(self.header_seconds, self._close)

    def _body_stalled(self) -> None:
        # While reading is paused the app is the slow one.
        if self.flow.read_paused:
            self._deadline = self.loop.call_later(self.body_stall_seconds, self._body_stalled)
        else:
            self._close()

    def _close(self) -> None:
        self._cancel()
        self.transport.close()

    def _cancel(self) -> None:
        self._in_headers = False
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
