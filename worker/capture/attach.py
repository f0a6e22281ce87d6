"""Puts the capture on a loaded model and reports in: what every attachment point calls.

An attachment point may act only where `LAYERTAP_ENGINE_DIR` is set and `LAYERTAP_INSTALLER` names it, so other uses of
the same installation are left alone and no engine is captured twice. Without a rank's report the worker holds the
engine to be unpatched.
"""

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from worker.capture import addressing, scattered
from worker.capture.addressing import Piece
from worker.capture.counters import Counters
from worker.capture.head import Head
from worker.capture.host_copy import Copier
from worker.capture.installed import ENGINE_DIR_VARIABLE, active, show_stacks_on_signal
from worker.capture.model_capture import ModelCapture
from worker.capture.report import Attached, write_log_probabilities, write_report
from worker.capture.stack import UnsupportedModelError, find_stack
from worker.capture.writer import Writer

logger = logging.getLogger(__name__)

POOL_VARIABLE = "LAYERTAP_POOL_BYTES"
STRATEGY_VARIABLE = "LAYERTAP_STRATEGY"
_SAFETENSORS_DTYPE = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}


def attach_from(installer: str, runner: Any) -> None:
    """Attaches to a model runner that has loaded its model, if this process is to be captured by that installer.

    Draft models are left alone. Raises if the model cannot be captured.
    """
    if active(installer) and not getattr(runner, "is_draft_worker", False):
        attach(runner, Path(os.environ[ENGINE_DIR_VARIABLE]), installer)


def attach(runner: Any, run_dir: Path, installer: str) -> None:
    """Puts the capture on a loaded model runner and reports in. Raises if the model cannot be captured."""
    show_stacks_on_signal()
    rank, size = _parallel(runner)
    _refuse_scattered(runner.server_args)
    stack = find_stack(runner.model)
    strategy = os.environ.get(STRATEGY_VARIABLE, "hooks")
    sink = _Sink(run_dir, runner) if rank == 0 else None
    capture = ModelCapture(stack, Head(runner.model), sink, hooks=strategy == "hooks")
    capture.attach()
    report = Attached(
        pid=os.getpid(),
        tp_rank=rank,
        tp_size=size,
        architecture=type(runner.model).__name__,
        num_layers=len(stack.blocks),
        hidden_size=int(runner.model_config.hidden_size),
        dtype=_SAFETENSORS_DTYPE[runner.model_config.dtype],
        strategy=strategy,
        collects=capture.collects,
        installer=installer,
    )
    write_report(run_dir, report)
    logger.info("layertap: capture attached to %s on rank %d", report.architecture, rank)


def _refuse_scattered(server_args: Any) -> None:
    """Raises `UnsupportedModelError` where no one rank sees every row at every boundary."""
    why = scattered.refusal({name: getattr(server_args, name, None) for name in scattered.NAMES})
    if why is not None:
        raise UnsupportedModelError(why)


def _parallel(runner: Any) -> tuple[int, int]:
    try:
        from sglang.srt.runtime_context import get_parallel
    except ImportError:
        return int(runner.tp_rank), int(runner.tp_size)
    parallel = get_parallel()
    return int(parallel.tp_rank), int(parallel.tp_size)


class _Sink:
    """Hands each forward's states to the copier and the writer."""

    def __init__(self, run_dir: Path, runner: Any) -> None:
        self._run_dir = run_dir
        counters = Counters.create(run_dir)
        self._copier = Copier(torch.device(runner.device), int(os.environ[POOL_VARIABLE]), counters)
        self._writer = Writer(run_dir, self._copier, counters)
        self._writer.start()

    def states(
        self, piece_states: Callable[[Piece], list[torch.Tensor]], found: list[Piece], final: torch.Tensor | None
    ) -> None:
        """Starts the copies of each run of neighbouring pieces, in order, and queues them for the writer."""
        for run in addressing.runs(found):
            states, wanted = piece_states(run[0]), final if run[0].rid.final else None
            most_rows = self._copier.most_rows(states, wanted)
            for part in [run] if most_rows is None else addressing.cut(run, most_rows):
                copy = self._copier.copy(states, wanted, part[0].start, part[-1].start + part[-1].count)
                self._writer.submit(part, copy)

    def log_probabilities(self, piece: Piece, found: list[float] | None) -> None:
        """Leaves them where the worker looks, once the row's states are on their way."""
        write_log_probabilities(self._run_dir, piece.rid.session, piece.rid.row, found)
