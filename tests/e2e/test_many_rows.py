"""Ten thousand short rows: none lost, none doubled, in order, by one worker and by two, on SQLite and on Postgres."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import reference
from fixtures_stack import Stack, WorkerProcess, open_stack

from layertap.reader import Extraction

if TYPE_CHECKING:
    from fixtures_service import Postgres

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1800)]

ROWS = 10_000
LAYERS = [1, 4]
SHARD_BYTES = 1024 * 1024


def short_rows(count: int = ROWS) -> list[dict[str, list[int]]]:
    """Rows of two to eight random tokens."""
    random = np.random.default_rng(5)
    return [{"input_ids": random.integers(3, 49152, n).tolist()} for n in random.integers(2, 9, count)]


def check(rows: Extraction, given: Sequence[dict[str, list[int]]], model: Path) -> None:
    """Every row is there once, in order, with its own tokens; the states of some are right."""
    assert rows.manifest.complete
    assert rows.manifest.rows == len(rows) == len(given)
    assert rows.row_ids.tolist() == list(range(len(given)))
    assert len(rows.manifest.shards) >= 24
    stored = np.concatenate([shard_ids(rows, shard.file) for shard in rows.manifest.shards])
    assert stored.tolist() == list(range(len(given))), "row ids ascend through the shards, each once"
    for row, line in zip(rows, given, strict=True):
        assert row.input_ids.tolist() == line["input_ids"]
    for i in np.random.default_rng(1).choice(len(given), 60, replace=False):
        row = rows[int(i)]
        right = reference.states(model, row.input_ids.tolist(), LAYERS)
        assert row.final_hidden_state is not None
        assert reference.relative_error(row.final_hidden_state, right.final) < 0.02
        for k in LAYERS:
            assert reference.relative_error(row.boundary(k), right.boundaries[k]) < 0.02


def shard_ids(rows: Extraction, file: str) -> "np.ndarray":
    """The row ids of one shard file, read by safetensors itself."""
    from safetensors.numpy import safe_open

    with safe_open(rows.directory / file, "np") as tensors:
        ids: np.ndarray = tensors.get_tensor("row_ids")
    return ids


def test_ten_thousand_short_rows_arrive_once_each_and_in_order(warm_stack: Stack, tiny_llama: Path) -> None:
    rows = warm_stack.extract(short_rows(), "tiny-llama", LAYERS, shard_bytes=SHARD_BYTES)
    check(rows, short_rows(), tiny_llama)


def two_workers_share_a_job(stack: Stack, model: Path) -> None:
    """One job, two workers, both of which commit shards of it."""
    workers: list[WorkerProcess] = []
    for name in ("worker-a", "worker-b"):
        # Each worker's engine is warmed up while the other worker is paused, so that both can take part from the start.
        for worker in workers:
            worker.pause()
        workers.append(stack.start_worker(name, model))
        stack.extract(short_rows(8), "tiny-llama", LAYERS)
    for worker in workers:
        worker.resume()
    job = stack.succeeded(stack.submit(short_rows(), "tiny-llama", LAYERS, shard_bytes=SHARD_BYTES))
    check(stack.pull(job), short_rows(), model)
    assert job.progress.rows_done == ROWS
    committed = [worker.log().count("committed: shard") for worker in workers]
    assert min(committed) > 2, committed
    assert not [worker.id for worker in workers if "lease_lost" in worker.log()]


def test_two_workers_share_one_job_and_lose_nothing(tmp_path: Path, tiny_llama: Path) -> None:
    with open_stack(tmp_path / "stack") as stack:
        two_workers_share_a_job(stack, tiny_llama)


@pytest.mark.slow
@pytest.mark.postgres
def test_two_workers_share_one_job_on_postgres(tmp_path: Path, tiny_llama: Path, postgres: "Postgres") -> None:
    url = postgres.create()
    with open_stack(tmp_path / "stack", database_url=url) as stack:
        two_workers_share_a_job(stack, tiny_llama)
    postgres.drop(url)
