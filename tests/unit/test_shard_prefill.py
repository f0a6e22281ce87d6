"""Two shards side by side on engines that die: the row that kills is set aside with its incident, and no other is.

Engine and host are fakes: that one shard's trial begins in the moment in which another's kills can't be arranged.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from leases import shard_lease

from layertap.layout import ShardLayout
from worker.capture.rid import Rid, parse
from worker.capture.session import Ledger, sessions_dir
from worker.engine.client import EngineDownError, EngineGoneError
from worker.inflight import InFlight
from worker.leases import HeldLease
from worker.shard_prefill import ShardPrefill

ROWS, TOKENS = 6, 4
KILLER = ("task_a", 3)
FORWARD_S = 0.01


class FakeEngine:
    """Dies of the row `KILLER`. Every row in flight then is lost, and rows sent later meet a server that is gone."""

    strategy = "hooks"

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.died: float | None = None
        self.sent: list[tuple[str, int]] = []
        self.known: set[str] = set()
        self.aborted: list[str] = []
        self.hiccups = 0
        self.client = self
        self.spec = SimpleNamespace(chunked_prefill_size=TOKENS, device="cpu")
        sessions_dir(directory).mkdir(parents=True)

    async def prefill(self, rids: list[str], rows: list[Any]) -> list[None]:
        found = cast(list[Rid], [parse(name) for name in rids])
        self.sent += [(rid.task, rid.row) for rid in found]
        assert not self.known & set(rids), "SGLang refuses an id that it still knows"
        self.known |= set(rids)
        if self.hiccups:
            self.hiccups -= 1
            raise EngineDownError("/generate: ConnectTimeout('')")
        await asyncio.sleep(FORWARD_S)
        if any((rid.task, rid.row) == KILLER for rid in found):
            self.died = self.died or time.monotonic()
        if self.died is not None:
            raise EngineDownError("/generate: ReadError('')")
        for rid in found:
            Ledger.open(sessions_dir(self.directory) / f"{rid.session}.ledger").written[rid.row] = TOKENS
        return [None] * len(rids)

    async def answers(self) -> None:
        if self.died is not None:
            raise EngineGoneError("/generate: ConnectError('')")

    async def abort(self, rid: str) -> None:
        self.aborted.append(rid)

    def describe(self) -> dict[str, object]:
        return {"number": int(self.directory.name)}


class FakeHost:
    """One engine after the other; the incident of a dead one is known once it has been replaced."""

    def __init__(self, root: Path) -> None:
        self.budget = InFlight(2 * TOKENS)
        self.blamed: list[str] = []
        self.lingers = 0.0
        self._root = root
        self.engines = [FakeEngine(root / "0")]
        self._one_at_a_time = asyncio.Lock()

    @asynccontextmanager
    async def use(self, model: str) -> AsyncIterator[FakeEngine]:
        yield self.engines[-1]

    async def ensure(self, facts: object) -> None:
        async with self._one_at_a_time:
            dead = self.engines[-1].died
            if dead is not None and time.monotonic() - dead >= self.lingers:
                await asyncio.sleep(FORWARD_S)
                self.engines.append(FakeEngine(self._root / str(len(self.engines))))

    async def blame_row(self, engine: FakeEngine) -> str | None:
        if engine.died is None or time.monotonic() - engine.died < max(self.lingers, FORWARD_S):
            return None
        self.blamed.append(f"inc_{engine.directory.name}")
        return self.blamed[-1]


def _shard(host: FakeHost, task: str, tmp_path: Path) -> ShardPrefill:
    held = HeldLease(shard_lease(task=task, lease_seconds=600), "wrk_a", time.monotonic() + 600)
    layout = ShardLayout.of([TOKENS] * ROWS, [1], 8, "BF16", True)
    rows = [np.zeros(TOKENS, dtype=np.int32)] * ROWS
    keeper, facts = SimpleNamespace(phase=lambda *args: None), SimpleNamespace(name="m")
    return ShardPrefill(
        cast(Any, host), cast(Any, keeper), cast(Any, facts), held, layout, tmp_path / task, rows, restart_seconds=1.0
    )


def test_a_row_whose_trial_began_on_an_engine_just_killed_is_not_blamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker.shard_prefill._PAUSE_S", FORWARD_S)

    async def scenario() -> None:
        host = FakeHost(tmp_path)
        both = [_shard(host, task, tmp_path) for task in ("task_a", "task_b")]
        guilty, innocent = await asyncio.wait_for(asyncio.gather(*(shard.run() for shard in both)), 60)
        assert innocent == {}
        assert list(guilty) == [3]
        (incident,) = host.blamed
        assert guilty[3].code == "kills_engine"
        assert incident in guilty[3].reason

    asyncio.run(scenario())


@pytest.mark.parametrize("killer", range(ROWS))
def test_a_suspect_that_came_through_alone_is_not_sent_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, killer: int
) -> None:
    monkeypatch.setattr("worker.shard_prefill._PAUSE_S", FORWARD_S)
    monkeypatch.setattr("test_shard_prefill.KILLER", ("task_a", killer))

    async def scenario() -> None:
        host = FakeHost(tmp_path)
        guilty = await asyncio.wait_for(_shard(host, "task_a", tmp_path).run(), 60)
        assert list(guilty) == [killer]
        for engine in host.engines:
            assert len(engine.sent) == len(set(engine.sent))

    asyncio.run(scenario())


def test_rows_of_an_engine_that_was_out_of_reach_for_a_moment_are_aborted_and_sent_by_ids_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker.shard_prefill._PAUSE_S", FORWARD_S)

    async def scenario() -> None:
        host = FakeHost(tmp_path)
        (engine,) = host.engines
        engine.hiccups = 1
        assert await asyncio.wait_for(_shard(host, "task_b", tmp_path).run(), 60) == {}
        assert host.engines == [engine]
        first = [parse(rid) for rid in engine.aborted]
        assert first
        assert all(rid is not None and rid.attempt == 0 for rid in first)
        assert set(engine.aborted) <= engine.known

    asyncio.run(scenario())


def test_a_shard_is_not_done_while_the_capture_writes_to_its_file(tmp_path: Path) -> None:
    async def scenario() -> None:
        host = FakeHost(tmp_path)
        ledgers: list[Ledger] = []
        shard = _shard(host, "task_b", tmp_path)
        create = shard._ledger
        monkey = cast(Any, shard)
        monkey._ledger = lambda engine, rid: ledgers.append(create(engine, rid)) or ledgers[-1]
        done = asyncio.create_task(shard.run())
        await asyncio.sleep(FORWARD_S / 2)
        with ledgers[0].writing():
            await asyncio.sleep(20 * FORWARD_S)
            assert ledgers[0].closed
            assert not done.done()
        assert await asyncio.wait_for(done, 60) == {}

    asyncio.run(scenario())


def test_an_engine_that_takes_a_minute_to_be_found_dead_costs_no_lease(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = 0.01
    monkeypatch.setattr("worker.shard_prefill._PAUSE_S", seconds)
    monkeypatch.setattr("worker.shard_prefill._PAUSE_MOST_S", 8 * seconds, raising=False)

    async def scenario() -> None:
        host = FakeHost(tmp_path)
        host.lingers = 90 * seconds
        guilty = await asyncio.wait_for(_shard(host, "task_a", tmp_path).run(), 60)
        assert list(guilty) == [3]

    asyncio.run(scenario())


def test_the_last_row_is_set_aside_with_its_incident_although_the_engine_dies_slowly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker.shard_prefill._PAUSE_S", FORWARD_S)
    monkeypatch.setattr("test_shard_prefill.KILLER", ("task_a", ROWS - 1))

    async def scenario() -> None:
        host = FakeHost(tmp_path)
        host.lingers = 10 * FORWARD_S
        guilty = await asyncio.wait_for(_shard(host, "task_a", tmp_path).run(), 60)
        assert list(guilty) == [ROWS - 1]
        assert host.blamed[-1] in guilty[ROWS - 1].reason

    asyncio.run(scenario())
