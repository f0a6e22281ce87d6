"""The storage directory: joins that can't escape it, writes that are whole or absent, and locks on its files.

Paths are those of `layertap.storage_paths`, relative to the root.
"""

import errno
import fcntl
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from layertap.durable import sync_folder
from layertap.storage_paths import NONCE_FILE

UPLOADS = "uploads"
"""Folder of uploads that are still arriving."""
UPLOADING = ".uploading"
"""Marks the folder of a data set whose upload has not come to its end."""
DELETING = ".deleting"
"""Marks a folder that is being deleted."""
_MARKERS = (UPLOADING, DELETING)


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

    def folders(self, relative: str) -> list[str]:
        """Names of the folders in a folder, sorted."""
        return sorted(entry.name for entry in self.path(relative).iterdir() if entry.is_dir())

    def mark(self, folder: str, marker: str) -> None:
        """Put a marker into a folder, durably, so that a start knows what was under way; the folder is made if absent.

        Only what is marked may be removed at a start: what a database does not know may be another's.
        """
        path = self.path(folder)
        path.mkdir(parents=True, exist_ok=True)
        with (path / marker).open("wb") as file:
            os.fsync(file.fileno())
        sync_folder(path)
        sync_folder(path.parent)

    def mark_deletion(self, folder: str) -> None:
        """Mark a folder that is there as being deleted; without a marker where the disk is too full for one.

        A deletion is what makes room. Should it be cut off without a marker, the rest of the folder stays.
        """
        if not self.has(folder):
            return
        try:
            self.mark(folder, DELETING)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise

    def unmark(self, folder: str) -> None:
        """Take every marker out of a folder, durably."""
        path = self.path(folder)
        for marker in _MARKERS:
            (path / marker).unlink(missing_ok=True)
        sync_folder(path)

    def has(self, folder: str) -> bool:
        """Whether the folder is there."""
        return self.path(folder).is_dir()

    def marked(self, folder: str) -> bool:
        """Whether the folder is there and bears a marker."""
        path = self.path(folder)
        return any((path / marker).is_file() for marker in _MARKERS)

    def remove_folder(self, folder: str) -> None:
        """Remove a folder with everything in it, its marker last: cut off anywhere, it is still marked.

        What can't be removed stays, marked, for the next start. Nothing happens where the folder is absent.
        """
        path = self.path(folder)
        for entry in list(path.iterdir()) if path.is_dir() else ():
            if entry.name in _MARKERS:
                continue
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry, ignore_errors=True)
            else:
                with suppress(OSError):
                    entry.unlink()
        if path.is_dir() and not {entry.name for entry in path.iterdir()} - set(_MARKERS):
            for marker in _MARKERS:
                (path / marker).unlink(missing_ok=True)
            self.remove_empty(folder)

    def remove_empty(self, folder: str) -> bool:
        """Remove a folder if nothing is in it; whether it is gone."""
        try:
            self.path(folder).rmdir()
        except FileNotFoundError:
            return True
        except OSError:
            return False
        return True

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
