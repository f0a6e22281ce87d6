"""The most memory that a process held, for tests that bound it."""

from pathlib import Path


def peak_memory(pid: int) -> int:
    """The most resident memory of the process since `forget_peak`, in bytes."""
    status = Path(f"/proc/{pid}/status").read_text()
    return 1024 * int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1])


def forget_peak(pid: int) -> int:
    """Starts a new measurement; the resident memory now, in bytes."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")
    return peak_memory(pid)
