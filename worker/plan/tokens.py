"""The tokenised rows of a job: a folder of flat little-endian files, written once and read memory-mapped.

`input_ids.i32` and `loss_mask.u8` hold all rows' tokens one after the other, `offsets.i64` where each row begins (and
the total), `row_ids.i64` its line of the data set. `rows.json` comes last, by a rename: a folder with it is whole.
"""

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from layertap.durable import sync_folder

FORMAT_VERSION = 1
INDEX = "rows.json"
_FILES: dict[str, np.dtype[Any]] = {
    "input_ids.i32": np.dtype("<i4"),
    "loss_mask.u8": np.dtype("u1"),
    "offsets.i64": np.dtype("<i8"),
    "row_ids.i64": np.dtype("<i8"),
}
_BUFFER = 1 << 20


class TokenRowsError(Exception):
    """A folder of tokenised rows is not whole or not intact; the message says which file and why."""


class TokenRowsWriter:
    """Writes the folder, a row at a time, in bounded memory. Only `finish` makes it readable.

    A context manager: left without `finish`, it closes its files, and the folder stays unreadable.
    """

    def __init__(self, folder: Path) -> None:
        """Makes `folder`. One that was begun and never finished is begun anew; a finished one is a `TokenRowsError`."""
        if (folder / INDEX).exists():
            raise TokenRowsError(f"{folder} holds finished rows already")
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._files: dict[str, _HashedFile] = {}
        try:
            for name in _FILES:
                self._files[name] = _HashedFile(folder / name)
        except BaseException:
            self.close()
            raise
        self.rows = 0
        self.tokens = 0
        self._write("offsets.i64", np.zeros(1))

    def add(self, row_id: int, input_ids: npt.NDArray[np.int32], loss_mask: npt.NDArray[np.uint8]) -> None:
        """The next row: line `row_id` of the data set, its ids and mask of equal length."""
        if len(input_ids) != len(loss_mask):
            raise ValueError(f"{len(input_ids)} ids and {len(loss_mask)} mask values")
        self.rows += 1
        self.tokens += len(input_ids)
        self._write("input_ids.i32", input_ids)
        self._write("loss_mask.u8", loss_mask)
        self._write("offsets.i64", np.array([self.tokens]))
        self._write("row_ids.i64", np.array([row_id]))

    def finish(self) -> None:
        """Makes everything durable, then readable."""
        files = {name: file.seal() for name, file in self._files.items()}
        index = {"format_version": FORMAT_VERSION, "rows": self.rows, "tokens": self.tokens, "files": files}
        unnamed = self._folder / f"{INDEX}.partial"
        with unnamed.open("w", encoding="utf-8") as file:
            json.dump(index, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        sync_folder(self._folder)
        unnamed.rename(self._folder / INDEX)
        sync_folder(self._folder)
        sync_folder(self._folder.parent)

    def close(self) -> None:
        """Closes the files; harmless after `finish`."""
        for file in self._files.values():
            file.close()

    def __enter__(self) -> "TokenRowsWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _write(self, name: str, values: npt.NDArray[Any]) -> None:
        self._files[name].write(values.astype(_FILES[name], copy=False).tobytes())


class _HashedFile:
    """A file being written whose sha256 is known at the end, without reading it again."""

    def __init__(self, path: Path) -> None:
        self._file: BinaryIO = path.open("wb", buffering=0)
        self._pending = bytearray()
        self._sha256 = hashlib.sha256()
        self._bytes = 0

    def write(self, data: bytes) -> None:
        self._pending += data
        if len(self._pending) >= _BUFFER:
            self._flush()

    def seal(self) -> dict[str, int | str]:
        """Flushes to the disk and closes; the size in bytes and the sha256."""
        self._flush()
        os.fsync(self._file.fileno())
        self._file.close()
        return {"bytes": self._bytes, "sha256": self._sha256.hexdigest()}

    def close(self) -> None:
        self._file.close()

    def _flush(self) -> None:
        left = memoryview(bytes(self._pending))
        self._sha256.update(left)
        self._bytes += len(left)
        self._pending.clear()
        while left:
            left = left[self._file.write(left) :]


@dataclass(frozen=True)
class TokenRows:
    """Tokenised rows, memory-mapped. n rows, T tokens in all."""

    folder: Path
    row_ids: npt.NDArray[np.int64]
    """[n] the lines of the data set."""
    offsets: npt.NDArray[np.int64]
    """[n + 1] row i is tokens `offsets[i]:offsets[i + 1]`."""
    all_input_ids: npt.NDArray[np.int32]
    """[T] ids of all rows."""
    all_loss_mask: npt.NDArray[np.uint8]
    """[T] masks of all rows."""

    @staticmethod
    def open(folder: Path) -> "TokenRows":
        """Maps a finished folder. Raises `TokenRowsError` unless every file is there with the size it should have."""
        index = _read_index(folder)
        rows, tokens = index["rows"], index["tokens"]
        return TokenRows(
            folder,
            row_ids=_mapped(folder, "row_ids.i64", rows),
            offsets=_mapped(folder, "offsets.i64", rows + 1),
            all_input_ids=_mapped(folder, "input_ids.i32", tokens),
            all_loss_mask=_mapped(folder, "loss_mask.u8", tokens),
        )

    def __len__(self) -> int:
        return len(self.row_ids)

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """[n] tokens of each row."""
        return np.diff(self.offsets)

    def input_ids(self, i: int) -> npt.NDArray[np.int32]:
        """Ids of row i, a read-only view."""
        return self.all_input_ids[self.offsets[i] : self.offsets[i + 1]]

    def loss_mask(self, i: int) -> npt.NDArray[np.uint8]:
        """Mask of row i, a read-only view."""
        return self.all_loss_mask[self.offsets[i] : self.offsets[i + 1]]

    def verify(self) -> None:
        """Reads everything and compares the checksums. Raises `TokenRowsError` on a difference."""
        for name, noted in _read_index(self.folder)["files"].items():
            with (self.folder / name).open("rb") as file:
                found = hashlib.file_digest(file, "sha256").hexdigest()
            if found != noted["sha256"]:
                raise TokenRowsError(f"{self.folder / name} is damaged: its sha256 is not the one noted in {INDEX}")


def _read_index(folder: Path) -> dict[str, Any]:
    try:
        index = json.loads((folder / INDEX).read_bytes())
    except OSError as error:
        raise TokenRowsError(f"{folder} holds no finished rows: {error}") from error
    except ValueError as error:
        raise TokenRowsError(f"{folder / INDEX} is damaged: {error}") from error
    if not isinstance(index, dict) or index.get("format_version") != FORMAT_VERSION:
        raise TokenRowsError(f"{folder / INDEX} is not of format version {FORMAT_VERSION}")
    return index


def _mapped(folder: Path, name: str, count: int) -> npt.NDArray[Any]:
    path, dtype = folder / name, _FILES[name]
    try:
        size = path.stat().st_size
        if size != count * dtype.itemsize:
            raise TokenRowsError(f"{path} has {size} bytes, {count * dtype.itemsize} are right")
        # An empty file cannot be mapped.
        return np.memmap(path, dtype, mode="r", shape=(count,)) if count else np.empty(0, dtype)
    except OSError as error:
        raise TokenRowsError(f"{path} cannot be read: {error}") from error
