"""The writer: one thread that puts states at their final place in the shard and then says so in the ledger.

`pwrite` lets go of the interpreter lock, so the scheduler runs on meanwhile. The order is the promise: a token counts
as written only after the file has it.
"""

import ctypes
import logging
import os
import queue
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from worker.capture.addressing import Piece
from worker.capture.counters import Counters
from worker.capture.files import pwrite_all
from worker.capture.host_copy import Copier, HostCopy
from worker.capture.session import Ledger, Session, load

logger = logging.getLogger(__name__)

_QUEUE_LIMIT = 4096
_WRITE_BACK_BYTES = 4 << 20
_SYNC_FILE_RANGE_WRITE = 2
_PUT_TIMEOUT_S = 600.0


@dataclass
class _Open:
    session: Session
    ledger: Ledger
    fd: int
    offsets: list[int]


class Writer:
    """Owns the writer thread and the open shard files of one engine."""

    def __init__(self, run_dir: Path, copier: Copier, counters: Counters) -> None:
        self._run_dir = run_dir
        self._copier = copier
        self._counters = counters
        self._queue: queue.Queue[tuple[list[Piece], HostCopy] | None] = queue.Queue(_QUEUE_LIMIT)
        self._open: dict[str, _Open] = {}
        self._thread = threading.Thread(target=self._run, name="layertap-writer", daemon=True)

    def start(self) -> None:
        """Starts the thread; it ends with the process, or with `stop`."""
        self._thread.start()

    def submit(self, run: list[Piece], copy: HostCopy) -> None:
        """Queues the states of a run of adjacent pieces. Raises `queue.Full` if no room is made for minutes."""
        with self._counters.waiting():
            self._queue.put((run, copy), timeout=_PUT_TIMEOUT_S)
        self._counters.submitted()

    def stop(self, timeout: float = 60.0) -> None:
        """Writes what is queued and ends the thread."""
        self._queue.put(None, timeout=timeout)
        self._thread.join(timeout)

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            run, copy = item
            try:
                copy.wait()
                with self._counters.writing():
                    self._write_run(run, copy)
            except Exception:
                # The ledger shows these rows unwritten, which the worker acts on; the next run may still succeed.
                logger.exception("layertap: a run of %d pieces was not written", len(run))
            finally:
                self._copier.release(copy)
                self._counters.finished()
                self._close_ended()
        for opened in self._open.values():
            os.close(opened.fd)

    def _write_run(self, run: list[Piece], copy: HostCopy) -> None:
        hidden = _bytes_of(copy.hidden)
        final = None if copy.final is None else _bytes_of(copy.final)
        first = run[0].start
        for piece in run:
            opened = self._opened(piece.rid.session)
            if opened is None or opened.ledger.closed or opened.ledger.errno:
                continue
            begin = piece.start - first
            try:
                self._write_piece(opened, piece, begin, hidden, final)
            except OSError as error:
                opened.ledger.errno = error.errno or -1
                logger.error("layertap: writing %s failed: %s", opened.session.file, error)
                continue
            self._account(opened.ledger, piece, copy.finite[begin : begin + piece.count])

    def _write_piece(
        self, opened: _Open, piece: Piece, begin: int, hidden: memoryview, final: memoryview | None
    ) -> None:
        token = opened.offsets[piece.rid.row] + piece.position
        session = opened.session
        places = [(hidden, session.hidden_start, session.hidden_token_bytes)]
        if final is not None and session.final_start is not None:
            places.append((final, session.final_start, session.final_token_bytes))
        for data, start, width in places:
            offset, nbytes = start + token * width, piece.count * width
            pwrite_all(opened.fd, data[begin * width : begin * width + nbytes], offset)
            _start_write_back(opened.fd, offset, nbytes)
        self._counters.wrote(piece.count, sum(piece.count * width for _, _, width in places))

    def _account(self, ledger: Ledger, piece: Piece, finite: torch.Tensor) -> None:
        row, bad = piece.rid.row, int(piece.count - finite.sum())
        if piece.position == 0:
            ledger.nonfinite[row] = bad
        elif piece.position == ledger.written[row]:
            ledger.nonfinite[row] += bad
        else:
            logger.error("layertap: row %d of %s has a gap before position %d", row, piece.rid.session, piece.position)
            return
        ledger.written[row] = piece.position + piece.count

    def _opened(self, name: str) -> _Open | None:
        opened = self._open.get(name)
        if opened is not None and opened.ledger.closed:
            # A lease that goes on after its requests failed opens a session of the same name anew.
            os.close(self._open.pop(name).fd)
        if name not in self._open:
            session = load(self._run_dir, name)
            if session is None:
                return None
            ledger = Ledger.open(Path(session.ledger))
            fd = os.open(session.file, os.O_WRONLY)
            self._open[name] = _Open(session, ledger, fd, _offsets(ledger.lengths.tolist()))
        return self._open[name]

    def _close_ended(self) -> None:
        for name in [name for name, opened in self._open.items() if opened.ledger.closed]:
            os.close(self._open.pop(name).fd)


def _offsets(lengths: Sequence[int]) -> list[int]:
    offsets, total = [], 0
    for length in lengths:
        offsets.append(total)
        total += length
    return offsets


def _start_write_back(fd: int, offset: int, nbytes: int) -> None:
    """Has the kernel begin writing at once, so that the fsync of a sealed shard finds little to do. A hint only."""
    if nbytes >= _WRITE_BACK_BYTES:
        _LIBC.sync_file_range(fd, ctypes.c_int64(offset), ctypes.c_int64(nbytes), _SYNC_FILE_RANGE_WRITE)


_LIBC = ctypes.CDLL(None)


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    flat: np.ndarray = tensor.contiguous().view(torch.uint8).numpy().reshape(-1)
    return flat.data
