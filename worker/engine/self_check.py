"""The self-check of a fresh engine: a few short rows, read at every place at once, before any real work.

Gathers what `judgement` weighs. An engine that fails is refused.
"""

import numpy as np
import numpy.typing as npt

from layertap.schemas.workers import ModelFacts
from worker.capture import sources
from worker.capture.rid import Reading
from worker.engine.client import EngineDownError, EngineRefusedError
from worker.engine.engine import Engine
from worker.engine.judgement import Array, CheckError, Judgement, Readings, confirm, judge
from worker.engine.probe import Probed, ProbeError, probe
from worker.engine.spec import Strategy

_LENGTHS = (16, 16, 7)
_ALONE = 1
"""The row that also runs alone: not the first, so that a swap of rows shows."""


READINGS = {"hooks": Reading.HOOKS, "collect": Reading.COLLECT}
"""How a job's rows are read, by strategy."""


async def check(engine: Engine, facts: ModelFacts) -> Judgement:
    """Whether and how this engine's states can be trusted. Raises `CheckError`."""
    _compare_with_plan(engine, facts)
    rows = _rows(facts)
    try:
        readings = await _read(engine, rows)
        judgement = judge(readings)
        alone = await _read_alone(engine, rows[_ALONE], judgement.strategy)
        return confirm(judgement, readings, _ALONE, alone)
    except ProbeError as error:
        raise CheckError(str(error)) from error


async def check_unpatched(engine: Engine) -> None:
    """Prefills a row that nobody captures: is the engine healthy without the patch? Raises `CheckError`."""
    row = np.arange(_LENGTHS[0], dtype=np.int32) % 2
    try:
        await engine.client.prefill_all(["baseline"], [row])
    except (EngineDownError, EngineRefusedError) as error:
        raise CheckError(f"the unpatched engine could not prefill {len(row)} tokens: {error}") from error


def _compare_with_plan(engine: Engine, facts: ModelFacts) -> None:
    report = engine.reports[0]
    if (report.num_layers, report.hidden_size) != (facts.num_layers, facts.hidden_size):
        raise CheckError(
            f"config.json says {facts.num_layers} blocks of hidden size {facts.hidden_size}, "
            f"the engine has {report.num_layers} of {report.hidden_size}"
        )
    if report.dtype != facts.pins.dtype:
        raise CheckError(f"the job was planned for {facts.pins.dtype}, the engine computes in {report.dtype}")


def _rows(facts: ModelFacts) -> list[npt.NDArray[np.int32]]:
    """Rows of unlike tokens, two of them of one length: swapped, they fit each other's place."""
    lengths = [min(length, facts.max_row_tokens) for length in _LENGTHS]
    ids = (np.arange(sum(lengths), dtype=np.int64) * 7919 + 13) % max(2, facts.vocab_size - 1)
    return np.split(ids.astype(np.int32), np.cumsum(lengths)[:-1].tolist())


async def _read(engine: Engine, rows: list[npt.NDArray[np.int32]]) -> Readings:
    report = engine.reports[0]
    order = sources.of_check(report.num_layers, report.strategy == "hooks", report.collects)
    every = await probe(engine, rows, range(len(order)), Reading.CHECK)
    _refuse_nonfinite(every)
    hidden = np.concatenate([row.hidden_states for row in every]).astype(np.float32)
    return Readings(
        layers=report.num_layers,
        lengths=[len(row) for row in rows],
        states={state: hidden[:, place] for place, state in enumerate(order)},
        final=np.concatenate([row.final_hidden_state for row in every]).astype(np.float32),
        head=[row.head for row in every],
        engine=[row.log_probabilities for row in every],
    )


async def _read_alone(engine: Engine, row: npt.NDArray[np.int32], strategy: Strategy) -> dict[int, Array]:
    boundaries = range(engine.reports[0].num_layers + 1)
    found = await probe(engine, [row], boundaries, READINGS[strategy])
    _refuse_nonfinite(found)
    return {k: found[0].hidden_states[:, k].astype(np.float32) for k in boundaries}


def _refuse_nonfinite(rows: list[Probed]) -> None:
    bad = sum(row.nonfinite for row in rows)
    if bad:
        raise CheckError(f"{bad} tokens hold a NaN or an infinity")
