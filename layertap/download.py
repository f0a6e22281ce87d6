"""Downloads one shard so that its final name never holds wrong bytes.

Bytes go to `NAME.part` and are hashed on their way; a part left by an earlier try is hashed again and continued by
Range. The part is flushed to disk and renamed only once size and sha256 are right.
"""

import hashlib
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import httpx

from layertap.errors import PullError, PullInterruptedError
from layertap.schemas.shards import ManifestShard
from layertap.transport import RETRIED_STATUSES, Transport, backoff, problem_of, retry_after

HASH_CHUNK = 1024 * 1024
PROGRESS_BYTES = 64 * 1024
STALLED_TRIES = 6
"""Tries in a row, each of which brought fewer than `PROGRESS_BYTES`, after which a download is given up."""
DIGEST_TRIES = 3


class _WrongBytesError(Exception):
    """What came is not the shard; the part is worthless."""


class _BrokenOffError(Exception):
    """One connection ended too early. `seconds` is how long the service asks to wait, None where it says nothing."""

    def __init__(self, reason: str, seconds: float | None = None) -> None:
        super().__init__(reason)
        self.seconds = seconds


@dataclass
class _Part:
    """An open part: its bytes up to `size` are hashed and counted."""

    file: BinaryIO
    count: Callable[[int], None]
    size: int = 0

    def __post_init__(self) -> None:
        self.digest = hashlib.sha256()

    def take(self, chunk: bytes) -> None:
        """Hashes and counts bytes that are in the file already, or will be by `append`."""
        self.digest.update(chunk)
        self.size += len(chunk)
        self.count(len(chunk))

    def append(self, chunk: bytes) -> None:
        """Writes bytes behind what is there; a thread stuck in the network must not hold any of them back."""
        self.file.write(chunk)
        self.file.flush()
        self.take(chunk)

    def empty(self) -> None:
        """Starts over."""
        self.file.seek(0)
        self.file.truncate()
        self.count(-self.size)
        self.digest, self.size = hashlib.sha256(), 0


@dataclass(frozen=True)
class Download:
    """One shard to fetch into `directory`. `count` is told, as signed numbers, how many bytes became good or bad.

    `stop` is looked at between chunks; setting it raises `PullInterruptedError`, and the part stays.
    """

    transport: Transport
    job: str
    shard: ManifestShard
    directory: Path
    count: Callable[[int], None]
    stop: threading.Event

    @property
    def path(self) -> Path:
        """The shard's final place."""
        return self.directory / self.shard.file

    @property
    def part(self) -> Path:
        """Where its bytes are until they are known to be right."""
        return self.directory / f"{self.shard.file}.part"

    def run(self) -> int:
        """Makes the shard be there and returns how many bytes had to come: 0 where it was there already.

        Raises `PullError` when the tries are spent or the disk is full, `ApiError` when the service refuses.
        """
        try:
            if self._already_there():
                return 0
            received = 0
            for _ in range(DIGEST_TRIES):
                try:
                    with self._open_part() as part:
                        before = part.size
                        self._fill(part)
                        received += part.size - before
                    os.replace(self.part, self.path)
                except _WrongBytesError:
                    self.part.unlink(missing_ok=True)
                    continue
                return received
        except OSError as e:
            raise PullError(
                f"{self.shard.file} can't be kept in {self.directory} ({e.strerror}); what has come so far stays: "
                "mend that, then pull again"
            ) from e
        raise PullError(
            f"{self.shard.file} came with wrong bytes {DIGEST_TRIES} times (its sha256 is not the manifest's); "
            "the stored shard is damaged: delete the job and make it anew"
        )

    def _already_there(self) -> bool:
        try:
            if self.path.stat().st_size != self.shard.bytes:
                return False
            with self.path.open("rb") as file:
                found = _Part(file, self.count)
                self._read(found)
        except FileNotFoundError:
            return False
        if found.digest.hexdigest() == self.shard.sha256:
            return True
        self.count(-found.size)
        return False

    @contextmanager
    def _open_part(self) -> Iterator[_Part]:
        """The part with what it held before, if that can be the beginning of the shard."""
        fd = os.open(self.part, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        with os.fdopen(fd, "r+b") as file:
            part = _Part(file, self.count)
            try:
                if os.fstat(fd).st_size > self.shard.bytes:
                    part.empty()
                self._read(part)
                yield part
            except _WrongBytesError:
                part.empty()
                raise

    def _read(self, part: _Part) -> None:
        while chunk := part.file.read(HASH_CHUNK):
            self._check_stop()
            part.take(chunk)

    def _fill(self, part: _Part) -> None:
        """Brings the part to its full length and to disk. Raises `_WrongBytesError` when the digest is another."""
        stalled = 0
        while part.size < self.shard.bytes:
            before = part.size
            try:
                self._receive(part)
            except _BrokenOffError as e:
                stalled = 0 if part.size - before >= PROGRESS_BYTES else stalled + 1
                if stalled >= STALLED_TRIES:
                    raise PullError(
                        f"{self.shard.file}: {e}, {stalled} times in a row; what has come stays, pull again to go on"
                    ) from None
                if self.stop.wait(backoff(stalled) if e.seconds is None else e.seconds):
                    raise PullInterruptedError("stopped") from None
        if part.digest.hexdigest() != self.shard.sha256:
            raise _WrongBytesError
        os.fsync(part.file.fileno())

    def _receive(self, part: _Part) -> None:
        """One connection's worth of bytes. Raises `_BrokenOffError` unless the part is full afterwards."""
        headers = {"accept-encoding": "identity"}
        if part.size:
            headers |= {"range": f"bytes={part.size}-", "if-range": f'"{self.shard.sha256}"'}
        url = f"/v1/jobs/{self.job}/shards/{self.shard.index}/content"
        try:
            with self.transport.http.stream("GET", url, headers=headers) as response:
                self._begin(part, response)
                for chunk in response.iter_raw():
                    self._check_stop()
                    if part.size + len(chunk) > self.shard.bytes:
                        raise _WrongBytesError
                    part.append(chunk)
        except httpx.TransportError as e:
            raise _BrokenOffError(f"the connection broke ({e or type(e).__name__})") from None
        if part.size < self.shard.bytes:
            raise _BrokenOffError("the answer ended too early")

    def _begin(self, part: _Part, response: httpx.Response) -> None:
        """Judges the response's head: whether its bytes go behind those of the part, or replace them."""
        if response.status_code == 206:
            if not response.headers.get("content-range", "").startswith(f"bytes {part.size}-"):
                raise _WrongBytesError
        elif response.status_code == 200:
            part.empty()
        elif response.status_code == 416:
            raise _WrongBytesError
        elif response.status_code in RETRIED_STATUSES:
            raise _BrokenOffError(f"the service answered {response.status_code}", retry_after(response, 1.0))
        else:
            response.read()
            raise problem_of(response)

    def _check_stop(self) -> None:
        if self.stop.is_set():
            raise PullInterruptedError("stopped")
