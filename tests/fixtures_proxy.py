"""A real TCP proxy that can lose one answer: the request gets through, the connection breaks before the reply."""

import contextlib
import selectors
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_CHUNK = 64 * 1024
_TICK_SECONDS = 0.1


class Proxy:
    """Forwards connections on `url` to a port of this machine. `seen` lists the watched requests' paths."""

    def __init__(self, port: int) -> None:
        self._upstream = port
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listening.getsockname()[1]}"
        self._lose: bytes | None = None
        self._watched: bytes = b""
        self.seen: list[str] = []
        self.lost = threading.Event()
        self._stopping = threading.Event()
        self._threads: list[threading.Thread] = []
        self._start(self._accept)

    def lose_one_reply(self, path_end: str) -> None:
        """Drops the next reply to a POST whose path ends like this, then sets `lost`; `seen` notes such POSTs."""
        self._watched = self._lose = path_end.encode() + b" HTTP/1.1"

    def close(self) -> None:
        """Ends every connection and thread."""
        self._stopping.set()
        self._listening.close()
        for thread in self._threads:
            thread.join(10)
            assert not thread.is_alive()

    def _start(self, target: "object", *args: object) -> None:
        thread = threading.Thread(target=target, args=args, daemon=True)  # type: ignore[arg-type]
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        self._listening.settimeout(_TICK_SECONDS)
        while not self._stopping.is_set():
            with contextlib.suppress(TimeoutError, OSError):
                self._start(self._forward, self._listening.accept()[0])

    def _forward(self, client: socket.socket) -> None:
        with client, contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self._upstream)) as service:
            losing = False
            with selectors.DefaultSelector() as selector:
                selector.register(client, selectors.EVENT_READ, service)
                selector.register(service, selectors.EVENT_READ, client)
                while not self._stopping.is_set():
                    for key, _ in selector.select(_TICK_SECONDS):
                        source: socket.socket = key.fileobj  # type: ignore[assignment]
                        data = source.recv(_CHUNK)
                        if not data:
                            return
                        if source is client:
                            losing = self._request(data) or losing
                        elif losing:
                            self.lost.set()
                            return
                        key.data.sendall(data)

    def _request(self, data: bytes) -> bool:
        """Looks at what a client sends; whether the reply is to be lost."""
        first = data.split(b"\r\n", 1)[0]
        if not (self._watched and first.startswith(b"POST ") and first.endswith(self._watched)):
            return False
        self.seen.append(first.split()[1].decode())
        lose, self._lose = self._lose is not None, None
        return lose


@contextmanager
def open_proxy(port: int) -> Iterator[Proxy]:
    """A proxy to `port`, closed at the end."""
    proxy = Proxy(port)
    try:
        yield proxy
    finally:
        proxy.close()
