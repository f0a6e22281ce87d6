"""The same rows alone, together, in chunks, after a restart, by two workers: as alike as batches of one engine are.

The engine takes rows in chunks, since where rows are cut depends on what else is in the batch. On the CPU that is all
the difference that a batch makes: with rows taken whole, alone and together came out the same to the bit.
"""

from pathlib import Path

import numpy as np
import pytest
import reference
from fixtures_stack import CHUNKED, Stack

from layertap.reader import Row

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(900)]

MODEL, LAYERS = "tiny-llama", [0, 3, 8]
LENGTHS = [1, 2, 5, 31, 129, 300, 700, 64, 450, 900]
SHARD_BYTES = 1024 * 1024
VARIES = 1.2
"""The variance is the worst of a few roundings, and so are the differences held against it."""


def rows() -> list[dict[str, list[int]]]:
    random = np.random.default_rng(13)
    return [{"input_ids": random.integers(3, 49152, n).tolist()} for n in LENGTHS]


def apart(some: list[Row], others: list[Row]) -> float:
    """The worst relative difference between two extractions of the same rows, over boundaries and final states."""
    worst = 0.0
    for row, other in zip(some, others, strict=True):
        assert row.input_ids.tolist() == other.input_ids.tolist()
        pairs = [(row.final_hidden_state, other.final_hidden_state)]
        pairs += [(row.boundary(k), other.boundary(k)) for k in LAYERS]
        for one, another in pairs:
            assert one is not None
            assert another is not None
            worst = max(worst, reference.relative_error(one, another))
    return worst


def extract(stack: Stack, some: slice = slice(None)) -> list[Row]:
    """Those rows in a job of their own, in small shards, by whichever workers there are."""
    return list(stack.extract(rows()[some], MODEL, LAYERS, shard_bytes=SHARD_BYTES))


def test_the_same_rows_differ_by_no_more_than_the_engine_s_own_batch_variance(stack: Stack, tiny_llama: Path) -> None:
    first = stack.start_worker("first", tiny_llama, flags=CHUNKED)
    together = extract(stack)
    alone = [row for i in range(len(LENGTHS)) for row in extract(stack, slice(i, i + 1))]
    variance = apart(alone, together)
    assert first.terminate() == 0

    second = stack.start_worker("second", tiny_llama, flags=CHUNKED)
    found = {"after a restart": apart(extract(stack), together)}
    second.pause()
    stack.start_worker("whole", tiny_llama)
    found["not in chunks"] = apart(extract(stack), together)
    second.resume()
    found["by two workers"] = apart(extract(stack), together)
    print(f"batch variance {100 * variance:.2f} %;", {how: f"{100 * error:.2f} %" for how, error in found.items()})
    assert 0 < variance < 0.01
    assert max(found.values()) <= VARIES * variance, found
