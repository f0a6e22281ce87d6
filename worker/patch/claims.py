"""Who needs an edited package: one lock a package, and one claim a worker, so that none reverts what another uses.

A claim is a file that its owner keeps locked. The kernel drops the lock when the owner ends, however that happens, so a
claim that can be locked by somebody else is a dead one; no process id can be mistaken for another's. Local disks only.
"""

import fcntl
import json
import os
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from worker.patch.package import PatchError

_LOCK_SECONDS = 30.0
_POLL_SECONDS = 0.02


@contextmanager
def locked(directory: Path, timeout: float = _LOCK_SECONDS) -> Iterator[None]:
    """Nobody else changes package or claims while the block runs. Raises `PatchError` after `timeout` seconds."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    fd = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        deadline = time.monotonic() + timeout
        while not _lock(fd, fcntl.LOCK_EX):
            if time.monotonic() > deadline:
                raise PatchError(f"{directory / 'lock'}: another process has held it for {timeout:.0f} s; look at it")
            time.sleep(_POLL_SECONDS)
        yield
    finally:
        os.close(fd)


class Claim:
    """This worker's need for the edit: made and withdrawn under the lock, gone by itself when the process ends."""

    def __init__(self, directory: Path) -> None:
        self._folder = directory / "claims"
        self._path: Path | None = None
        self._fd = -1

    def make(self) -> None:
        """Makes the claim; made twice is made once."""
        if self._path is not None:
            return
        self._folder.mkdir(mode=0o700, exist_ok=True)
        path = self._folder / f"{uuid.uuid4().hex}.json"
        partial = path.with_suffix(".partial")
        fd = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.write(fd, json.dumps({"pid": os.getpid(), "start_time": _start_time()}).encode())
        # Whoever sees a claim sees it locked and whole.
        os.rename(partial, path)
        self._path, self._fd = path, fd

    def withdraw(self) -> None:
        """Gives the claim up; done twice is done once."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)
            os.close(self._fd)
            self._path = None


def holders(directory: Path) -> tuple[int, ...]:
    """Process ids of the live owners. Reads only."""
    return tuple(sorted(pid for path, pid in _claims(directory) if pid is not None))


def drop_dead(directory: Path) -> None:
    """Removes the claims of processes that are gone. Only under the lock."""
    for partial in (directory / "claims").glob("*.partial"):
        partial.unlink(missing_ok=True)
    for path, pid in _claims(directory):
        if pid is None:
            path.unlink(missing_ok=True)


def _claims(directory: Path) -> Iterator[tuple[Path, int | None]]:
    """Each claim with its owner's process id, None if the owner is gone."""
    for path in sorted((directory / "claims").glob("*.json")):
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            continue
        try:
            if _lock(fd, fcntl.LOCK_SH):
                yield path, None
            else:
                yield path, int(json.loads(os.read(fd, 4096))["pid"])
        finally:
            os.close(fd)


def _lock(fd: int, kind: int) -> bool:
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _start_time() -> int:
    """When this process started, in clock ticks since boot: with the process id, its name for people."""
    return int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
