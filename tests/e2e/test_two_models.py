"""One worker, two models, a job for each at the same time: the engine changes hands once, between them."""

from pathlib import Path
from typing import Any

import pytest
from fixtures_stack import open_stack

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(1200)]

ROWS = 24
LAYERS = list(range(9))


def rows(words: int) -> list[dict[str, Any]]:
    return [{"text": f"{number} " + "one two " * words} for number in range(ROWS)]


def test_each_model_is_launched_once_however_many_lanes_wait_for_the_other(
    tmp_path: Path, tiny_llama: Path, tiny_qwen3: Path
) -> None:
    with open_stack(tmp_path) as stack:
        worker = stack.start_worker("worker", tiny_llama, tiny_qwen3, flags=("--shard-lanes", "4"))
        jobs = [stack.submit(rows(200), model, LAYERS, shard_bytes=1 << 20) for model in ("tiny-llama", "tiny-qwen3")]
        ended = [stack.succeeded(job) for job in jobs]
        assert all(len(stack.pull(job)) == ROWS for job in ended)
        assert all(job.progress.shards_done > 4 for job in ended)
        assert list(stack.client.incidents()) == []
        assert len(worker.engine_logs()) == 2
