"""One shard file, memory-mapped: every tensor is a view on the file's pages, and nothing is copied.

A shard is a safetensors file (https://github.com/huggingface/safetensors#format). Its header is read here rather than
by the safetensors library because that library copies bf16 on its way to numpy.
"""

import json
import math
import mmap
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from layertap.errors import ShardError
from layertap.schemas.shards import Manifest, ManifestShard

DTYPES: dict[str, np.dtype[Any]] = {
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F16": np.dtype("<f2"),
    "F32": np.dtype("<f4"),
    "I64": np.dtype("<i8"),
    "U8": np.dtype("u1"),
}
_MAX_HEADER = 100_000_000


@dataclass(frozen=True)
class TensorSpan:
    """Where a tensor lies: dtype, shape, and the first of its bytes in the file."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    start: int


def damaged(path: Path, reason: str, job: str) -> ShardError:
    """The error for a shard that can't be used, with its remedy."""
    return ShardError(
        f"shard {path.name} {reason}; run `layertap pull {job} {path.parent}` again, it fetches only what is wrong",
        [path.name],
    )


class ShardFile:
    """The tensors of one shard as views on a private map of the file; see `tensors`.

    The map is freed when the object and the last view on it are gone. Raises `ShardError` when the file is missing, is
    not as long as the manifest says, or its header does not describe the tensors that the manifest promises.
    """

    def __init__(self, path: Path, entry: ManifestShard, manifest: Manifest) -> None:
        self._path, self._job = path, manifest.job
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            raise damaged(path, "is missing", manifest.job) from None
        except OSError as e:
            raise damaged(path, f"can't be opened ({e.strerror})", manifest.job) from None
        try:
            size = os.fstat(fd).st_size
            if size != entry.bytes:
                raise damaged(path, f"has {size:,} bytes instead of {entry.bytes:,}", manifest.job)
            spans = self._read_header(fd, size)
            self._check(spans, entry, manifest)
            self._map = _map(fd)
        finally:
            os.close(fd)
        self.tensors: dict[str, npt.NDArray[Any]] = {name: self._view(span) for name, span in spans.items()}
        """Every tensor of the file by name, all rows one after the other. What is written to them stays in memory."""
        offsets = self.tensors["offsets"]
        if offsets[0] != 0 or offsets[-1] != entry.tokens or (np.diff(offsets) < 1).any():
            raise damaged(path, "has offsets that do not fit its tokens", manifest.job)

    def _view(self, span: TensorSpan) -> npt.NDArray[Any]:
        count = math.prod(span.shape)
        return np.frombuffer(self._map, span.dtype, count, span.start).reshape(span.shape)

    def _read_header(self, fd: int, size: int) -> dict[str, TensorSpan]:
        length = int.from_bytes(os.pread(fd, 8, 0), "little")
        if not 2 <= length <= min(_MAX_HEADER, size - 8):
            raise damaged(self._path, "is not a safetensors file", self._job)
        try:
            header = json.loads(os.pread(fd, length, 8))
            return {
                name: self._span(tensor, 8 + length, size) for name, tensor in header.items() if name != "__metadata__"
            }
        except (ValueError, TypeError, KeyError, AttributeError):
            raise damaged(self._path, "has a damaged header", self._job) from None

    @staticmethod
    def _span(tensor: dict[str, Any], data: int, size: int) -> TensorSpan:
        dtype, shape = DTYPES[tensor["dtype"]], tuple(int(n) for n in tensor["shape"])
        begin, end = (int(n) for n in tensor["data_offsets"])
        if min(shape, default=0) < 0 or begin < 0 or data + end > size:
            raise ValueError("a tensor lies outside the file")
        if end - begin != math.prod(shape) * dtype.itemsize:
            raise ValueError("a tensor's bytes do not fit its shape")
        return TensorSpan(dtype, shape, data + begin)

    def _check(self, spans: dict[str, TensorSpan], entry: ManifestShard, manifest: Manifest) -> None:
        promised: dict[str, tuple[int, ...]] = {
            "input_ids": (entry.tokens,),
            "loss_mask": (entry.tokens,),
            "offsets": (entry.rows + 1,),
            "row_ids": (entry.rows,),
        }
        for name, shape in promised.items():
            if name not in spans or spans[name].shape != shape:
                raise damaged(self._path, f"has no {name} of shape {list(shape)}, as its manifest promises", self._job)
        hidden = spans.get("hidden_states")
        if hidden is None or len(hidden.shape) != 3 or hidden.shape[:2] != (entry.tokens, len(manifest.layers)):
            raise damaged(self._path, "has no hidden_states of the shape that its manifest promises", self._job)
        final = spans.get("final_hidden_state")
        if final is not None and final.shape != (entry.tokens, hidden.shape[2]):
            raise damaged(self._path, "has a final_hidden_state of a wrong shape", self._job)


def _map(fd: int) -> mmap.mmap:
    """A private, writable map of the whole file: torch wants memory it may write to, the file itself never changes.

    Without reserving swap, so that a shard larger than the machine's memory maps too.
    """
    flags = mmap.MAP_PRIVATE | getattr(mmap, "MAP_NORESERVE", 0)
    prot = mmap.PROT_READ | mmap.PROT_WRITE
    if sys.version_info >= (3, 13):
        return mmap.mmap(fd, 0, flags=flags, prot=prot, trackfd=False)
    return mmap.mmap(fd, 0, flags=flags, prot=prot)
