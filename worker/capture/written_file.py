"""One shard file being filled: where a piece of a row goes, and what the ledger is told once it is there.

The order is the promise: a token counts as written only after the file has it.
"""

import ctypes
import logging
import os
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path

import numpy as np
import numpy.typing as npt

from worker.capture.addressing import Piece
from worker.capture.files import pwrite_all
from worker.capture.session import Ledger, Session

logger = logging.getLogger(__name__)

_WRITE_BACK_BYTES = 4 << 20
_SYNC_FILE_RANGE_WRITE = 2
_LIBC = ctypes.CDLL(None)


class WrittenFile:
    """The file and the ledger of one session. Close it with `close`.

    Raises `OSError` where the file can't be opened, which the ledger is told, too.
    """

    def __init__(self, session: Session) -> None:
        self.session = session
        self.ledger = Ledger.open(Path(session.ledger))
        try:
            self._fd = os.open(session.file, os.O_WRONLY)
        except OSError as error:
            self.ledger.errno = error.errno or -1
            raise
        self._offsets = [0, *accumulate(self.ledger.lengths.tolist())]

    def close(self) -> None:
        """Lets go of the file."""
        os.close(self._fd)

    def write(
        self, pieces: Sequence[Piece], first: int, tensors: Sequence[memoryview], finite: npt.NDArray[np.bool_]
    ) -> tuple[int, int]:
        """Writes the pieces of a run that begins at batch row `first`. Returns tokens, as counted, and bytes.

        `tensors` are the bytes of the run's hidden states [n, K, H] and, if asked for, of its final state [n, H];
        `finite` [n] tells tokens with only finite values. What the file does not take is noted in the ledger. A row
        that counts as done is left as it is, since the file may be on its way out.
        """
        with self.ledger.writing() as may_write:
            left = [piece for piece in pieces if not self.ledger.complete(piece.rid.row)]
            if not may_write or self.ledger.errno or not left:
                return 0, 0
            return self._write(left, first, tensors, finite)

    def _write(
        self, pieces: Sequence[Piece], first: int, tensors: Sequence[memoryview], finite: npt.NDArray[np.bool_]
    ) -> tuple[int, int]:
        nbytes = 0
        try:
            for begin, count, token in self._extents(pieces, first):
                nbytes += self._write_extent(begin, count, token, tensors)
        except OSError as error:
            self.ledger.errno = error.errno or -1
            logger.error("layertap: writing %s failed: %s", self.session.file, error)
            return 0, 0
        tokens = 0
        for piece in pieces:
            begin = piece.start - first
            tokens += self._count(piece, finite[begin : begin + piece.count])
        return tokens, nbytes

    def _extents(self, pieces: Sequence[Piece], first: int) -> Iterator[tuple[int, int, int]]:
        """(first token in the run, tokens, first token in the file) of stretches that are adjacent in both.

        Short rows of a batch mostly are; one write for all of them costs the scheduler one change of threads.
        """
        start = count = token = 0
        for piece in pieces:
            begin, place = piece.start - first, self._offsets[piece.rid.row] + piece.position
            if count and (begin, place) == (start + count, token + count):
                count += piece.count
                continue
            if count:
                yield start, count, token
            start, count, token = begin, piece.count, place
        yield start, count, token

    def _write_extent(self, begin: int, count: int, token: int, tensors: Sequence[memoryview]) -> int:
        session, written = self.session, 0
        starts = (session.hidden_start, session.final_start)
        widths = (session.hidden_token_bytes, session.final_token_bytes)
        for data, start, width in zip(tensors, starts, widths, strict=False):
            if start is not None:
                offset, nbytes = start + token * width, count * width
                pwrite_all(self._fd, data[begin * width : begin * width + nbytes], offset)
                _start_write_back(self._fd, offset, nbytes)
                written += nbytes
        return written

    def _count(self, piece: Piece, finite: npt.NDArray[np.bool_]) -> int:
        ledger, row, bad = self.ledger, piece.rid.row, piece.count - int(np.count_nonzero(finite))
        if piece.position == 0:
            ledger.nonfinite[row] = bad
        elif piece.position == ledger.written[row]:
            ledger.nonfinite[row] += bad
        else:
            logger.error("layertap: row %d of %s has a gap before position %d", row, piece.rid.session, piece.position)
            return 0
        ledger.written[row] = piece.position + piece.count
        return piece.count


def _start_write_back(fd: int, offset: int, nbytes: int) -> None:
    """Has the kernel begin writing at once, so that the fsync of a sealed shard finds little to do. A hint only."""
    if nbytes >= _WRITE_BACK_BYTES:
        _LIBC.sync_file_range(fd, ctypes.c_int64(offset), ctypes.c_int64(nbytes), _SYNC_FILE_RANGE_WRITE)
