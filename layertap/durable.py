"""What makes a change of a folder survive a power cut."""

import os
from pathlib import Path


def sync_folder(folder: Path) -> None:
    """Makes the names in `folder` durable: files that were made, renamed or removed in it. Raises `OSError`."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
