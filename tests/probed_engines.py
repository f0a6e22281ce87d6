"""Real engines on this machine's CPU for tests that need no service: launched, probed, stopped."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from worker.capture.report import Attached
from worker.engine import processes
from worker.engine.engine import MARK, Engine
from worker.engine.probe import Probed, probe
from worker.engine.spec import EngineSpec
from worker.models import engine_version

Row = npt.NDArray[np.int32]
CHUNK = 128
"""Tokens of a prefill chunk."""
_LAUNCH_S, _PREFILL_S = 400.0, 300.0


@dataclass(frozen=True)
class Run:
    """What one engine reported and delivered: `lists[i][j]` are the states of row j of list i.

    `serving` and `stopped` are the processes that bore the engine's mark while it served and after it was stopped.
    """

    reports: list[Attached]
    lists: list[list[Probed]]
    serving: list[int]
    stopped: list[int]


def spec(model: Path, tensor_parallel: int = 1, dtype: str = "BF16") -> EngineSpec:
    """An engine that takes rows longer than `CHUNK` in several chunks, and computes in `dtype`."""
    return EngineSpec(
        model_path=str(model),
        dtype=dtype,
        device="cpu",
        tensor_parallel=tensor_parallel,
        engine_version=engine_version(),
        chunked_prefill_size=CHUNK,
        max_total_tokens=8192,
        pool_bytes=64 << 20,
    )


async def run(spec: EngineSpec, directory: Path, lists: Sequence[Sequence[Row]], boundaries: Sequence[int]) -> Run:
    """Prefills each list of rows [S] in an engine of its own at `directory`, and stops the engine."""
    engine = Engine(spec, directory, _PREFILL_S)
    await engine.launch(_LAUNCH_S)
    try:
        found = [await probe(engine, rows, boundaries) for rows in lists]
        serving = processes.marked(MARK, str(directory))
    finally:
        await engine.stop()
    return Run(engine.reports, found, serving, processes.marked(MARK, str(directory)))
