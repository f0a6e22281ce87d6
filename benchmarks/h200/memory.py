"""What engine and benchmark hold while a run goes on: GPU memory, and the resident memory of every process."""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

from worker.engine.engine import Engine
from worker.watchdog.gpu import gpu_use
from worker.watchdog.observe import engine_processes, look

Look = tuple[float, int, int, int]
"""Seconds since the beginning, MiB in use on its GPU, MiB resident in all processes, per cent that the GPU is busy."""


@asynccontextmanager
async def watched(engine: Engine, every: float, keep: Callable[[list[Look]], None]) -> AsyncIterator[list[Look]]:
    """A list that grows by one look each `every` seconds while the block runs, and is kept each time."""
    looks: list[Look] = []
    watching = asyncio.create_task(_watch(engine, every, looks, keep))
    try:
        yield looks
    finally:
        watching.cancel()
        with suppress(asyncio.CancelledError):
            await watching


async def _watch(engine: Engine, every: float, looks: list[Look], keep: Callable[[list[Look]], None]) -> None:
    began = time.monotonic()
    while True:
        gpu = await asyncio.to_thread(gpu_use, engine.gpus)
        seen = [*await asyncio.to_thread(engine_processes, engine.directory, engine.pid), look(os.getpid())]
        resident = sum(process.rss_bytes for process in seen if process is not None)
        used, busy = (0, 0) if gpu is None else (gpu.bytes_used, gpu.busy or 0)
        looks.append((round(time.monotonic() - began, 1), used >> 20, resident >> 20, busy))
        keep(looks)
        await asyncio.sleep(every)
