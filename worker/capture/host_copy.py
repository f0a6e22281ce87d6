"""From the device to host memory: one contiguous copy a run of rows, on a stream of its own, without a host sync.

Host memory is a ring of pinned memory with a bound. When storage can't keep up the ring fills, and the next copy waits:
that holds up the forward, and so the admission of rows.
"""

import threading
from dataclasses import dataclass
from typing import Any

import torch

from worker.capture.counters import Counters
from worker.capture.pinned import PinnedRing, Slot

_CUDA: Any = torch.cuda
"""Its streams and events come without types."""
_ALIGN = 4096
_SHARE = 4
"""A copy takes at most this part of the ring, so that one is filled while others are written."""
_ROOM_TIMEOUT_S = 600.0


@dataclass
class HostCopy:
    """States of a run of rows on their way to host memory.

    `hidden` [n, K, H] and `final` [n, H] may be read once `wait` has returned; `finite` [n] tells rows with only finite
    values. `Copier.release` gives the pinned memory back.
    """

    hidden: torch.Tensor
    final: torch.Tensor | None
    finite: torch.Tensor
    event: Any = None
    slot: Slot | None = None

    def wait(self) -> None:
        """Returns once the copy is in host memory."""
        if self.event is not None:
            self.event.synchronize()


class Copier:
    """Copies states to the host. On a CPU engine the host is where they are, and the copy is a gather.

    `pool_bytes` of pinned memory are taken, or the next lower power of two: what PyTorch pins, it rounds up to one.
    """

    def __init__(self, device: torch.device, pool_bytes: int, counters: Counters) -> None:
        self._counters = counters
        self._telling = threading.Lock()
        self.ring: PinnedRing | None = None
        self._stream: Any = None
        if device.type == "cuda":
            size = 1 << (pool_bytes.bit_length() - 1)
            self.ring = PinnedRing(torch.empty(size, dtype=torch.uint8, pin_memory=True))
            self._tell(self.ring)
            self._stream = _CUDA.Stream(device)

    def most_rows(self, states: list[torch.Tensor], final: torch.Tensor | None) -> int | None:
        """How many rows of these states one copy may take, or None for any number."""
        if self.ring is None:
            return None
        row_bytes = sum(state[:1].nbytes for state in states) + (0 if final is None else final[:1].nbytes)
        return max(1, (self.ring.size // _SHARE - 3 * _ALIGN) // (row_bytes + 1))

    def copy(self, states: list[torch.Tensor], final: torch.Tensor | None, start: int, stop: int) -> HostCopy:
        """Starts the copy of batch rows `[start, stop)`: K boundaries [N, H] each, the final state [N, H] or None.

        Raises `ValueError` for more than the ring has, and `TimeoutError` when the writer gives nothing back.
        """
        if self.ring is None:
            return _gather(states, final, start, stop)
        for source in (*states, *(() if final is None else (final,))):
            # Their memory is not used again before this stream is through with it.
            source.record_stream(self._stream)
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            on_device = _gather(states, final, start, stop)
            parts = [part for part in (on_device.hidden, on_device.finite, on_device.final) if part is not None]
            slot, (hidden, finite, *final_host) = self._to_host(parts, self.ring)
            # Writers sleep until it comes, and leave the processor to the scheduler.
            event = _CUDA.Event(blocking=True)
            event.record(self._stream)
        return HostCopy(hidden, final_host[0] if final_host else None, finite, event, slot)

    def release(self, copy: HostCopy) -> None:
        """Gives the copy's pinned memory back; its tensors must not be read after."""
        if self.ring is not None and copy.slot is not None:
            self.ring.give(copy.slot)
            copy.slot = None
            self._tell(self.ring)

    def _tell(self, ring: PinnedRing) -> None:
        # One at a time, or what is told last may have been looked up first.
        with self._telling:
            self._counters.pinned(ring.used, ring.size)

    def _to_host(self, parts: list[torch.Tensor], ring: PinnedRing) -> tuple[Slot, list[torch.Tensor]]:
        starts = [0]
        for part in parts:
            starts.append(starts[-1] + (part.nbytes + _ALIGN - 1) // _ALIGN * _ALIGN)
        with self._counters.waiting():
            slot = ring.take(starts[-1], _ROOM_TIMEOUT_S)
        self._tell(ring)
        copies = []
        for part, start in zip(parts, starts, strict=False):
            host = slot.memory[start : start + part.nbytes].view(part.dtype).view(part.shape)
            copies.append(host.copy_(part, non_blocking=True))
        return slot, copies


def _gather(states: list[torch.Tensor], final: torch.Tensor | None, start: int, stop: int) -> HostCopy:
    hidden = torch.stack([state[start:stop] for state in states], dim=1)
    final_rows = None if final is None else final[start:stop].contiguous()
    finite = rows_finite(hidden.flatten(1))
    if final_rows is not None:
        finite &= rows_finite(final_rows)
    return HostCopy(hidden, final_rows, finite)


def rows_finite(rows: torch.Tensor) -> torch.Tensor:
    """Which rows of [n, m] hold only finite values, [n] bool: NaN and infinities survive a minimum and a maximum."""
    low, high = torch.aminmax(rows, dim=1)
    return torch.isfinite(low) & torch.isfinite(high)
