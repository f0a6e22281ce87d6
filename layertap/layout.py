"""Shard layout: where every byte of a shard lies, known from the row lengths alone, before any prefill.

A shard is one safetensors file. Its header is padded to a multiple of 4,096 bytes, so the hidden states start on a page
boundary, and the tensors follow without gaps, widest alignment first. Pure arithmetic; no I/O.

Format: https://github.com/huggingface/safetensors#format
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

PAGE = 4096
HEADER_SLACK = 3072
"""Bytes kept free in the header, for what becomes known only after prefill, without the data moving."""

DTYPE_BYTES = {"BF16": 2, "F16": 2, "F32": 4}
"""safetensors names of the dtypes that hidden states come in, and their size in bytes."""


@dataclass(frozen=True)
class TensorPlace:
    """One tensor of the file: name, safetensors dtype, shape, and its bytes `[start, start + nbytes)` of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    nbytes: int


@dataclass(frozen=True)
class ShardLayout:
    """The layout of a shard of n rows, T tokens in all, K boundaries, hidden size H.

    `lengths` are the rows' tokens, `dtype` the safetensors name of the model's dtype, `metadata` goes into the header.
    `header_bytes` pins the padded header's size (8 length bytes included); by default the smallest that fits.
    """

    lengths: tuple[int, ...]
    boundaries: tuple[int, ...]
    hidden_size: int
    dtype: str
    with_final: bool
    metadata: tuple[tuple[str, str], ...] = ()
    header_bytes: int | None = None

    @staticmethod
    def of(
        lengths: Sequence[int],
        boundaries: Sequence[int],
        hidden_size: int,
        dtype: str,
        with_final: bool,
        metadata: Mapping[str, str] | None = None,
    ) -> "ShardLayout":
        """A layout from plain sequences. Raises `ValueError` on no rows, a zero length or an unknown dtype."""
        if not lengths or min(lengths) < 1:
            raise ValueError("a shard needs at least one row, and every row at least one token")
        if dtype not in DTYPE_BYTES:
            raise ValueError(f"dtype {dtype} is none of {', '.join(DTYPE_BYTES)}")
        return ShardLayout(
            tuple(lengths), tuple(boundaries), hidden_size, dtype, with_final, tuple(sorted((metadata or {}).items()))
        )

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """First token of each row, and the total: row i is tokens `offsets[i]:offsets[i + 1]`."""
        return tuple(accumulate(self.lengths, initial=0))

    @property
    def tokens(self) -> int:
        """T, the tokens of all rows."""
        return self.offsets[-1]

    @property
    def hidden_token_bytes(self) -> int:
        """Bytes of one token in `hidden_states`: K · H · itemsize."""
        return len(self.boundaries) * self.final_token_bytes

    @property
    def final_token_bytes(self) -> int:
        """Bytes of one token in `final_hidden_state`: H · itemsize."""
        return self.hidden_size * DTYPE_BYTES[self.dtype]

    @cached_property
    def data_start(self) -> int:
        """First byte after the padded header."""
        if self.header_bytes is not None:
            return self.header_bytes
        unpadded = 8 + len(self._header_json(PAGE)) + HEADER_SLACK
        return -(-unpadded // PAGE) * PAGE

    @cached_property
    def tensors(self) -> dict[str, TensorPlace]:
        """Every tensor's place, in file order."""
        return {place.name: place for place in self._places(self.data_start)}

    @property
    def nbytes(self) -> int:
        """Size of the whole file."""
        last = list(self.tensors.values())[-1]
        return last.start + last.nbytes

    def header(self) -> bytes:
        """The first `data_start` bytes of the file. Raises `ValueError` if the JSON outgrew the pinned size."""
        text = self._header_json(self.data_start)
        room = self.data_start - 8
        if len(text) > room:
            raise ValueError(f"header of {len(text)} bytes does not fit the {room} kept for it")
        return room.to_bytes(8, "little") + text.ljust(room, b" ")

    def with_metadata(self, metadata: Mapping[str, str]) -> "ShardLayout":
        """The same layout with other metadata, its data starting at the same byte."""
        return replace(self, metadata=tuple(sorted(metadata.items())), header_bytes=self.data_start)

    def without(self, rows: set[int]) -> "ShardLayout":
        """The layout of the same shard less `rows` (indices), its data starting at the same byte."""
        kept = tuple(n for i, n in enumerate(self.lengths) if i not in rows)
        if not kept:
            raise ValueError("no row would be left")
        return ShardLayout(
            kept, self.boundaries, self.hidden_size, self.dtype, self.with_final, self.metadata, self.data_start
        )

    def _places(self, data_start: int) -> list[TensorPlace]:
        t, k, h, n = self.tokens, len(self.boundaries), self.hidden_size, len(self.lengths)
        item = DTYPE_BYTES[self.dtype]
        wanted: list[tuple[str, str, tuple[int, ...], int]] = [("hidden_states", self.dtype, (t, k, h), item)]
        if self.with_final:
            wanted.append(("final_hidden_state", self.dtype, (t, h), item))
        wanted += [("input_ids", "I64", (t,), 8), ("offsets", "I64", (n + 1,), 8), ("row_ids", "I64", (n,), 8)]
        wanted.append(("loss_mask", "U8", (t,), 1))
        places, start = [], data_start
        for name, dtype, shape, size in wanted:
            nbytes = size
            for dim in shape:
                nbytes *= dim
            places.append(TensorPlace(name, dtype, shape, start, nbytes))
            start += nbytes
        return places

    def _header_json(self, data_start: int) -> bytes:
        entries: dict[str, object] = {"__metadata__": dict(self.metadata)} if self.metadata else {}
        for p in self._places(data_start):
            begin = p.start - data_start
            entries[p.name] = {"dtype": p.dtype, "shape": list(p.shape), "data_offsets": [begin, begin + p.nbytes]}
        return json.dumps(entries, separators=(",", ":"), ensure_ascii=True).encode()


def token_bytes(boundaries: int, hidden_size: int, dtype: str, with_final: bool) -> int:
    """Bytes that one token adds to a shard: its hidden states, its id (8) and its mask (1)."""
    return (boundaries + with_final) * hidden_size * DTYPE_BYTES[dtype] + 8 + 1


def shard_bytes_estimate(lengths: Sequence[int], per_token: int, header: int = 2 * PAGE) -> int:
    """Bytes of a shard of rows of these `lengths`, an upper bound while metadata stays within the slack of `header`."""
    return header + sum(lengths) * per_token + 8 * (2 * len(lengths) + 1)
