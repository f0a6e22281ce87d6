"""Writing at a place in a file, for the writer in the engine and for the worker that lays the file out."""

import os


def pwrite_all(fd: int, data: bytes | memoryview, offset: int) -> None:
    """Writes all of `data` (a view of single bytes) at `offset`, in as many calls as that takes. Raises `OSError`."""
    left = memoryview(data)
    while left:
        done = os.pwrite(fd, left, offset)
        left, offset = left[done:], offset + done
