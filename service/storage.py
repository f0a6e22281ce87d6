"""The storage directory: joins that can't escape it, writes that are whole or absent, and locks on its files.

Paths are those of `layertap.storage_paths`, relative to the root.
"""

import fcntl
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from layertap.storage_paths import NONCE_FILE

UPLOADS = "uploads"
"""Folder of uploads that are still arriving."""


class StorageEscapeError(ValueError):
    """The path leads out of the storage directory."""


class Storage:
    """A storage directory. `prepare` makes it usable; everything else expects that."""

    def __init__(self, root: Path) -> None:
        self.root = root.resolve()
        self.nonce = ""

    def prepare(self) -> None:
        """Make the folders and the nonce file where they are missing, and read the nonce."""
        for folder in (UPLOADS, "datasets", "jobs"):
            (self.root / folder).mkdir(parents=True, exist_ok=True)
        self.nonce = self._nonce()

    def path(self, relative: str) -> Path:
        """The absolute path of `relative`. Raises `StorageEscapeError` if that lies outside the root."""
        joined = (self.root / relative).resolve()
        if joined == self.root or not joined.is_relative_to(self.root):
            raise StorageEscapeError(f"{relative!r} leads out of the storage directory")
        return joined

    def write(self, relative: str, data: bytes) -> None:
        """Write a whole file: afterwards, crash or not, it has its old content or all of `data`."""
        target = self.path(relative)
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.with_name(f".{target.name}.{secrets.token_hex(8)}")
        try:
            with temporary.open("xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(target)
        finally:
            temporary.unlink(missing_ok=True)
        sync_folder(target.parent)

    def move(self, source: Path, relative: str) -> None:
        """Move a written and synced file of this storage to its final place, durably."""
        target = self.path(relative)
        target.parent.mkdir(parents=True, exist_ok=True)
        source.replace(target)
        sync_folder(target.parent)
        sync_folder(target.parent.parent)

    def size(self, relative: str) -> int | None:
        """Bytes of a file; None where there is no such regular file."""
        path = self.path(relative)
        return path.stat().st_size if path.is_file() else None

    def remove(self, relative: str) -> None:
        """Remove a file or a folder with everything in it; nothing happens where it is absent."""
        path = self.path(relative)
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)

    def keep_only(self, folder: str, names: set[str]) -> None:
        """Remove every file of `folder` that is not in `names`."""
        path = self.path(folder)
        for file in path.iterdir() if path.is_dir() else ():
            if file.name not in names and file.is_file():
                file.unlink(missing_ok=True)

    def free_bytes(self) -> int:
        """Bytes that may still be written to the file system of the root."""
        return shutil.disk_usage(self.root).free

    def check_writable(self) -> None:
        """Write and remove a file. Raises `OSError` when that can't be done."""
        probe = self.root / UPLOADS / f".probe.{secrets.token_hex(8)}"
        try:
            probe.write_bytes(b"1")
        finally:
            probe.unlink(missing_ok=True)

    @contextmanager
    def exclusive(self, relative: str) -> Iterator[bool]:
        """Hold the lock of the file `relative` (made if absent); yields False where another process holds it."""
        path = self.path(relative)
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab") as file:
            yield try_lock(file)

    def _nonce(self) -> str:
        target = self.root / NONCE_FILE
        temporary = self.root / f"{NONCE_FILE}.{secrets.token_hex(8)}"
        try:
            if not target.exists():
                temporary.write_text(secrets.token_hex(16))
                # A link fails where the file exists by now, so two services starting at once agree on one nonce.
                os.link(temporary, target)
        except FileExistsError:
            pass
        finally:
            temporary.unlink(missing_ok=True)
        return target.read_text().strip()


def try_lock(file: BinaryIO) -> bool:
    """Lock an open file until it is closed; False where another open file holds the lock."""
    try:
        fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def sync_folder(folder: Path) -> None:
    """Make the names in `folder` durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
