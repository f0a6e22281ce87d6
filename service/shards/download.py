"""The response that sends a file of the storage: strong ETag, digest, ranges, and constant memory."""

import base64
import os
from collections.abc import AsyncIterator
from pathlib import Path

from fastapi import Request
from fastapi.responses import Response, StreamingResponse
from starlette.concurrency import run_in_threadpool

from service.problems import ProblemError
from service.shards.ranges import Span, matches, span

CHUNK = 1024 * 1024


class FileGoneError(ProblemError):
    """The database knows the file, the storage has it no more."""

    def __init__(self, name: str) -> None:
        remedy = "restore the storage from a backup, or run the job again"
        super().__init__(500, "file_missing", f"{name} is not in the storage", field="storage", remedy=remedy)


def send_file(request: Request, path: Path, sha256: str, media_type: str) -> Response:
    """The answer to a GET or HEAD for the file at `path`, whose content has digest `sha256` (hex).

    Raises `ProblemError` 416 where the range holds no byte, and `FileGoneError`.
    """
    etag = f'"{sha256}"'
    headers = {"ETag": etag, "Accept-Ranges": "bytes", "Cache-Control": "private, no-cache"}
    if matches(request.headers.get("if-none-match"), etag):
        return Response(status_code=304, headers=headers)
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except FileNotFoundError as error:
        raise FileGoneError(path.name) from error
    size = os.fstat(descriptor).st_size
    part = span(request.headers.get("range"), request.headers.get("if-range"), etag, size)
    if part is None or request.method == "HEAD":
        os.close(descriptor)
    if part is None:
        detail = f"the range holds no byte of the {size} there are"
        raise ProblemError(
            416,
            "range_not_satisfiable",
            detail,
            field="Range",
            remedy=f"ask for bytes within 0 to {size - 1}",
            headers={"Content-Range": f"bytes */{size}", "ETag": etag, "Accept-Ranges": "bytes"},
        )
    headers["Repr-Digest"] = f"sha-256=:{base64.b64encode(bytes.fromhex(sha256)).decode()}:"
    headers["Content-Length"] = str(part.stop - part.start)
    headers["Content-Disposition"] = f'attachment; filename="{path.name}"'
    if part.partial:
        headers["Content-Range"] = f"bytes {part.start}-{part.stop - 1}/{size}"
    status = 206 if part.partial else 200
    if request.method == "HEAD":
        return Response(status_code=status, headers=headers, media_type=media_type)
    return _FileResponse(descriptor, part, status, headers, media_type)


class _FileResponse(StreamingResponse):
    """Owns the open file: it is closed however the response ends, even if it never starts."""

    def __init__(self, descriptor: int, part: Span, status: int, headers: dict[str, str], media_type: str) -> None:
        self._file = os.fdopen(descriptor, "rb", buffering=0)
        super().__init__(self._chunks(part), status_code=status, headers=headers, media_type=media_type)

    async def _chunks(self, part: Span) -> AsyncIterator[bytes]:
        try:
            position = part.start
            while position < part.stop:
                wanted = min(CHUNK, part.stop - position)
                chunk = await run_in_threadpool(os.pread, self._file.fileno(), wanted, position)
                if not chunk:
                    raise OSError("the file became shorter while it was sent")
                position += len(chunk)
                yield chunk
        finally:
            self._file.close()
