"""Layertap for those who use it: `layertap.open(dir)` reads pulled shards, `layertap.Client` talks to the service.

Importing this package loads neither of the two, nor torch: each comes with its first use.
"""

from importlib.metadata import version as _version
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from os import PathLike

    from layertap.client import Client
    from layertap.reader import Extraction

__all__ = ["Client", "__version__", "open"]

__version__ = _version("layertap")


def open(directory: "str | PathLike[str]") -> "Extraction":
    """The pulled job in `directory`, ready to be read row by row; see `layertap.reader.Extraction`.

    Reads the manifest only; shards are opened as rows are asked for. Raises `layertap.errors.FormatError` when the
    folder holds no manifest, or one of another format version.
    """
    from layertap.reader import Extraction

    return Extraction(directory)


def __getattr__(name: str) -> object:
    if name == "Client":
        from layertap.client import Client

        return Client
    raise AttributeError(f"module 'layertap' has no attribute {name!r}")
