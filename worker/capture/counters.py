"""What the capture does, counted in a small file that the worker reads whenever it likes.

One int64 a word, in shared memory: the engine's process alone writes, and a reader never waits. What only grows gives a
rate from any two readings, however long they lie apart. Figures for people: nothing is decided by them.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from worker.capture.words import Words, mapped

_MAGIC = 0x4C41594552434E54  # "LAYERCNT"
WRITERS = 8
"""Threads that write, each of which counts its time in a word of its own."""
_MAGIC_WORD, _TOKENS, _BYTES, _WAITING, _SUBMITTED, _FINISHED, _PINNED, _PINNED_LIMIT, _WRITING = range(9)
_WORDS = _WRITING + WRITERS


@dataclass(frozen=True)
class Counted:
    """One reading. Seconds are in all since the engine began, those of a wait or a write under way included.

    `wait_seconds`: a forward waited for pinned memory or for a place in a writer's queue. `write_seconds`: writers were
    writing, summed over `WRITERS` threads. `queued_runs` wait for a writer or are in its hands. `pinned_bytes` of
    `pinned_limit` are taken, 0 of 0 without a GPU.
    """

    tokens: int
    bytes: int
    wait_seconds: float
    write_seconds: float
    queued_runs: int
    pinned_bytes: int
    pinned_limit: int


class Counters:
    """The words of one engine. `waiting` is for one thread, and `writing` for one thread an index."""

    def __init__(self, words: Words) -> None:
        self._words = words
        self._adding = threading.Lock()

    @classmethod
    def create(cls, run_dir: Path) -> "Counters":
        """Fresh counters in an engine's run directory, all zero."""
        words = np.zeros(_WORDS, dtype=np.int64)
        words[_MAGIC_WORD] = _MAGIC
        counters_file(run_dir).write_bytes(words.tobytes())
        counters = cls.open(run_dir)
        assert counters is not None
        return counters

    @classmethod
    def open(cls, run_dir: Path) -> "Counters | None":
        """The counters of that engine; None where it has none, or not of this release."""
        try:
            words = mapped(counters_file(run_dir))
        except (OSError, ValueError):
            return None
        return cls(words) if len(words) == _WORDS and words[_MAGIC_WORD] == _MAGIC else None

    def wrote(self, tokens: int, nbytes: int) -> None:
        """So much more is in files now. From any thread."""
        with self._adding:
            self._words[_TOKENS] += tokens
            self._words[_BYTES] += nbytes

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """The forward waits for as long as the block runs."""
        with self._timed(_WAITING):
            yield

    @contextmanager
    def writing(self, writer: int) -> Iterator[None]:
        """Writer 0 … `WRITERS` − 1 writes for as long as the block runs."""
        with self._timed(_WRITING + writer):
            yield

    def submitted(self) -> None:
        """One more run waits for a writer. From one thread."""
        self._words[_SUBMITTED] += 1

    def finished(self) -> None:
        """One more run is done with, written or not. From any thread."""
        with self._adding:
            self._words[_FINISHED] += 1

    def pinned(self, nbytes: int, limit: int) -> None:
        """So much pinned memory is taken, of so much."""
        self._words[_PINNED], self._words[_PINNED_LIMIT] = nbytes, limit

    def read(self) -> Counted:
        """The words as they are now."""
        words = [int(word) for word in self._words]
        now = time.monotonic_ns()
        return Counted(
            tokens=words[_TOKENS],
            bytes=words[_BYTES],
            wait_seconds=_elapsed(words[_WAITING], now),
            write_seconds=sum(_elapsed(word, now) for word in words[_WRITING:]),
            queued_runs=max(0, words[_SUBMITTED] - words[_FINISHED]),
            pinned_bytes=words[_PINNED],
            pinned_limit=words[_PINNED_LIMIT],
        )

    @contextmanager
    def _timed(self, word: int) -> Iterator[None]:
        # Less the start, later plus the end: a span under way shows in the same word, as a negative number.
        self._words[word] -= time.monotonic_ns()
        try:
            yield
        finally:
            self._words[word] += time.monotonic_ns()


def counters_file(run_dir: Path) -> Path:
    """Where an engine counts."""
    return run_dir / "counters"


def _elapsed(word: int, now: int) -> float:
    return (word if word >= 0 else word + now) / 1e9
