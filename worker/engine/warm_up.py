"""The first forwards of a fresh engine: kernels compile, and how fast plain prefill is here gets known.

The rows are nobody's: the capture leaves them alone. Their length is fixed, so the speed is a rough figure: longer rows
are slower a token, for their attention.
"""

import asyncio
import time

import numpy as np
import numpy.typing as npt

from worker.engine.client import EngineDownError, EngineRefusedError
from worker.engine.engine import Engine
from worker.engine.judgement import CheckError
from worker.engine.spec import chunk_tokens
from worker.in_hand import inflight_tokens

_ROW_TOKENS = 256
_ROUNDS = 2
_MEASURED_S = 1.0


async def warm_up(engine: Engine, vocab_size: int, max_row_tokens: int) -> float:
    """Prefills one chunk of rows twice, then several at a time; tokens a second of the last. Raises `CheckError`.

    The measurement takes about a second at the most. On a CPU, where a request costs next to nothing beside a forward,
    the second chunk is the measurement.
    """
    # A small KV cache takes shorter rows than the model does.
    taken = max_row_tokens if engine.info is None else min(max_row_tokens, engine.info.max_row_tokens)
    length = max(1, min(_ROW_TOKENS, taken))
    count = max(1, chunk_tokens(engine.spec.chunked_prefill_size, engine.spec.device) // length)
    ids = np.arange(count * length, dtype=np.int64) * 7919 % max(2, vocab_size - 1)
    rows = np.split(ids.astype(np.int32), count)
    speed = 0.0
    for turn in range(_ROUNDS):
        speed = await _speed(engine, str(turn), rows, 1)
    chunks = chunks_to_measure(speed, count * length, engine.spec.device)
    return await _speed(engine, "measured", rows, chunks) if chunks > 1 else speed


def chunks_to_measure(speed: float, chunk: int, device: str) -> int:
    """How many chunks of so many tokens are prefilled at a time to measure, at about `speed` tokens a second."""
    if device == "cpu":
        return 1
    # As many as a worker keeps in the engine by default: alone, each would wait for its request.
    most = inflight_tokens(0, chunk, device) // chunk
    return max(1, min(most, int(speed * _MEASURED_S / chunk)))


async def _speed(engine: Engine, turn: str, rows: list[npt.NDArray[np.int32]], chunks: int) -> float:
    """Tokens a second of `chunks` requests at a time, each with all the rows."""
    tokens = chunks * sum(len(row) for row in rows)
    began = time.perf_counter()
    try:
        async with asyncio.TaskGroup() as sending:
            for chunk in range(chunks):
                rids = [f"warm-up-{turn}-{chunk}-{i:05d}." for i in range(len(rows))]
                sending.create_task(engine.client.prefill_all(rids, rows))
    except* (EngineDownError, EngineRefusedError) as group:
        first = group.exceptions[0]
        # The watchdog follows the causes, to tell a server that went down.
        raise CheckError(f"the engine could not prefill its first {tokens} tokens: {first}") from first
    return tokens / (time.perf_counter() - began)
