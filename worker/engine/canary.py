"""The canary: a short row through a fresh engine before any real work, which also warms it up.

It proves that the hooks fire, that every asked state arrives, is finite, and that no two boundaries are the same
buffer. An engine that fails it is refused.
"""

import numpy as np

from layertap.schemas.workers import ModelFacts
from worker.engine.client import EngineDownError, EngineRefusedError
from worker.engine.engine import Engine
from worker.engine.probe import ProbeError, probe

_TOKENS = 24


class CanaryError(Exception):
    """The engine serves, but the capture does not deliver; the message says what is wrong."""


async def check(engine: Engine, facts: ModelFacts) -> None:
    """Prefills the canary. Raises `CanaryError`."""
    report = engine.reports[0]
    if (report.num_layers, report.hidden_size) != (facts.num_layers, facts.hidden_size):
        raise CanaryError(
            f"config.json says {facts.num_layers} blocks of hidden size {facts.hidden_size}, "
            f"the engine has {report.num_layers} of {report.hidden_size}"
        )
    if report.dtype != facts.pins.dtype:
        raise CanaryError(f"the job was planned for {facts.pins.dtype}, the engine computes in {report.dtype}")
    tokens = min(_TOKENS, facts.max_row_tokens)
    row = (np.arange(tokens, dtype=np.int64) * 7919 % max(2, facts.vocab_size - 1)).astype(np.int32)
    boundaries = sorted({0, facts.num_layers // 2, facts.num_layers})
    try:
        (states,) = await probe(engine, [row], boundaries)
    except ProbeError as error:
        raise CanaryError(str(error)) from error
    if states.nonfinite:
        raise CanaryError(f"{states.nonfinite} of {tokens} tokens hold a NaN or an infinity")
    for second in range(len(boundaries)):
        for first in range(second):
            if np.array_equal(states.hidden_states[:, first], states.hidden_states[:, second]):
                raise CanaryError(
                    f"boundaries {boundaries[first]} and {boundaries[second]} are the same values: "
                    "the capture reads one buffer twice"
                )


async def check_unpatched(engine: Engine) -> None:
    """Prefills a row that nobody captures: is the engine healthy without the patch? Raises `CanaryError`."""
    row = np.arange(_TOKENS, dtype=np.int32) % 2
    try:
        (aborted,) = await engine.client.prefill(["baseline"], [row])
    except (EngineDownError, EngineRefusedError) as error:
        raise CanaryError(f"the unpatched engine could not prefill {len(row)} tokens: {error}") from error
    if aborted is not None:
        raise CanaryError(f"the unpatched engine aborted {len(row)} tokens: {aborted}")
