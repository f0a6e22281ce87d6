"""Pinned host memory with a bound: one block, taken in order and free again in the same order.

Pinning stops the device while it lasts, so it is done once, in one block. A ring has no fragments, and whoever waits
for room waits for the oldest copy to be written and for nothing else.
"""

import threading
from collections import deque
from dataclasses import dataclass

import torch


@dataclass(eq=False)
class Slot:
    """`memory`, uint8 [nbytes], and the ring's position after it."""

    memory: torch.Tensor
    end: int
    given_back: bool = False


class PinnedRing:
    """A ring over `block`, uint8 [size]. One thread takes, any gives back."""

    def __init__(self, block: torch.Tensor) -> None:
        self.size = block.numel()
        self._block = block
        self._head = self._tail = 0
        """Positions of the next slot and of the oldest that is out, counted from where the ring was last empty."""
        self._out: deque[Slot] = deque()
        self._changed = threading.Condition()

    @property
    def used(self) -> int:
        """Bytes that are out, with those passed over at the block's end."""
        return self._head - self._tail

    def take(self, nbytes: int, timeout: float) -> Slot:
        """The next `nbytes` in one piece.

        Raises `ValueError` for more than the ring has, and `TimeoutError` when too little is given back in time.
        """
        if not 0 < nbytes <= self.size:
            raise ValueError(f"{nbytes} bytes do not fit {self.size} bytes of pinned memory")
        with self._changed:
            if not self._changed.wait_for(lambda: self._begin(nbytes) + nbytes - self._tail <= self.size, timeout):
                raise TimeoutError(f"no {nbytes} bytes of pinned memory within {timeout:.0f} s: the writer is stuck")
            begin = self._begin(nbytes)
            self._head = begin + nbytes
            place = begin % self.size
            slot = Slot(self._block[place : place + nbytes], self._head)
            self._out.append(slot)
            return slot

    def give(self, slot: Slot) -> None:
        """Takes a slot back. Its room is free once all that were taken before it are back, too."""
        with self._changed:
            slot.given_back = True
            while self._out and self._out[0].given_back:
                self._tail = self._out.popleft().end
            if not self._out:
                # From the start again, or a slot nearly as large as the ring might never fit.
                self._head = self._tail = 0
            self._changed.notify_all()

    def _begin(self, nbytes: int) -> int:
        """At the head, or at the block's start where the slot would reach beyond its end."""
        left = self.size - self._head % self.size
        return self._head if nbytes <= left else self._head + left
