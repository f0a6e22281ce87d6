"""A job that is disturbed while it runs on a real engine: cancelled, its service killed, a reply lost."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import reference
from fixtures_proxy import Proxy, open_proxy
from fixtures_service_process import until
from fixtures_stack import PATIENCE, SLOW, Stack, WorkerProcess, open_stack

from layertap.reader import Extraction
from layertap.schemas.jobs import Job, JobState

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1800)]

MODEL = "SmolLM2-135M-Instruct"
LAYERS = [0, 15, 30]
ROWS, TOKENS, SHARDS = 12, 200, 6
SHARD_BYTES = 2 * 1024 * 1024
"""Two rows a shard."""
PROBE_TOKENS = 7


class Chain(NamedTuple):
    """A stack with one slow worker, which reaches the service through a proxy, and all rows extracted undisturbed."""

    stack: Stack
    worker: WorkerProcess
    proxy: Proxy
    undisturbed: Extraction


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory, smollm2: Path) -> Iterator[Chain]:
    root = tmp_path_factory.mktemp("interruptions")
    with open_stack(root, env={"LAYERTAP_LEASE_SECONDS": "5"}) as stack, open_proxy(stack.port) as proxy:
        worker = stack.start_worker("worker", smollm2, flags=SLOW, url=proxy.url)
        yield Chain(stack, worker, proxy, stack.extract(rows(), MODEL, LAYERS))


def rows() -> list[dict[str, list[int]]]:
    random = np.random.default_rng(9)
    return [{"input_ids": random.integers(3, 49152, TOKENS).tolist()} for _ in range(ROWS)]


def check(chain: Chain, job: Job) -> None:
    """Every row of the ended job is there once and right, and was counted once."""
    pulled = chain.stack.pull(job)
    check_rows(chain, pulled)
    assert pulled.row_ids.tolist() == list(range(ROWS))
    assert [shard.index for shard in pulled.manifest.shards] == list(range(SHARDS))
    progress = job.progress
    assert (progress.rows_done, progress.rows_total) == (ROWS, ROWS)
    assert (progress.shards_done, progress.shards_total) == (SHARDS, SHARDS)
    assert (progress.tokens_done, progress.tokens_total) == (ROWS * TOKENS, ROWS * TOKENS)


def check_rows(chain: Chain, pulled: Extraction) -> None:
    """The rows that are there are what they are when nothing disturbs the job."""
    for row, line in ((row, rows()[row.row_id]) for row in pulled):
        assert row.input_ids.tolist() == line["input_ids"]
        right = chain.undisturbed.by_row_id(row.row_id)
        for k in LAYERS:
            assert reference.relative_error(row.boundary(k), right.boundary(k)) < 0.005
        assert row.final_hidden_state is not None
        assert right.final_hidden_state is not None
        assert reference.relative_error(row.final_hidden_state, right.final_hidden_state) < 0.005


def submit(chain: Chain) -> Job:
    return chain.stack.submit(rows(), MODEL, LAYERS, shard_bytes=SHARD_BYTES)


def idle(worker: WorkerProcess) -> bool:
    """Whether the engine has nothing to do: a row of our own is prefilled at once, with none before it or beside it."""
    (log,) = worker.engine_logs()
    before = log.stat().st_size
    with worker.engine() as engine:
        row = {"input_ids": [1] * PROBE_TOKENS, "sampling_params": {"max_new_tokens": 0}}
        engine.post("/generate", json=row).raise_for_status()
    lines = [line for line in log.read_bytes()[before:].decode().splitlines() if "Prefill batch" in line]
    alone = (f"#new-token: {PROBE_TOKENS},", "#running-req: 0,", "#queue-req: 0,", "#pending-token: 0,")
    return len(lines) == 1 and all(words in lines[0] for words in alone)


def test_cancel_leaves_the_engine_idle_within_five_seconds_and_keeps_what_was_committed(chain: Chain) -> None:
    stack, worker = chain.stack, chain.worker
    engine = worker.engine_pids()
    job = submit(chain)
    until(lambda: stack.client.job(job.id).progress.shards_done >= 2, PATIENCE)
    worker.wait_mid_shard()
    cancelled_at = time.monotonic()
    stack.client.cancel(job.id)
    until(lambda: not worker.sessions() and idle(worker), 5)
    until(lambda: stack.client.job(job.id).state is JobState.CANCELLED, 5)
    assert time.monotonic() - cancelled_at < 5

    pulled = stack.pull(job)
    assert not pulled.complete
    assert 2 <= len(pulled.manifest.shards) < SHARDS
    check_rows(chain, pulled)
    files = (stack.storage / "jobs" / job.id / "shards").iterdir()
    assert {path.name for path in files} == {shard.file for shard in pulled.manifest.shards}

    check(chain, stack.succeeded(submit(chain)))
    assert worker.engine_pids() == engine, "the engine stayed warm"
    assert len(worker.engine_logs()) == 1


def test_a_commit_whose_reply_is_lost_is_counted_once(chain: Chain) -> None:
    chain.proxy.lose_one_reply("/commit-shard")
    job = chain.stack.succeeded(submit(chain))
    assert chain.proxy.lost.is_set()
    lost = chain.proxy.seen[0]
    assert chain.proxy.seen.count(lost) == 2, "the worker said it again"
    assert len(chain.proxy.seen) == len(set(chain.proxy.seen)) + 1
    check(chain, job)


def test_the_worker_waits_for_a_killed_service_and_goes_on(chain: Chain) -> None:
    stack, worker = chain.stack, chain.worker
    engine = worker.engine_pids()
    job = submit(chain)
    until(lambda: stack.client.job(job.id).progress.shards_done >= 1, PATIENCE)
    worker.wait_mid_shard()
    before = stack.client.job(job.id).progress.shards_done
    stack.kill_service()
    # Longer than a lease: its end must have come and gone on the worker's own clock.
    polled = worker.log().count("control poll:")
    until(lambda: worker.log().count("control poll:") >= polled + 14, 60)
    stack.start_service()
    ended = stack.succeeded(job)
    assert before < ended.progress.shards_done
    check(chain, ended)
    assert worker.engine_pids() == engine
    assert worker.child.exit_code is None
