"""What the capture does, counted in a small file that the worker reads whenever it likes.

One int64 a word, in shared memory: the engine's process alone writes, and a reader never waits. What only grows gives a
rate from any two readings, however long they lie apart. Figures for people: nothing is decided by them, but whether
states that do not arrive still wait for their writer.
"""

import threading
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from worker.capture.words import Words, mapped

_MAGIC = 0x4C41594552434E54  # "LAYERCNT"
WRITERS = 8
"""Threads that write, each of which counts its time in a word of its own."""
_MAGIC_WORD, _TOKENS, _BYTES, _WAITING, _PINNED, _PINNED_LIMIT, _WRITING = range(7)
_GIVEN = _WRITING + WRITERS
_DONE = _GIVEN + WRITERS
_WORDS = _DONE + WRITERS


def writer_of(session: str) -> int:
    """The writer, 0 … `WRITERS` − 1, that fills the file of this session."""
    return zlib.crc32(session.encode()) % WRITERS


@dataclass(frozen=True)
class Counted:
    """One reading. Seconds are in all since the engine began, those of a wait or a write under way included.

    `wait_seconds`: a forward waited for pinned memory or for a place in a writer's queue. `write_seconds`: writers were
    writing, summed over `WRITERS` threads. `queued_runs` wait for a writer or are in its hands, one for each file that
    their rows belong to. `pinned_bytes` of `pinned_limit` are taken, 0 of 0 without a GPU.
    """

    tokens: int
    bytes: int
    wait_seconds: float
    write_seconds: float
    queued_runs: int
    pinned_bytes: int
    pinned_limit: int


class Counters:
    """The words of one engine. `waiting` and `given` are for one thread, `writing` and `done` for one an index."""

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

    def given(self, writer: int) -> None:
        """One more run waits for that writer."""
        self._words[_GIVEN + writer] += 1

    def done(self, writer: int) -> None:
        """That writer is done with one more run, written or not."""
        self._words[_DONE + writer] += 1

    def given_and_done(self, writer: int) -> tuple[int, int]:
        """Runs that this writer has been given, and those that it is done with, in the order in which they came."""
        done = int(self._words[_DONE + writer])
        return int(self._words[_GIVEN + writer]), done

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
            write_seconds=sum(_elapsed(word, now) for word in words[_WRITING:_GIVEN]),
            queued_runs=max(0, sum(words[_GIVEN:_DONE]) - sum(words[_DONE:])),
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
