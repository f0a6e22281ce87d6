"""Fixtures of several unit tests: what hangs until the test is over, and a machine that has an NVIDIA driver."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """Lets go at the end of what hangs on it."""
    opened = threading.Event()
    yield opened
    opened.set()


@pytest.fixture
def nvidia_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine looks as one that has the driver."""
    exists = Path.exists
    monkeypatch.setattr(Path, "exists", lambda path: str(path) == "/dev/nvidiactl" or exists(path))
