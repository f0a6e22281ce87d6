"""The reader of a pulled job: rows by position or by id, tensors by name, as views on memory-mapped files.

    rows = layertap.open("out")
    rows[0]["hidden_states"]          # numpy, [S, K, H], bf16 through ml_dtypes
    rows[0].torch()["hidden_states"]  # torch, where torch is installed

An `Extraction` is a map-style data set as PyTorch's DataLoader wants it: it can be pickled, and each worker process
opens its own files.
"""

import hashlib
import operator
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, SupportsIndex

import numpy as np
import numpy.typing as npt

from layertap import manifest as manifests
from layertap.errors import MissingExtraError, ShardError
from layertap.schemas.shards import Manifest
from layertap.shard_file import ShardFile, damaged

Array = npt.NDArray[Any]

_PER_TOKEN = ("input_ids", "loss_mask", "hidden_states", "final_hidden_state")
_HASH_CHUNK = 1024 * 1024


class Row(Mapping[str, Array]):
    """One row of a job, S tokens long. A mapping from tensor name to array; the arrays are read-only views.

    `row_id` is the 0-based line of the data set that the row came from.
    """

    def __init__(self, row_id: int, layers: tuple[int, ...], tensors: dict[str, Array]) -> None:
        self.row_id = row_id
        self.layers = layers
        self._writable = tensors
        self._tensors = {name: _read_only(array) for name, array in tensors.items()}

    @property
    def input_ids(self) -> Array:
        """int64 [S]."""
        return self._tensors["input_ids"]

    @property
    def loss_mask(self) -> Array:
        """uint8 [S], 1 where the token is supervised; unshifted."""
        return self._tensors["loss_mask"]

    @property
    def hidden_states(self) -> Array:
        """[S, K, H] in the model's dtype, the K boundaries ascending, as in `layers`."""
        return self._tensors["hidden_states"]

    @property
    def final_hidden_state(self) -> Array | None:
        """[S, H], boundary L after the final norm; None where the job was made without it."""
        return self._tensors.get("final_hidden_state")

    def boundary(self, k: int) -> Array:
        """[S, H]: the residual stream after the first `k` blocks. Raises `KeyError` for a boundary not extracted."""
        if k not in self.layers:
            raise KeyError(f"boundary {k} was not extracted; this job has {', '.join(map(str, self.layers))}")
        view: Array = self.hidden_states[:, self.layers.index(k)]
        return view

    def torch(self) -> dict[str, Any]:
        """The same tensors as `torch.Tensor`, sharing memory with the map; bf16 becomes `torch.bfloat16`.

        What is written to them stays in this process and never reaches the file. Raises `MissingExtraError` where torch
        is not installed.
        """
        try:
            import torch
        except ImportError:
            raise MissingExtraError("torch is not installed; install it, or use the numpy arrays of the row") from None
        tensors = {}
        for name, array in self._writable.items():
            aligned = np.require(array, requirements="A")
            if aligned.dtype.name == "bfloat16":
                tensors[name] = torch.from_numpy(aligned.view(np.int16)).view(torch.bfloat16)
            else:
                tensors[name] = torch.from_numpy(aligned)
        return tensors

    def __getitem__(self, name: str) -> Array:
        try:
            return self._tensors[name]
        except KeyError:
            raise KeyError(f"no tensor {name!r}; this row has {', '.join(self._tensors)}") from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def __repr__(self) -> str:
        shapes = ", ".join(f"{name} {list(array.shape)} {array.dtype}" for name, array in self.items())
        return f"Row(row_id={self.row_id}, {shapes})"


