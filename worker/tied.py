"""Runs a command that dies with the worker: `python -m worker.tied COMMAND …`.

The kernel sends SIGKILL to the command once the process that started it is gone, however that ended. Linux only.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def tie_to_parent(parent: int) -> None:
    """This process is killed when its parent, process id `parent`, ends. Exits at once if that is gone already."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:
        sys.exit(1)


def command(parent: int, argv: list[str]) -> list[str]:
    """The command line that runs `argv` tied to `parent`."""
    return [sys.executable, "-m", "worker.tied", str(parent), *argv]


if __name__ == "__main__":
    tie_to_parent(int(sys.argv[1]))
    os.execvp(sys.argv[2], sys.argv[2:])
