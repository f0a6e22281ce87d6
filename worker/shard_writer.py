"""The shard file on the worker's side: laid out before prefill, compacted if rows failed, sealed when complete.

A shard is written under a hidden name and takes its own name only when every byte is on disk. The capture fills in the
states; everything else is written here. All functions block; call them from a thread.
"""

import hashlib
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from layertap.durable import sync_folder
from layertap.layout import ShardLayout, TensorPlace
from worker.capture.files import pwrite_all

_COPY_BYTES = 1 << 20


@dataclass(frozen=True)
class ShardRows:
    """The rows of a shard besides their states: `input_ids` int32 [T], `loss_mask` uint8 [T], `row_ids` int64 [n]."""

    input_ids: npt.NDArray[np.int32]
    loss_mask: npt.NDArray[np.uint8]
    row_ids: npt.NDArray[np.int64]


def partial_path(final: Path) -> Path:
    """The hidden name a shard has until it is sealed."""
    return final.with_name(f".{final.name}.part")


def lay_out(final: Path, layout: ShardLayout, rows: ShardRows) -> Path:
    """Creates the partial file at its full size, reserved on disk, with all but the states in it; returns its path.

    Raises `OSError` (ENOSPC) when there is no room, before any prefill.
    """
    path = partial_path(final)
    path.parent.mkdir(parents=True, exist_ok=True)
    with _opened(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC) as fd:
        os.posix_fallocate(fd, 0, layout.nbytes)
        _write_rows(fd, layout, rows)
    return path


def compact(path: Path, layout: ShardLayout, rows: ShardRows, failed: set[int]) -> ShardLayout:
    """Takes the rows with indices `failed` out of a partial file; returns the layout it has now.

    Data only moves towards the start of the file, tensor by tensor in file order, so nothing is overwritten before it
    has been moved.
    """
    smaller = layout.without(failed)
    kept = [i for i in range(len(layout.lengths)) if i not in failed]
    keep_token = np.repeat([i not in failed for i in range(len(layout.lengths))], layout.lengths)
    with _opened(path, os.O_RDWR) as fd:
        for name in ("hidden_states", "final_hidden_state"):
            if name in layout.tensors:
                _move_rows(fd, layout, smaller, layout.tensors[name], smaller.tensors[name], kept)
        left = ShardRows(rows.input_ids[keep_token], rows.loss_mask[keep_token], rows.row_ids[kept])
        _write_rows(fd, smaller, left)
        os.ftruncate(fd, smaller.nbytes)
    return smaller


def write_header(path: Path, layout: ShardLayout) -> None:
    """Replaces the header of a partial file by one of the same size."""
    with _opened(path, os.O_RDWR) as fd:
        pwrite_all(fd, layout.header(), 0)


def seal(path: Path, final: Path) -> str:
    """Makes a complete partial file durable under its own name; returns its sha256 (hex)."""
    with _opened(path, os.O_RDONLY) as fd, ThreadPoolExecutor(1) as beside:
        # The disk writes while the bytes, still in the page cache, are hashed.
        flushed = beside.submit(os.fsync, fd)
        # Through one small buffer: what a thread once allocated its allocator keeps, for each of dozens of threads.
        with open(fd, "rb", buffering=0, closefd=False) as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        flushed.result()
    os.replace(path, final)
    sync_folder(final.parent)
    return digest


def _write_rows(fd: int, layout: ShardLayout, rows: ShardRows) -> None:
    pwrite_all(fd, layout.header(), 0)
    small: dict[str, npt.NDArray[np.generic]] = {
        "input_ids": rows.input_ids.astype("<i8"),
        "offsets": np.asarray(layout.offsets, dtype="<i8"),
        "row_ids": rows.row_ids.astype("<i8"),
        "loss_mask": np.ascontiguousarray(rows.loss_mask, dtype=np.uint8),
    }
    for name, array in small.items():
        place = layout.tensors[name]
        assert array.nbytes == place.nbytes
        pwrite_all(fd, array.tobytes(), place.start)


def _move_rows(
    fd: int, before: ShardLayout, after: ShardLayout, old: TensorPlace, new: TensorPlace, kept: list[int]
) -> None:
    width = old.nbytes // before.tokens
    for index, row in enumerate(kept):
        source = old.start + before.offsets[row] * width
        target = new.start + after.offsets[index] * width
        if source != target:
            _move(fd, source, target, before.lengths[row] * width)


def _move(fd: int, source: int, target: int, nbytes: int) -> None:
    for start in range(0, nbytes, _COPY_BYTES):
        size = min(_COPY_BYTES, nbytes - start)
        data = os.pread(fd, size, source + start)
        if len(data) != size:
            raise OSError(f"short read of {len(data)} of {size} bytes")
        pwrite_all(fd, data, target + start)


@contextmanager
def _opened(path: Path, flags: int) -> Iterator[int]:
    fd = os.open(path, flags, 0o644)
    try:
        yield fd
    finally:
        os.close(fd)
