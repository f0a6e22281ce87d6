"""From the device to host memory: one contiguous copy a run of rows, on a stream of its own, without a host sync.

Pinned buffers come from a pool with a bound. The worker sends no more rows than the pool holds, so that waiting for a
buffer, which would hold up the forward, is the last resort and not the rule.
"""

import threading
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import torch

from worker.capture.counters import Counters

_ALIGN = 4096
_SMALLEST = 1 << 16


@dataclass
class HostCopy:
    """States of a run of rows on their way to host memory.

    `hidden` [n, K, H] and `final` [n, H] may be read once `wait` has returned; `finite` [n] tells rows with only finite
    values. `Copier.release` gives the pinned memory back.
    """

    hidden: torch.Tensor
    final: torch.Tensor | None
    finite: torch.Tensor
    nbytes: int
    event: Any = None
    pinned: torch.Tensor | None = field(default=None, repr=False)
    keep_alive: tuple[torch.Tensor, ...] = field(default=(), repr=False)

    def wait(self) -> None:
        """Returns once the copy is in host memory; the device memory behind it is let go."""
        if self.event is not None:
            self.event.synchronize()
        self.keep_alive = ()


class PinnedPool:
    """Pinned host memory with a bound of `limit` bytes; freed buffers are kept for copies of their size.

    A copy takes one buffer for all it holds: one that took several could wait for room that it occupies itself.
    """

    def __init__(self, limit: int, counters: Counters) -> None:
        self.limit = limit
        self._counters = counters
        self._out = 0
        self._used = 0
        self._free: dict[int, deque[torch.Tensor]] = {}
        self._changed = threading.Condition()

    def take(self, nbytes: int, timeout: float = 600.0) -> torch.Tensor:
        """A pinned uint8 buffer of at least `nbytes`. Raises `TimeoutError` when none is given back in time."""
        size = _size_class(nbytes)
        with self._changed:
            with self._counters.waiting():
                fits = self._changed.wait_for(lambda: bool(self._free.get(size)) or self._make_room(size), timeout)
            if not fits:
                raise TimeoutError(f"no pinned buffer of {size} bytes within {timeout:.0f} s: the writer is stuck")
            self._count(size)
            kept = self._free.get(size)
            if kept:
                return kept.pop()
            self._used += size
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def give(self, buffer: torch.Tensor) -> None:
        """Takes a buffer back."""
        with self._changed:
            self._free.setdefault(buffer.numel(), deque()).append(buffer)
            self._count(-buffer.numel())
            self._changed.notify_all()

    def _count(self, nbytes: int) -> None:
        self._out += nbytes
        self._counters.pinned(self._out, self.limit)

    def _make_room(self, size: int) -> bool:
        # One buffer may exceed the limit when nothing else is out: a row must never wait for room that cannot come.
        while self._used and self._used + size > self.limit:
            largest = max((n for n, kept in self._free.items() if kept), default=None)
            if largest is None:
                return False
            self._free[largest].pop()
            self._used -= largest
        return True


class Copier:
    """Copies states to the host. On a CPU engine the host is where they are, and the copy is a gather."""

    def __init__(self, device: torch.device, pool_bytes: int, counters: Counters) -> None:
        self._cuda = device.type == "cuda"
        self._pool = PinnedPool(pool_bytes, counters) if self._cuda else None
        self._stream: Any = torch.cuda.Stream(device) if self._cuda else None  # type: ignore[no-untyped-call]

    def copy(self, states: list[torch.Tensor], final: torch.Tensor | None, start: int, stop: int) -> HostCopy:
        """Starts the copy of batch rows `[start, stop)`: K boundaries [N, H] each, the final state [N, H] or None."""
        if self._stream is None:
            return self._gather(states, final, start, stop)
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            on_device = self._gather(states, final, start, stop)
            parts = [part for part in (on_device.hidden, on_device.finite, on_device.final) if part is not None]
            buffer, (hidden, finite, *final_host) = self._to_host(parts)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(self._stream)
        device_tensors = (*states, *(() if final is None else (final,)), on_device.hidden, on_device.finite)
        return HostCopy(
            hidden, final_host[0] if final_host else None, finite, on_device.nbytes, event, buffer, device_tensors
        )

    def release(self, copy: HostCopy) -> None:
        """Gives the copy's pinned memory back; its tensors must not be read after."""
        if self._pool is not None and copy.pinned is not None:
            self._pool.give(copy.pinned)
            copy.pinned = None

    def _gather(self, states: list[torch.Tensor], final: torch.Tensor | None, start: int, stop: int) -> HostCopy:
        hidden = torch.stack([state[start:stop] for state in states], dim=1)
        final_rows = None if final is None else final[start:stop].contiguous()
        finite = rows_finite(hidden.flatten(1))
        if final_rows is not None:
            finite &= rows_finite(final_rows)
        nbytes = hidden.nbytes + (0 if final_rows is None else final_rows.nbytes)
        return HostCopy(hidden, final_rows, finite, nbytes)

    def _to_host(self, parts: list[torch.Tensor]) -> tuple[torch.Tensor, list[torch.Tensor]]:
        assert self._pool is not None
        starts = [0]
        for part in parts:
            starts.append(starts[-1] + (part.nbytes + _ALIGN - 1) // _ALIGN * _ALIGN)
        buffer = self._pool.take(starts[-1])
        copies = []
        for part, start in zip(parts, starts, strict=False):
            host = buffer[start : start + part.nbytes].view(part.dtype).view(part.shape)
            copies.append(host.copy_(part, non_blocking=True))
        return buffer, copies


def _size_class(nbytes: int) -> int:
    """Sizes a quarter of a power of two apart, so that buffers are used again and little of them is waste."""
    step = max(_SMALLEST, 1 << max(0, nbytes.bit_length() - 3))
    return (nbytes + step - 1) // step * step


def rows_finite(rows: torch.Tensor) -> torch.Tensor:
    """Which rows of [n, m] hold only finite values, [n] bool: NaN and infinities survive a minimum and a maximum."""
    low, high = torch.aminmax(rows, dim=1)
    return torch.isfinite(low) & torch.isfinite(high)
