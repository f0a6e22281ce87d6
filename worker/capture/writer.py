"""The writer: puts states at their final place in the shard and then says so in the ledger.

One thread takes the runs in order and keeps the ledger; the bytes of a run go out on several, since one alone fills
files at a gigabyte or two a second. `pwrite` lets go of the interpreter lock, so the scheduler runs on meanwhile. The
order is the promise: a token counts as written only after the file has it.
"""

import ctypes
import logging
import os
import queue
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch

from worker.capture.addressing import Piece
from worker.capture.files import pwrite_all
from worker.capture.host_copy import Copier, HostCopy
from worker.capture.session import Ledger, Session, load

logger = logging.getLogger(__name__)

_THREADS = 4
_SLICE_BYTES = 8 << 20
"""What one thread writes at a time; a run of no more is written without handing it on."""
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
    """Owns the writing threads and the open shard files of one engine."""

    def __init__(self, run_dir: Path, copier: Copier) -> None:
        self._run_dir = run_dir
        self._copier = copier
        self._queue: queue.Queue[tuple[list[Piece], HostCopy] | None] = queue.Queue(_QUEUE_LIMIT)
        self._open: dict[str, _Open] = {}
        self._thread = threading.Thread(target=self._run, name="layertap-writer", daemon=True)
        self._threads = ThreadPoolExecutor(_THREADS, "layertap-write")

    def start(self) -> None:
        """Starts the thread; it ends with the process, or with `stop`."""
        self._thread.start()

    def submit(self, run: list[Piece], copy: HostCopy) -> None:
        """Queues the states of a run of adjacent pieces. Raises `queue.Full` if no room is made for minutes."""
        self._queue.put((run, copy), timeout=_PUT_TIMEOUT_S)

    def stop(self, timeout: float = 60.0) -> None:
        """Writes what is queued and ends the thread."""
        self._queue.put(None, timeout=timeout)
        self._thread.join(timeout)
        self._threads.shutdown()

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            run, copy = item
            try:
                copy.wait()
                self._write_run(run, copy)
            except Exception:
                # The ledger shows these rows unwritten, which the worker acts on; the next run may still succeed.
                logger.exception("layertap: a run of %d pieces was not written", len(run))
            finally:
                self._copier.release(copy)
                self._close_ended()
        for opened in self._open.values():
            os.close(opened.fd)

    def _write_run(self, run: list[Piece], copy: HostCopy) -> None:
        tensors = [_bytes_of(tensor) for tensor in (copy.hidden, copy.final) if tensor is not None]
        first = run[0].start
        # Each session once: a file must not be closed, to be opened anew, between two pieces of a run.
        sessions = {name: self._writable(name) for name in {piece.rid.session for piece in run}}
        placed = [(piece, opened) for piece in run if (opened := sessions[piece.rid.session]) is not None]
        writes = [
            partial(_write, opened, data, offset)
            for piece, opened in placed
            for data, offset in _places(opened, piece, piece.start - first, tensors)
        ]
        if sum(len(data) for data in tensors) <= _SLICE_BYTES:
            for write in writes:
                write()
        else:
            # All of them, or the memory that they read could be given back too early.
            for done in wait([self._threads.submit(write) for write in writes]).done:
                done.result()
        for piece, opened in placed:
            begin = piece.start - first
            if not opened.ledger.errno:
                self._account(opened.ledger, piece, copy.finite[begin : begin + piece.count])

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

    def _writable(self, name: str) -> _Open | None:
        opened = self._opened(name)
        return None if opened is None or opened.ledger.closed or opened.ledger.errno else opened

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


def _places(opened: _Open, piece: Piece, begin: int, tensors: list[memoryview]) -> Iterator[tuple[memoryview, int]]:
    """Where in the file the bytes of a piece go, in slices; `tensors` hold the hidden states, then the final state."""
    token, session = opened.offsets[piece.rid.row] + piece.position, opened.session
    starts = (session.hidden_start, session.final_start)
    widths = (session.hidden_token_bytes, session.final_token_bytes)
    for data, start, width in zip(tensors, starts, widths, strict=False):
        if start is None:
            continue
        for done in range(0, piece.count * width, _SLICE_BYTES):
            end = min(done + _SLICE_BYTES, piece.count * width)
            yield data[begin * width + done : begin * width + end], start + token * width + done


def _write(opened: _Open, data: memoryview, offset: int) -> None:
    try:
        pwrite_all(opened.fd, data, offset)
    except OSError as error:
        opened.ledger.errno = error.errno or -1
        logger.error("layertap: writing %s failed: %s", opened.session.file, error)
        return
    _start_write_back(opened.fd, offset, len(data))


def _start_write_back(fd: int, offset: int, nbytes: int) -> None:
    """Has the kernel begin writing at once, so that the fsync of a sealed shard finds little to do. A hint only."""
    if nbytes >= _WRITE_BACK_BYTES:
        _LIBC.sync_file_range(fd, ctypes.c_int64(offset), ctypes.c_int64(nbytes), _SYNC_FILE_RANGE_WRITE)


_LIBC = ctypes.CDLL(None)


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    flat: np.ndarray = tensor.contiguous().view(torch.uint8).numpy().reshape(-1)
    return flat.data
