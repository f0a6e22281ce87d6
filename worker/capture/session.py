"""Capture sessions: how worker and capture agree on where a shard's bytes go and which of them are there.

The worker writes a session file before it sends the first row and never changes it; the capture reports into a ledger,
an array in shared memory of one record per row. Both survive the death of either side, and neither side waits for the
other: a row counts as written only once its last byte has been handed to the file.
"""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from layertap.layout import ShardLayout
from worker.capture.words import Words, mapped

_HEADER_WORDS = 8
_MAGIC = 0x4C41594552544150  # "LAYERTAP"
_WORD_MAGIC, _WORD_ROWS, _WORD_CLOSED, _WORD_ERRNO, _WORD_WRITING = range(5)


class LedgerError(RuntimeError):
    """A ledger file that is not one, or is of another size than it says."""


class Ledger:
    """Shared record of a shard's rows: `lengths`, `written` and `nonfinite`, each int64 [n].

    `written[i]` is how many leading tokens of row i are in the file; `nonfinite[i]` counts its tokens that hold a NaN
    or infinity. The capture alone writes those two, the worker alone writes `closed`. A row that is complete is written
    no more.
    """

    def __init__(self, path: Path, words: Words) -> None:
        self.path = path
        self._words = words
        rows = int(words[_WORD_ROWS])
        body = words[_HEADER_WORDS:].reshape(3, rows)
        self.lengths, self.written, self.nonfinite = body[0], body[1], body[2]

    @classmethod
    def create(cls, path: Path, lengths: npt.ArrayLike) -> "Ledger":
        """A fresh ledger for rows of these lengths, in tokens."""
        sizes = np.asarray(lengths, dtype=np.int64)
        words = np.zeros(_HEADER_WORDS + 3 * len(sizes), dtype=np.int64)
        words[_WORD_MAGIC], words[_WORD_ROWS] = _MAGIC, len(sizes)
        words[_HEADER_WORDS : _HEADER_WORDS + len(sizes)] = sizes
        path.write_bytes(words.tobytes())
        return cls.open(path)

    @classmethod
    def open(cls, path: Path) -> "Ledger":
        """Maps an existing ledger. Raises `LedgerError`, or `OSError` where there is no file."""
        words = mapped(path)
        if len(words) < _HEADER_WORDS or words[_WORD_MAGIC] != _MAGIC or len(words) != 8 + 3 * words[_WORD_ROWS]:
            raise LedgerError(f"{path} is not a ledger")
        return cls(path, words)

    @property
    def closed(self) -> bool:
        """Whether the worker has given the session up: nothing more is to be written."""
        return bool(self._words[_WORD_CLOSED])

    def close_session(self) -> None:
        """Tells the capture to write no more."""
        self._words[_WORD_CLOSED] = 1

    @contextmanager
    def writing(self) -> Iterator[bool]:
        """The capture may write to the file for as long as the block runs, unless this is False: the session is closed.

        Said before it looks, so that who closes a session and then sees nobody write has the file to itself.
        """
        self._words[_WORD_WRITING] = 1
        try:
            yield not self.closed
        finally:
            self._words[_WORD_WRITING] = 0

    @property
    def in_writing(self) -> bool:
        """Whether the capture may be writing to the file at this moment."""
        return bool(self._words[_WORD_WRITING])

    @property
    def errno(self) -> int:
        """The `errno` of the first write that failed, or 0."""
        return int(self._words[_WORD_ERRNO])

    @errno.setter
    def errno(self, value: int) -> None:
        if not self._words[_WORD_ERRNO]:
            self._words[_WORD_ERRNO] = value

    def complete(self, row: int) -> bool:
        """Whether every byte of the row is in the file."""
        return bool(self.written[row] == self.lengths[row])

    def progress(self) -> tuple[int, int]:
        """Rows complete, and tokens written."""
        return int((self.written == self.lengths).sum()), int(self.written.sum())


@dataclass(frozen=True)
class Session:
    """What the capture must know to place a shard's bytes.

    Token t of row i lies at `hidden_start + (offsets[i] + t) * hidden_token_bytes` of `file`, and its final hidden
    state at `final_start + (offsets[i] + t) * final_token_bytes` (`final_start` None: not wanted).
    """

    file: str
    ledger: str
    hidden_start: int
    hidden_token_bytes: int
    final_start: int | None
    final_token_bytes: int

    @classmethod
    def at(cls, file: Path, ledger: Ledger, layout: ShardLayout) -> "Session":
        """The session of a file laid out like that."""
        final = layout.tensors.get("final_hidden_state")
        return cls(
            file=str(file.resolve()),
            ledger=str(ledger.path.resolve()),
            hidden_start=layout.tensors["hidden_states"].start,
            hidden_token_bytes=layout.hidden_token_bytes,
            final_start=None if final is None else final.start,
            final_token_bytes=layout.final_token_bytes,
        )


def sessions_dir(run_dir: Path) -> Path:
    """Where session files and ledgers of one engine lie."""
    return run_dir / "sessions"


def publish(run_dir: Path, name: str, session: Session) -> None:
    """Makes a session visible to the capture, whole or not at all."""
    path = sessions_dir(run_dir) / f"{name}.json"
    partial = path.with_suffix(".tmp")
    partial.write_text(json.dumps(asdict(session)))
    os.replace(partial, path)


def load(run_dir: Path, name: str) -> Session | None:
    """The session of that name, or None when the worker has withdrawn it."""
    try:
        return Session(**json.loads((sessions_dir(run_dir) / f"{name}.json").read_text()))
    except FileNotFoundError:
        return None


def withdraw(run_dir: Path, name: str) -> None:
    """Removes a session's files; done twice is done once."""
    for suffix in (".json", ".ledger"):
        (sessions_dir(run_dir) / f"{name}{suffix}").unlink(missing_ok=True)
