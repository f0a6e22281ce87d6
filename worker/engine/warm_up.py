"""The first forwards of a fresh engine: kernels compile, and how fast plain prefill is here gets known.

The rows are nobody's: the capture leaves them alone.
"""

import time

import numpy as np

from worker.engine.client import EngineDownError, EngineRefusedError
from worker.engine.engine import Engine
from worker.engine.judgement import CheckError
from worker.engine.spec import chunk_tokens

_ROW_TOKENS = 256
_ROUNDS = 2


async def warm_up(engine: Engine, vocab_size: int, max_row_tokens: int) -> float:
    """Prefills one chunk of rows twice; tokens a second of the second time. Raises `CheckError`."""
    length = min(_ROW_TOKENS, max_row_tokens)
    count = max(1, chunk_tokens(engine.spec.chunked_prefill_size, engine.spec.device) // length)
    ids = np.arange(count * length, dtype=np.int64) * 7919 % max(2, vocab_size - 1)
    rows = np.split(ids.astype(np.int32), count)
    speed = 0.0
    for turn in range(_ROUNDS):
        began = time.perf_counter()
        try:
            await engine.client.prefill_all([f"warm-up-{turn}-{i:05d}." for i in range(count)], rows)
        except (EngineDownError, EngineRefusedError) as error:
            raise CheckError(f"the engine could not prefill its first {count * length} tokens: {error}") from error
        speed = count * length / (time.perf_counter() - began)
    return speed
