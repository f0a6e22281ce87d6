"""Download of a 1 GB shard over loopback, against the least that moving those bytes takes.

Bare transfer: the service's answer, read and thrown away, against `sendfile` into a socket by a process of its own.
Pull: the client's verified, durable file, against reading, hashing, writing and flushing the same bytes locally.
"""

import hashlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

from benchmarks import service_process
from benchmarks.pairs import Budget, Rate, Ratio, Result, in_turn, rate, ratio, timed
from benchmarks.service_process import Service, proof
from layertap.client import Client
from worker import tied

BOUND_SECONDS = 110.0
SIZE = 1 << 30
_BUDGET = Budget(seconds=45, fewest=3, most=5)
_CHUNK = 1 << 20
_TIMEOUT = 60.0
_RESUMED = "the rest of one cut in the middle"
_SENDFILE = """
import os, socket, sys
with socket.create_server(("127.0.0.1", 0)) as listening, open(sys.argv[1], "rb") as file:
    print(listening.getsockname()[1], flush=True)
    while True:
        connection, _ = listening.accept()
        with connection:
            connection.sendfile(file, 0)
"""


async def measure(model: Path) -> list[Result]:
    """Rounds of each way to move the shard. Everything is in the page cache before the first."""
    with tempfile.TemporaryDirectory(prefix="layertap-bench-") as name:
        folder = Path(name)
        with service_process.running(folder) as service:
            job, file, sha256 = _commit_shard(service)
            with _sendfile_server(file) as port:
                transfers = _Transfers(service.url, job, file, sha256, port, folder)
                taken = await in_turn(
                    {
                        "service": transfers.served,
                        "sendfile": transfers.sendfile,
                        "cat": transfers.cat,
                        "pull": transfers.pull,
                        _RESUMED: transfers.resumed,
                        "copy": transfers.copied,
                    },
                    _BUDGET,
                )
    found = Result(
        name="download",
        title="Download of a 1 GiB shard over loopback",
        ratios=[
            Ratio("service over sendfile, bytes a second", ratio(taken["sendfile"], taken["service"])),
            Ratio("service over cat into a pipe, bytes a second", ratio(taken["cat"], taken["service"])),
            Ratio("pull over a local verified copy, bytes a second", ratio(taken["copy"], taken["pull"])),
            Ratio(f"whole pull over {_RESUMED}, seconds", ratio(taken["pull"], taken[_RESUMED])),
        ],
        rates=[Rate(name, rate(SIZE / 1e6, seconds), "MB/s") for name, seconds in taken.items() if name != _RESUMED],
        facts={"shard bytes": SIZE},
        seconds=taken,
    )
    return [found]


class _Transfers:
    def __init__(self, url: str, job: str, file: Path, sha256: str, sendfile_port: int, folder: Path) -> None:
        self._url, self._job, self._file, self._sha256 = url, job, file, sha256
        self._sendfile_port = sendfile_port
        self._target = folder / "pulled"

    async def served(self) -> float:
        """The service's answer, head and body."""
        address = urlsplit(self._url)
        head = (
            f"GET /v1/jobs/{self._job}/shards/0/content HTTP/1.1\r\nHost: {address.netloc}\r\nConnection: close\r\n\r\n"
        )
        return timed(lambda: _drain(address.port or 0, head.encode()))

    async def sendfile(self) -> float:
        """The file by `sendfile`, without a head."""
        return timed(lambda: _drain(self._sendfile_port, b""))

    async def cat(self) -> float:
        """The file from `cat` through a pipe."""

        def read() -> None:
            buffer, received = bytearray(_CHUNK), 0
            with subprocess.Popen(["cat", str(self._file)], stdout=subprocess.PIPE, bufsize=0) as process:
                assert process.stdout is not None
                while count := os.readv(process.stdout.fileno(), [buffer]):
                    received += count
            _check_size(received)

        return timed(read)

    async def pull(self) -> float:
        """`layertap pull` into an empty folder."""
        shutil.rmtree(self._target, ignore_errors=True)
        with Client(self._url) as client:
            return timed(lambda: client.pull(self._job, self._target))

    async def resumed(self) -> float:
        """A pull into a folder that holds the first half of the shard, as one that was cut in the middle leaves it."""
        shutil.rmtree(self._target, ignore_errors=True)
        self._target.mkdir()
        part = self._target / f"{self._file.name}.part"
        with self._file.open("rb") as source, part.open("wb") as half:
            for _ in range(SIZE // 2 // _CHUNK):
                half.write(source.read(_CHUNK))
            os.fsync(half.fileno())
        with Client(self._url) as client:
            return timed(lambda: self._finish(client))

    def _finish(self, client: Client) -> None:
        report = client.pull(self._job, self._target)
        if report.received_bytes != SIZE - SIZE // 2:
            raise RuntimeError(f"a resumed pull received {report.received_bytes} bytes")

    async def copied(self) -> float:
        """A local copy, hashed on its way and flushed to disk."""
        self._target.mkdir(exist_ok=True)
        target = self._target / "copy"
        target.unlink(missing_ok=True)

        def copy() -> None:
            digest = hashlib.sha256()
            with self._file.open("rb", buffering=0) as source, target.open("wb", buffering=0) as file:
                while chunk := source.read(_CHUNK):
                    file.write(chunk)
                    digest.update(chunk)
                os.fsync(file.fileno())
            if digest.hexdigest() != self._sha256:
                raise RuntimeError("the copy is another file")

        return timed(copy)


def _commit_shard(service: Service) -> tuple[str, Path, str]:
    """A job that is over and whose one shard is `SIZE` random bytes; its id, the file, and the file's sha256."""
    worker = f"wrk_{os.urandom(8).hex()}"
    service.register(worker)
    job = service.planned_job(worker, shards=1, shard_bytes=SIZE)
    lease = service.claim(worker, "shard")
    file = service.storage / lease["shard"]["file"]
    file.parent.mkdir(parents=True)
    digest = hashlib.sha256()
    with file.open("wb") as out:
        for _ in range(SIZE // _CHUNK):
            chunk = os.urandom(_CHUNK)
            digest.update(chunk)
            out.write(chunk)
        out.flush()
        os.fsync(out.fileno())
    commit = {"bytes": SIZE, "sha256": digest.hexdigest(), "rows": 1, "tokens": 7}
    service.post(f"/v1/tasks/{lease['task']}/commit-shard", {**proof(lease, worker), **commit})
    with Client(service.url) as client:
        client.wait(job, _TIMEOUT)
    return job, file, digest.hexdigest()


@contextmanager
def _sendfile_server(file: Path) -> Iterator[int]:
    """A process that sends `file` to whoever connects; its port."""
    words = tied.command(os.getpid(), [sys.executable, "-c", _SENDFILE, str(file)])
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            yield int(server.stdout.readline())
        finally:
            server.kill()


def _drain(port: int, request: bytes) -> None:
    """Connects, sends `request`, and reads until the other side closes."""
    buffer, received = bytearray(_CHUNK), 0
    with socket.create_connection(("127.0.0.1", port), _TIMEOUT) as connection:
        connection.sendall(request)
        while count := connection.recv_into(buffer):
            received += count
    _check_size(received)


def _check_size(received: int) -> None:
    if received < SIZE:
        raise RuntimeError(f"{received} of {SIZE} bytes came")
