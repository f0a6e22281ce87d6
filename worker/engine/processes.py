"""Finding and ending processes, the one place that does either.

An engine's processes are known by their process group and by a mark in their environment, never by name: its schedulers
reparent and rename themselves.
"""

import os
import signal
import time
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


def alive(pid: int) -> bool:
    """Whether the process runs; a zombie, which only waits to be reaped, does not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in ("Z", "X")


def send(pids: list[int], sig: signal.Signals) -> None:
    """Signals each process that is still there."""
    for pid in pids:
        try:
            os.kill(pid, sig)
        except ProcessLookupError:
            continue


def kill_and_verify(pids: list[int], timeout: float) -> list[int]:
    """SIGKILL to each; returns those still alive after `timeout` seconds."""
    send(pids, signal.SIGKILL)
    deadline = time.monotonic() + timeout
    left = [pid for pid in pids if alive(pid)]
    while left and time.monotonic() < deadline:
        time.sleep(_POLL_S)
        left = [pid for pid in left if alive(pid)]
    return left


def _environment(entry: Path) -> dict[str, str]:
    try:
        raw = (entry / "environ").read_bytes()
    except OSError:
        return {}
    pairs = (item.partition(b"=") for item in raw.split(b"\0") if b"=" in item)
    return {name.decode(errors="replace"): value.decode(errors="replace") for name, _, value in pairs}
