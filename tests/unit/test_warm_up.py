"""The first forwards: rows that the engine takes, and a measurement of about a second, whatever the engine."""

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pytest

from worker.engine.warm_up import chunks_to_measure, warm_up


@pytest.mark.parametrize(
    ("speed", "device", "chunks"),
    [(1000, "cuda", 1), (8192, "cuda", 1), (20_000, "cuda", 2), (30_000, "cuda", 3), (1e6, "cuda", 8), (1e6, "cpu", 1)],
)
def test_as_many_chunks_are_measured_as_a_second_takes(speed: float, device: str, chunks: int) -> None:
    assert chunks_to_measure(speed, 8192, device) == chunks


def test_rows_are_no_longer_than_a_small_cache_takes() -> None:
    sent: list[int] = []

    async def prefill_all(rids: list[str], rows: list[npt.NDArray[np.int32]]) -> None:
        sent.extend(map(len, rows))

    engine = SimpleNamespace(
        spec=SimpleNamespace(chunked_prefill_size=1024, device="cpu"),
        client=SimpleNamespace(prefill_all=prefill_all),
        info=SimpleNamespace(max_row_tokens=100),
    )
    asyncio.run(warm_up(cast(Any, engine), vocab_size=3, max_row_tokens=4096))
    assert set(sent) == {100}
