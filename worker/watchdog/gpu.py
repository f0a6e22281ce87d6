"""What the driver says of the GPUs: memory in use, and how busy they are."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pynvml


@dataclass(frozen=True)
class GpuUse:
    """Some GPUs together, whoever uses them; `busy` is the per cent of the busiest, None where none says."""

    bytes_used: int
    busy: int | None


def gpu_use(names: Sequence[str]) -> GpuUse | None:
    """What the GPUs of these names hold and do; None where there is none of them, or no driver to ask.

    Names are numbers, in the driver's order, or beginnings of UUIDs, as CUDA_VISIBLE_DEVICES takes them.
    """
    with _driver() as count:
        return _use(names, count)


def gpu_bytes_used(names: Sequence[str]) -> int | None:
    """Bytes in use on these GPUs together; None as `gpu_use`."""
    use = gpu_use(names)
    return None if use is None else use.bytes_used


def gpu_lines() -> list[str]:
    """One line for each GPU of the machine: memory in use and utilisation."""
    with _driver() as count:
        uses = [(i, _use([str(i)], count)) for i in range(count)]
    return [
        f"GPU {i}: {use.bytes_used >> 20} MiB in use, " + ("load unknown" if use.busy is None else f"{use.busy} % busy")
        for i, use in uses
        if use is not None
    ]


@contextmanager
def _driver() -> Iterator[int]:
    """The driver's library for the time of the block, and how many GPUs it has; none where it can't be asked."""
    if not Path("/dev/nvidiactl").exists():
        yield 0
        return
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        yield 0
        return
    try:
        yield _count()
    finally:
        with suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()


def _count() -> int:
    try:
        return int(pynvml.nvmlDeviceGetCount())
    except pynvml.NVMLError:
        return 0


def _use(names: Sequence[str], count: int) -> GpuUse | None:
    try:
        handles = [handle for name in names if (handle := _find(name, count)) is not None]
        used = [int(pynvml.nvmlDeviceGetMemoryInfo(handle).used) for handle in handles]
    except pynvml.NVMLError:
        return None
    if not handles:
        return None
    return GpuUse(sum(used), max((busy for handle in handles if (busy := _busy(handle)) is not None), default=None))


def _find(name: str, count: int) -> Any | None:
    if name.isdecimal():
        return pynvml.nvmlDeviceGetHandleByIndex(int(name)) if int(name) < count else None
    if name.startswith("MIG-"):
        return pynvml.nvmlDeviceGetHandleByUUID(name)
    handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(count)]
    return next((handle for handle in handles if str(pynvml.nvmlDeviceGetUUID(handle)).startswith(name)), None)


def _busy(handle: Any) -> int | None:
    """Per cent; a part of a split GPU (MIG) does not say."""
    try:
        return int(pynvml.nvmlDeviceGetUtilizationRates(handle).gpu)
    except pynvml.NVMLError:
        return None
