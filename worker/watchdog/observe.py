"""Looking at an engine from outside: what its processes are, have done, and hold; and its port."""

import os
import socket
from dataclasses import dataclass
from pathlib import Path

from worker.engine import processes

_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")
_CONNECT_S = 1.0


@dataclass(frozen=True)
class Seen:
    """One process: its command, scheduler state, threads, resident bytes, CPU seconds, bytes read from disk."""

    pid: int
    command: str
    state: str
    threads: int
    rss_bytes: int
    cpu_seconds: float
    read_bytes: int
    wait_channel: str


def look(pid: int) -> Seen | None:
    """The process as it is now, or None when it has gone or is a zombie."""
    folder = Path(f"/proc/{pid}")
    try:
        name, _, rest = (folder / "stat").read_text().rpartition(")")
        fields = rest.split()
        if fields[0] in ("Z", "X"):
            return None
        words = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        return Seen(
            pid=pid,
            command=words or name.partition("(")[2],
            state=fields[0],
            threads=int(fields[17]),
            rss_bytes=int(fields[21]) * _PAGE,
            cpu_seconds=(int(fields[11]) + int(fields[12])) / _TICKS,
            read_bytes=_read_bytes(folder),
            wait_channel=_text(folder / "wchan"),
        )
    except (OSError, IndexError, ValueError):
        return None


def engine_processes(directory: Path, server: int | None) -> list[Seen]:
    """Every living process of the engine in `directory`: those that bear its mark, and the server itself."""
    pids = set(processes.marked("LAYERTAP_ENGINE_DIR", str(directory)))
    if server is not None:
        pids.add(server)
    return [seen for pid in sorted(pids) if (seen := look(pid)) is not None]


def port_open(port: int) -> bool:
    """Whether the loopback port takes a connection. The kernel answers for a process that is only busy."""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=_CONNECT_S):
            return True
    except OSError:
        return False


def _read_bytes(folder: Path) -> int:
    for line in _text(folder / "io").splitlines():
        if line.startswith("read_bytes:"):
            return int(line.partition(":")[2])
    return 0


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""
