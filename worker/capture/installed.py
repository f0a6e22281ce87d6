"""Which attachment point may act in this process. Imports nothing heavy: it is asked in every process of an engine."""

import faulthandler
import os
import signal

ENGINE_DIR_VARIABLE = "LAYERTAP_ENGINE_DIR"
INSTALLER_VARIABLE = "LAYERTAP_INSTALLER"
"""Names the one attachment point that may act; the others stay inert."""


def active(installer: str) -> bool:
    """Whether a worker started this engine, and patched it with that installer."""
    return bool(os.environ.get(ENGINE_DIR_VARIABLE)) and os.environ.get(INSTALLER_VARIABLE) == installer


def show_stacks_on_signal() -> None:
    """Has SIGUSR1 write every thread's stack to the log: evidence where the kernel lets no debugger look."""
    faulthandler.register(signal.SIGUSR1, all_threads=True, chain=False)
