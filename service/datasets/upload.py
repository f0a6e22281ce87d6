"""One arriving upload: written, hashed and judged line by line as it comes, in bounded memory.

Until `publish` it is a locked file in the storage's `uploads` folder, then a marked folder until `published`; whatever
ends it earlier leaves nothing behind, at the latest after the next start.
"""

import hashlib
import json
import os
import tempfile
from collections.abc import Iterator
from types import TracebackType
from typing import Self

from layertap.rows import MAX_LINE_BYTES, RowError, parse_row
from layertap.storage_paths import dataset_dir, dataset_file
from service.storage import UPLOADING, UPLOADS, Storage, try_lock

MAX_STORED_ERRORS = 100_000
MAX_REASON = 500
FIRST_ERRORS = 20

BadLine = tuple[int, str, str]
"""Row id, code, reason."""


def part_file(dataset: str) -> str:
    """Where the bytes of an upload lie while they arrive."""
    return f"{UPLOADS}/{dataset}.part"


class Upload:
    """The upload of data set `dataset`. A context manager: leaving it removes what was not published."""

    def __init__(self, storage: Storage, dataset: str) -> None:
        self.dataset = dataset
        self.bytes = self.rows = self.bad_rows = 0
        self.first_errors: list[BadLine] = []
        self._storage = storage
        self._path = storage.path(part_file(dataset))
        # Closed by `close`, which also frees the lock that tells other processes that this upload lives.
        self._file = self._path.open("xb")
        try_lock(self._file)
        self._errors = tempfile.TemporaryFile("w+", encoding="utf-8", dir=self._path.parent)  # noqa: SIM115
        self._hash = hashlib.sha256()
        self._line_number = 0
        self._line: list[bytes] = []
        self._line_bytes = 0

    @property
    def sha256(self) -> str:
        """Digest of the bytes so far."""
        return self._hash.hexdigest()

    def feed(self, data: bytes) -> None:
        """Take the next bytes. Raises `OSError` where they can't be written."""
        self._file.write(data)
        self._hash.update(data)
        self.bytes += len(data)
        start = 0
        while (end := data.find(b"\n", start)) >= 0:
            self._extend(data[start:end])
            self._end_line()
            start = end + 1
        self._extend(data[start:])

    def finish(self) -> None:
        """Take the last line, which may lack its newline, and make the file durable."""
        if self._line_bytes:
            self._end_line()
        self._file.flush()
        os.fsync(self._file.fileno())

    def publish(self) -> None:
        """Move the file to the data set's place, in a folder that is marked until `published`."""
        self._storage.mark(dataset_dir(self.dataset), UPLOADING)
        self._storage.move(self._path, dataset_file(self.dataset))

    def published(self) -> None:
        """The data set is complete: its folder loses the marker."""
        self._storage.unmark(dataset_dir(self.dataset))

    def withdraw(self) -> None:
        """Remove what `publish` made; nothing happens where it made nothing."""
        self._storage.remove_folder(dataset_dir(self.dataset))

    def errors(self) -> Iterator[BadLine]:
        """The refused lines, ascending, at most `MAX_STORED_ERRORS`."""
        self._errors.seek(0)
        for line in self._errors:
            row_id, code, reason = json.loads(line)
            yield row_id, code, reason

    def close(self) -> None:
        """Free the files; an upload that was not published is gone."""
        self._path.unlink(missing_ok=True)
        self._file.close()
        self._errors.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _extend(self, part: bytes) -> None:
        self._line_bytes += len(part)
        if self._line_bytes > MAX_LINE_BYTES:
            self._line.clear()
        elif part:
            self._line.append(part)

    def _end_line(self) -> None:
        row_id, self._line_number = self._line_number, self._line_number + 1
        line, too_long = b"".join(self._line), self._line_bytes > MAX_LINE_BYTES
        self._line.clear()
        self._line_bytes = 0
        if too_long:
            self._refuse(row_id, "line_too_long", f"longer than {MAX_LINE_BYTES} bytes")
        elif line.strip():
            try:
                parse_row(line)
            except RowError as error:
                self._refuse(row_id, error.code, error.reason)
            else:
                self.rows += 1

    def _refuse(self, row_id: int, code: str, reason: str) -> None:
        self.bad_rows += 1
        bad = (row_id, code, reason[:MAX_REASON].replace("\x00", "\N{REPLACEMENT CHARACTER}"))
        if len(self.first_errors) < FIRST_ERRORS:
            self.first_errors.append(bad)
        if self.bad_rows <= MAX_STORED_ERRORS:
            self._errors.write(json.dumps(bad) + "\n")
