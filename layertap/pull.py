"""Pulls a job's shards and manifest into a folder: in parallel, resumable, every byte verified, the manifest last.

A folder with a manifest is therefore whole. Whatever ends a pull early, running it again goes on where it was.
"""

import fcntl
import os
import queue
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from layertap import manifest as manifests
from layertap.download import Download
from layertap.durable import sync_folder
from layertap.errors import FormatError, PullError, PullInterruptedError
from layertap.manifest import MANIFEST_NAME
from layertap.schemas.shards import Manifest, ManifestShard
from layertap.transport import Transport

_TICK_SECONDS = 0.1
_STOP_SECONDS = 2.0


@dataclass(frozen=True)
class PullProgress:
    """Bytes known to be on disk (some were there before), and shards done, of how many."""

    bytes_done: int
    bytes_total: int
    shards_done: int
    shards_total: int


@dataclass(frozen=True)
class PullReport:
    """What a pull did. `complete` is false where the job failed or was cancelled, and only part of its rows came."""

    job: str
    directory: str
    complete: bool
    rows: int
    tokens: int
    shards: int
    bytes: int
    received_bytes: int
    skipped_shards: int


def pull(
    transport: Transport,
    job: str,
    manifest_bytes: bytes,
    directory: str | os.PathLike[str],
    jobs: int = 4,
    on_progress: Callable[[PullProgress], None] | None = None,
) -> PullReport:
    """Downloads the shards that `manifest_bytes` lists into `directory`, at most `jobs` at a time.

    `on_progress` is called about ten times a second, in the calling thread. Raises `PullError` when a shard can't be
    had, the disk is full, or the folder holds another job or is being pulled into; a KeyboardInterrupt ends it at once.
    """
    if jobs < 1:
        raise ValueError("jobs must be at least 1")
    manifest = manifests.parse(manifest_bytes, f"the manifest of {job}")
    if manifest.job != job:
        raise PullError(f"the manifest is of {manifest.job}, not of {job}; ask the service's operator")
    target = Path(directory).absolute()
    shards = [shard for shard in manifest.shards if shard.bytes]
    with _locked(target):
        _check_folder(target, manifest, shards)
        received = _Downloads(transport, manifest.job, shards, target).run(jobs, on_progress)
        _write_manifest(target, manifest_bytes)
    return PullReport(
        job=manifest.job,
        directory=str(target),
        complete=manifest.complete,
        rows=sum(shard.rows for shard in shards),
        tokens=sum(shard.tokens for shard in shards),
        shards=len(shards),
        bytes=sum(shard.bytes for shard in shards),
        received_bytes=sum(received),
        skipped_shards=received.count(0),
    )


class _Downloads:
    """The downloads of one pull, and the threads that run them.

    The threads are daemons: one that waits for a silent server must not keep an interrupted program alive.
    """

    def __init__(self, transport: Transport, job: str, shards: list[ManifestShard], target: Path) -> None:
        self._transport, self._job, self._target = transport, job, target
        self._shards = shards
        self._todo: queue.SimpleQueue[ManifestShard] = queue.SimpleQueue()
        for shard in shards:
            self._todo.put(shard)
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._bytes = 0
        self._received: list[int] = []
        self._failures: list[BaseException] = []

    def run(self, jobs: int, on_progress: Callable[[PullProgress], None] | None) -> list[int]:
        """Bytes received for each shard, in the order they were done. Raises the first failure."""
        names = range(min(jobs, len(self._shards)))
        threads = [threading.Thread(target=self._work, name=f"pull-{i}", daemon=True) for i in names]
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                while thread.is_alive():
                    thread.join(_TICK_SECONDS)
                    self._report(on_progress)
        finally:
            self._stop.set()
            for thread in threads:
                thread.join(_STOP_SECONDS / len(threads))
        self._report(on_progress)
        if self._failures:
            raise self._failures[0]
        return self._received

    def _work(self) -> None:
        while not self._stop.is_set():
            try:
                shard = self._todo.get_nowait()
            except queue.Empty:
                return
            try:
                download = Download(self._transport, self._job, shard, self._target, self._count, self._stop)
                received = download.run()
            except PullInterruptedError:
                return
            except Exception as e:  # noqa: BLE001  the calling thread raises it
                with self._lock:
                    self._failures.append(e)
                self._stop.set()
                return
            with self._lock:
                self._received.append(received)

    def _count(self, delta: int) -> None:
        with self._lock:
            self._bytes += delta

    def _report(self, on_progress: Callable[[PullProgress], None] | None) -> None:
        if on_progress is None:
            return
        with self._lock:
            done, received = self._bytes, len(self._received)
        on_progress(PullProgress(done, sum(shard.bytes for shard in self._shards), received, len(self._shards)))


@contextmanager
def _locked(target: Path) -> Iterator[None]:
    """Holds the folder, made where it is missing, against a second pull into it."""
    try:
        target.mkdir(parents=True, exist_ok=True)
        fd = os.open(target, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as e:
        raise PullError(f"{target} can't be used as a folder ({e.strerror}); name another") from e
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        raise PullError(f"another pull into {target} is running; wait for it or name another folder") from None
    try:
        yield
    finally:
        os.close(fd)


def _check_folder(target: Path, manifest: Manifest, shards: list[ManifestShard]) -> None:
    """Refuses a folder that holds another job, and a disk that can't hold this one, before anything is downloaded."""
    try:
        present = manifests.load(target)
    except FormatError:
        present = None
    if present is not None and present.job != manifest.job:
        raise PullError(f"{target} holds {present.job}; pull {manifest.job} into another folder")
    missing = sum(max(0, shard.bytes - _bytes_there(target, shard.file)) for shard in shards)
    free = shutil.disk_usage(target).free
    if missing > free:
        raise PullError(f"{target} has {free:,} bytes free and needs {missing:,}; make room or name another folder")


def _bytes_there(target: Path, name: str) -> int:
    return sum(path.stat().st_size for path in (target / name, target / f"{name}.part") if path.exists())


def _write_manifest(target: Path, text: bytes) -> None:
    part = target / f"{MANIFEST_NAME}.part"
    try:
        sync_folder(target)
        with part.open("wb") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, target / MANIFEST_NAME)
        sync_folder(target)
    except OSError as e:
        raise PullError(f"{part} can't be written ({e.strerror}); mend that, then pull again") from e
