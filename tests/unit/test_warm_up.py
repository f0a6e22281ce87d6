"""How long the measurement of plain prefill takes: about a second, whatever the engine."""

import pytest

from worker.engine.warm_up import chunks_to_measure


@pytest.mark.parametrize(
    ("speed", "device", "chunks"),
    [(1000, "cuda", 1), (8192, "cuda", 1), (20_000, "cuda", 2), (30_000, "cuda", 3), (1e6, "cuda", 8), (1e6, "cpu", 1)],
)
def test_as_many_chunks_are_measured_as_a_second_takes(speed: float, device: str, chunks: int) -> None:
    assert chunks_to_measure(speed, 8192, device) == chunks
