"""Workers that end while they work, by SIGKILL and by SIGTERM, and the workers that come after them."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import reference
from fixtures_service_process import until
from fixtures_stack import ENGINE_MARK, MARK, SLOW, Stack, WorkerProcess

from layertap.schemas.jobs import Job
from layertap.schemas.workers import WorkerState
from worker.engine import processes

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1800)]

LAYERS = [0, 3, 8]
ROWS, TOKENS = 12, 1000
SHARD_BYTES = 4_200_000
"""Four rows a shard."""


def rows() -> list[dict[str, list[int]]]:
    random = np.random.default_rng(2)
    return [{"input_ids": random.integers(3, 49152, TOKENS).tolist()} for _ in range(ROWS)]


def submit(stack: Stack) -> Job:
    return stack.submit(rows(), "tiny-llama", LAYERS, shard_bytes=SHARD_BYTES)


def check(stack: Stack, job: Job, model: Path) -> None:
    """Every row of the ended job is there once, and right."""
    assert job.progress.rows_done == ROWS
    assert job.progress.shards_done == job.progress.shards_total
    pulled = stack.pull(job)
    files = (stack.storage / "jobs" / job.id / "shards").iterdir()
    assert {path.name for path in files} == {shard.file for shard in pulled.manifest.shards}, "nothing is left over"
    assert pulled.row_ids.tolist() == list(range(ROWS))
    for row, given in zip(pulled, rows(), strict=True):
        assert row.input_ids.tolist() == given["input_ids"]
        right = reference.states(model, given["input_ids"], LAYERS)
        for k in LAYERS:
            assert reference.relative_error(row.boundary(k), right.boundaries[k]) < 0.02


def tries(stack: Stack, job: Job) -> list[tuple[int, int, int]]:
    """Generation, attempts and expiries of each shard of the job."""
    statement = 'SELECT generation, attempts, expiries FROM tasks WHERE job_id = ? AND kind = ? ORDER BY "index"'
    return [(int(g), int(a), int(e)) for g, a, e in stack.query(statement, job.id, "shard")]


@contextmanager
def stubborn_orphan(worker: WorkerProcess, stack: Stack) -> Iterator[int]:
    """A process that bears the mark of the worker's engine, outlived it, and ignores SIGTERM."""
    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(600)"
    env = {**os.environ, MARK: str(stack.root), ENGINE_MARK: str(worker.run_dir / "engine-1")}
    with subprocess.Popen([sys.executable, "-c", code], env=env, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        try:
            yield process.pid
        finally:
            process.kill()


def test_after_sigkill_a_worker_with_the_same_run_dir_ends_the_old_engine_and_the_job_ends_right(
    stack: Stack, tiny_llama: Path
) -> None:
    first = stack.start_worker("worker", tiny_llama, flags=SLOW)
    job = submit(stack)
    first.wait_mid_shard()
    old_engine = first.engine_pids()
    assert old_engine
    first.kill()

    with stubborn_orphan(first, stack) as orphan:
        second = stack.start_worker("worker", tiny_llama)
        assert not [pid for pid in (*old_engine, orphan) if processes.alive(pid)]
    assert "of an engine that an earlier worker left behind" in second.log()
    check(stack, stack.succeeded(job), tiny_llama)
    # The killed worker's leases expired, which costs no attempt.
    assert {attempts for _, attempts, _ in tries(stack, job)} == {0}
    assert max(expiries for _, _, expiries in tries(stack, job)) == 1
    states = {worker.id: worker.state for worker in stack.client.workers()}
    assert states[second.id] is WorkerState.ACTIVE


@pytest.mark.slow
def test_after_sigkill_another_worker_finishes_the_job_and_the_dead_ones_engine_is_gone(
    stack: Stack, tiny_llama: Path
) -> None:
    first = stack.start_worker("worker-a", tiny_llama, flags=SLOW)
    job = submit(stack)
    first.wait_mid_shard()
    dead = first.id
    assert first.engine_pids()
    first.kill()
    until(lambda: not first.engine_pids(), 20)

    stack.start_worker("worker-b", tiny_llama)
    check(stack, stack.succeeded(job), tiny_llama)
    assert {worker.id: worker.state for worker in stack.client.workers()}[dead] is WorkerState.LOST


def test_sigterm_hands_the_task_back_at_no_cost_and_ends_the_engine(stack: Stack, tiny_llama: Path) -> None:
    first = stack.start_worker("worker-a", tiny_llama, flags=SLOW)
    job = submit(stack)
    first.wait_mid_shard()
    generations = [generation for generation, _, _ in tries(stack, job)]
    assert max(generations) == 1
    assert first.engine_pids()
    assert first.terminate() == 0
    assert not first.engine_pids()
    assert {(attempts, expiries) for _, attempts, expiries in tries(stack, job)} == {(0, 0)}
    leased = stack.query("SELECT count(*) FROM tasks WHERE job_id = ? AND state = 'leased'", job.id)
    assert leased == [(0,)]
    assert {worker.id: worker.state for worker in stack.client.workers()}[first.id] is WorkerState.GONE
    shards = stack.storage / "jobs" / job.id / "shards"
    assert [path.name for path in shards.iterdir() if path.suffix != ".safetensors"] == []

    stack.start_worker("worker-b", tiny_llama)
    check(stack, stack.succeeded(job), tiny_llama)
    assert {(attempts, expiries) for _, attempts, expiries in tries(stack, job)} == {(0, 0)}
