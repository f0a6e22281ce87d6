"""Child processes that never outlive their parent: own sessions, own log files, bounded stops, orphans found and ended.

Linux only: uses prctl for the parent-death signal and for adopting orphans.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_TICK_SECONDS = 0.05
_KILL_SECONDS = 5.0
_libc = ctypes.CDLL(None, use_errno=True)


def adopt_orphans() -> None:
    """Makes this process the parent of whatever its descendants leave behind, so that `end_orphans` finds it."""
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_orphans(spared: frozenset[int] = frozenset()) -> list[int]:
    """SIGKILLs and reaps every child of this process except `spared`, until none is left; returns their process ids."""
    ended: list[int] = []
    deadline = time.monotonic() + _KILL_SECONDS
    while time.monotonic() < deadline:
        children = children_of(os.getpid()) - spared
        if not children:
            break
        for pid in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                if os.waitpid(pid, os.WNOHANG)[0] == pid:
                    ended.append(pid)
        time.sleep(_TICK_SECONDS)
    return ended


def children_of(parent: int) -> frozenset[int]:
    """Process ids of the direct children of `parent`, the dead but unreaped ones too."""
    found = set()
    for entry in os.scandir("/proc"):
        if not entry.name.isdecimal():
            continue
        with contextlib.suppress(OSError):
            stat = Path(entry.path, "stat").read_text(errors="replace")
            # The name in parentheses may hold anything; the fields after the last one are plain.
            if int(stat.rpartition(")")[2].split()[1]) == parent:
                found.add(int(entry.name))
    return frozenset(found)


class Child:
    """One child process in its own session, its output appended to `log`.

    It is sent SIGTERM when this process dies, however that happens. Start it from the main thread: the kernel ties that
    signal to the thread that started it.
    """

    def __init__(self, name: str, command: Sequence[str], log: Path, env: Mapping[str, str] | None = None) -> None:
        self.name, self.log = name, log
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as output:
            self._log_start = output.tell()
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=None if env is None else dict(env),
                preexec_fn=_die_with(os.getpid()),
            )
        self._shown = self._log_start

    @property
    def pid(self) -> int:
        """Its process id, also the id of its process group."""
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs; negative where a signal ended it."""
        return self._process.poll()

    def last_lines(self, count: int = 15) -> list[str]:
        """The end of what it has logged since it was started."""
        return self._log_from(max(self._log_start, self.log.stat().st_size - 64 * 1024))[-count:]

    def new_lines(self) -> list[str]:
        """Whole lines logged since the last call."""
        with self.log.open("rb") as file:
            file.seek(self._shown)
            text = file.read(1024 * 1024)
        whole = text[: text.rfind(b"\n") + 1]
        self._shown += len(whole)
        return whole.decode(errors="replace").splitlines()

    def stop(self, seconds: float, hurry: Callable[[], bool] = lambda: False) -> bool:
        """Ends it: SIGTERM, at most `seconds` of patience (none once `hurry` says so), then SIGKILL to its group.

        Returns whether it ended by itself.
        """
        gracefully = True
        if self.exit_code is None:
            self._process.terminate()
            deadline = time.monotonic() + seconds
            while self.exit_code is None and time.monotonic() < deadline and not hurry():
                time.sleep(_TICK_SECONDS)
            gracefully = self.exit_code is not None
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait(_KILL_SECONDS)
        return gracefully

    def _log_from(self, start: int) -> list[str]:
        with self.log.open("rb") as file:
            file.seek(start)
            return file.read().decode(errors="replace").splitlines()


def _die_with(parent: int) -> Callable[[], None]:
    def in_child() -> None:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)

    return in_child
