"""Finding and ending processes, the one place that does either.

An engine's processes are known by their process group, their session and a mark in their environment, never by name:
its schedulers reparent and rename themselves.
"""

import os
import signal
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

_POLL_S = 0.05


def marked(variable: str, value: str, prefix: bool = False) -> list[int]:
    """Processes whose environment has `variable` equal to `value` (or, with `prefix`, a path at or below it)."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        mark = _environment(entry).get(variable)
        if mark is not None and (mark == value or (prefix and mark.startswith(value.rstrip("/") + "/"))):
            found.append(int(entry.name))
    return found


def of_session(session: int) -> list[int]:
    """Processes of that session, the dead but unreaped ones too."""
    numbers = (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit())
    return [pid for pid in numbers if (fields := _stat(pid)) and int(fields[3]) == session]


def alive(pid: int) -> bool:
    """Whether the process runs; a zombie, which only waits to be reaped, does not."""
    fields = _stat(pid)
    return bool(fields) and fields[0] not in ("Z", "X")


def send(pids: list[int], sig: signal.Signals) -> None:
    """Signals each process that is still there."""
    for pid in pids:
        try:
            os.kill(pid, sig)
        except ProcessLookupError:
            continue


def kill_and_verify(pids: list[int], timeout: float) -> list[int]:
    """SIGKILL to each; returns those still alive after `timeout` seconds. Dead children of this process are reaped."""
    send(pids, signal.SIGKILL)
    deadline = time.monotonic() + timeout
    left = [pid for pid in pids if alive(pid)]
    while left and time.monotonic() < deadline:
        time.sleep(_POLL_S)
        left = [pid for pid in left if alive(pid)]
    reap(pid for pid in pids if pid not in left)
    return left


def reap(pids: Iterable[int]) -> None:
    """Takes the exit status of each that is a dead child of this process.

    Only what this process adopted may be named here: the status of a child that it started belongs to whoever did.
    """
    for pid in pids:
        with suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)


def _stat(pid: int) -> list[str]:
    """State, parent, process group, session and so on; nothing where the process is gone."""
    try:
        # The name in parentheses may hold anything; the fields after the last one are plain.
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return []


def _environment(entry: Path) -> dict[str, str]:
    try:
        raw = (entry / "environ").read_bytes()
    except OSError:
        return {}
    pairs = (item.partition(b"=") for item in raw.split(b"\0") if b"=" in item)
    return {name.decode(errors="replace"): value.decode(errors="replace") for name, _, value in pairs}
