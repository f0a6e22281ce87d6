"""The writer: threads that put states at their final place, each file by one of them, and so in order.

Two threads gain nothing on one file, whose lock a write holds; shards are prefilled several at a time, and their files
fill side by side. `pwrite` lets go of the interpreter lock, so the scheduler runs on meanwhile.
"""

import logging
import queue
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from worker.capture.addressing import Piece
from worker.capture.counters import WRITERS, Counters, writer_of
from worker.capture.host_copy import Copier, HostCopy
from worker.capture.session import load
from worker.capture.written_file import WrittenFile

logger = logging.getLogger(__name__)

_QUEUE_LIMIT = 4096
_PUT_TIMEOUT_S = 600.0
_LOOK_SECONDS = 5.0
"""How long a file that is done with may stay open, and so keep its room on disk, where no other follows."""


class _Run:
    """Adjacent pieces and their copy, which is given back when each of `parts` threads is through with it."""

    def __init__(self, first: int, copy: HostCopy, parts: int, copier: Copier) -> None:
        self.first = first
        self.copy = copy
        self._left = parts
        self._copier = copier
        self._lock = threading.Lock()

    def part_done(self) -> None:
        with self._lock:
            self._left -= 1
            last = self._left == 0
        if last:
            self._copier.release(self.copy)


_Item = tuple[_Run, list[Piece]]


class Writer:
    """Owns the writing threads of one engine."""

    def __init__(self, run_dir: Path, copier: Copier, counters: Counters) -> None:
        self._copier = copier
        self._counters = counters
        self._threads = [_Thread(run_dir, index, counters) for index in range(WRITERS)]

    def start(self) -> None:
        """Starts the threads; they end with the process, or with `stop`."""
        for thread in self._threads:
            thread.start()

    def submit(self, run: Sequence[Piece], copy: HostCopy) -> None:
        """Queues the states of a run of adjacent pieces. Raises `queue.Full` if no room is made for minutes."""
        sessions: dict[str, list[Piece]] = {}
        for piece in run:
            sessions.setdefault(piece.rid.session, []).append(piece)
        whole = _Run(run[0].start, copy, len(sessions), self._copier)
        with self._counters.waiting():
            for name, pieces in sessions.items():
                index = writer_of(name)
                self._threads[index].queue.put((whole, pieces), timeout=_PUT_TIMEOUT_S)
                self._counters.given(index)

    def stop(self, timeout: float = 60.0) -> None:
        """Writes what is queued and ends the threads."""
        for thread in self._threads:
            thread.queue.put(None, timeout=timeout)
        for thread in self._threads:
            thread.join(timeout)


class _Thread(threading.Thread):
    """Fills the files of the sessions that are its own, in the order in which their pieces come."""

    def __init__(self, run_dir: Path, index: int, counters: Counters) -> None:
        super().__init__(name=f"layertap-writer-{index}", daemon=True)
        self._index = index
        self._counters = counters
        self.queue: queue.Queue[_Item | None] = queue.Queue(_QUEUE_LIMIT)
        self._run_dir = run_dir
        self._open: dict[str, WrittenFile] = {}

    def run(self) -> None:
        while True:
            try:
                item = self.queue.get(timeout=_LOOK_SECONDS if self._open else None)
            except queue.Empty:
                self._close_ended()
                continue
            if item is None:
                break
            self._write(*item)
        for name in list(self._open):
            self._close(name)

    def _write(self, run: _Run, pieces: list[Piece]) -> None:
        copy = run.copy
        try:
            copy.wait()
            file = self._opened(pieces[0].rid.session)
            if file is not None:
                tensors = [_bytes_of(tensor) for tensor in (copy.hidden, copy.final) if tensor is not None]
                with self._counters.writing(self._index):
                    written = file.write(pieces, run.first, tensors, copy.finite.numpy())
                self._counters.wrote(*written)
        except Exception:
            # The ledger shows these rows unwritten, which the worker acts on; the next run may still succeed.
            logger.exception("layertap: %d pieces were not written", len(pieces))
        finally:
            run.part_done()
            self._close_ended()
            self._counters.done(self._index)

    def _opened(self, name: str) -> WrittenFile | None:
        # A lease that goes on after its requests failed opens a session of the same name anew.
        self._close_ended()
        if name not in self._open:
            session = load(self._run_dir, name)
            if session is None:
                return None
            self._open[name] = WrittenFile(session)
        return self._open[name]

    def _close_ended(self) -> None:
        for name in [name for name, file in self._open.items() if file.ledger.closed]:
            self._close(name)

    def _close(self, name: str) -> None:
        try:
            self._open.pop(name).close()
        except OSError:
            # It is let go of all the same. What the disk did not take, the worker's own fsync of the file finds out.
            logger.exception("layertap: closing the file of %s failed", name)


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    flat: np.ndarray = tensor.contiguous().view(torch.uint8).numpy().reshape(-1)
    return flat.data