class Extraction:
    """A pulled job: a sequence of rows in ascending order of `row_id`. `max_open` bounds the shards kept open.

    The manifest is read at once. The first row asked for makes every shard's row ids be read, and so finds a missing or
    short shard then, not an hour into an epoch. Before Python 3.13 a row keeps its shard's file open while it lives.
    """

    def __init__(self, directory: str | os.PathLike[str], max_open: int = 16) -> None:
        if max_open < 1:
            raise ValueError("max_open must be at least 1")
        self.directory = Path(directory).absolute()
        self.manifest: Manifest = manifests.load(self.directory)
        self._layers = tuple(self.manifest.layers)
        self._shards = [shard for shard in self.manifest.shards if shard.rows]
        self._max_open = max_open
        self._fresh()

    def _fresh(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._open: OrderedDict[int, ShardFile] = OrderedDict()

    @property
    def complete(self) -> bool:
        """False for what a failed or cancelled job left."""
        return self.manifest.complete

    def __len__(self) -> int:
        return sum(shard.rows for shard in self._shards)

    def __getitem__(self, index: SupportsIndex) -> Row:
        """The `index`-th row in ascending order of row id; negative counts from the end."""
        i = operator.index(index)
        n = len(self)
        if not -n <= i < n:
            raise IndexError(f"row {i} is out of range; this job has {n} rows")
        row_ids, shards, places = self._index
        i %= n
        return self._row(int(row_ids[i]), int(shards[i]), int(places[i]))

    def __iter__(self) -> Iterator[Row]:
        for i in range(len(self)):
            yield self[i]

    def by_row_id(self, row_id: int) -> Row:
        """The row that came from line `row_id` (0-based). Raises `KeyError` when it has no hidden states."""
        row_ids = self._index[0]
        i = int(np.searchsorted(row_ids, row_id))
        if i == len(row_ids) or row_ids[i] != row_id:
            raise KeyError(f"row {row_id} is not in this job; `layertap errors {self.manifest.job}` says why it failed")
        return self[i]

    @property
    def row_ids(self) -> npt.NDArray[np.int64]:
        """int64 [len(self)], ascending."""
        return self._index[0]

    def verify(self, on_progress: Callable[[int], None] | None = None) -> None:
        """Compares the size and sha256 of every shard with the manifest; `on_progress` gets the bytes read so far.

        Raises `ShardError` naming every shard that is missing or differs.
        """
        wrong: list[str] = []
        seen = 0
        for shard in self._shards:
            path = self.directory / shard.file
            digest = hashlib.sha256()
            try:
                with path.open("rb") as file:
                    while chunk := file.read(_HASH_CHUNK):
                        digest.update(chunk)
                        seen += len(chunk)
                        if on_progress is not None:
                            on_progress(seen)
            except OSError as e:
                wrong.append(f"{shard.file} ({e.strerror})")
                continue
            if digest.hexdigest() != shard.sha256:
                wrong.append(f"{shard.file} (its sha256 differs from the manifest's)")
        if wrong:
            raise ShardError(
                f"{len(wrong)} of {len(self._shards)} shards are wrong: {', '.join(wrong)}; "
                f"run `layertap pull {self.manifest.job} {self.directory}` again, it fetches only those",
                [text.split(" ", 1)[0] for text in wrong],
            )

    @cached_property
    def _index(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int32], npt.NDArray[np.int64]]:
        """For each row in ascending order of id: its id, its shard, its place in the shard."""
        ids = [self._shard(i).tensors["row_ids"].copy() for i in range(len(self._shards))]
        if not ids:
            return np.zeros(0, np.int64), np.zeros(0, np.int32), np.zeros(0, np.int64)
        row_ids = np.concatenate(ids).astype(np.int64)
        shards = np.repeat(np.arange(len(ids), dtype=np.int32), [len(part) for part in ids])
        places = np.concatenate([np.arange(len(part), dtype=np.int64) for part in ids])
        order = np.argsort(row_ids, kind="stable")
        row_ids, shards, places = row_ids[order], shards[order], places[order]
        doubled = np.flatnonzero(np.diff(row_ids) == 0)
        if len(doubled):
            first = self._shards[int(shards[doubled[0] + 1])]
            raise damaged(self.directory / first.file, f"repeats row {row_ids[doubled[0]]}", self.manifest.job)
        return row_ids, shards, places

    def _row(self, row_id: int, shard: int, place: int) -> Row:
        tensors = self._shard(shard).tensors
        begin, end = (int(n) for n in tensors["offsets"][place : place + 2])
        return Row(row_id, self._layers, {name: tensors[name][begin:end] for name in _PER_TOKEN if name in tensors})

    def _shard(self, index: int) -> ShardFile:
        if self._pid != os.getpid():
            self._fresh()
        with self._lock:
            shard = self._open.pop(index, None)
            if shard is None:
                entry = self._shards[index]
                shard = ShardFile(self.directory / entry.file, entry, self.manifest)
            self._open[index] = shard
            while len(self._open) > self._max_open:
                self._open.popitem(last=False)
            return shard

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("_open", "_lock", "_pid")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._fresh()

    def __repr__(self) -> str:
        partial = "" if self.complete else ", partial"
        return f"Extraction({self.manifest.job}, {len(self)} rows, boundaries {list(self._layers)}{partial})"


def _read_only(array: Array) -> Array:
    view = array.view()
    view.flags.writeable = False
    return view
