"""int64 words in a file that several processes map: how the capture and the worker see each other's figures."""

import mmap
from pathlib import Path

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.int64]


def mapped(path: Path) -> Words:
    """A file's words, shared with whoever else maps it. Raises `OSError`, and `ValueError` where they are not whole."""
    with path.open("r+b") as file:
        return np.frombuffer(mmap.mmap(file.fileno(), 0), dtype=np.int64)
