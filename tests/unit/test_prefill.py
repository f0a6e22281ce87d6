"""Rows that an engine never answers. The engine is a fake: the real one can't be made to starve a single row."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from leases import shard_lease
from pydantic import ValidationError

from worker.capture.rid import Rid, parse
from worker.capture.session import Ledger
from worker.engine.client import EngineClient, EngineDownError, EngineGoneError
from worker.inflight import InFlight
from worker.leases import HeldLease
from worker.prefill import Prefill, RowFailure, StorageWriteError
from worker.settings import Settings

SECONDS = 0.5
TOKENS = 4
RID = Rid(0b10, True, "task_a", 3, 0, 0)

Sent = tuple[int, int]
"""A row and its attempt."""


def rid(row: int, attempt: int) -> str:
    return f"{RID.lease_prefix}{row}.{attempt}."


class FakeEngine:
    """Speaks SGLang's HTTP, and never answers a list that holds a `stuck` row.

    The list's other rows arrive nonetheless, but for those `behind`, which wait for the stuck one. Where it takes no
    aborts it hangs up instead. An id that it was ever given it refuses, as SGLang does while it still knows it.
    """

    def __init__(self, ledger: Ledger, stuck: Callable[[Sent], bool], behind: Iterable[int] = ()) -> None:
        self.ledger = ledger
        self.stuck = stuck
        self.behind = set(behind)
        self.lists: list[list[Sent]] = []
        self.aborted: list[str] = []
        self.takes_aborts = True
        self.gone = False
        self.arrives = True
        self.fails: Callable[[Sent], bool] = lambda sent: False
        self.refuses: Callable[[Sent], bool] = lambda sent: False
        self.known: set[str] = set()
        self.ends_after_failing = False
        self.port = 0

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        server = await asyncio.start_server(self._connection, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield
        finally:
            server.close()
            await server.wait_closed()

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
                length = int(head.partition("content-length: ")[2].partition("\r\n")[0])
                answer = self._answer(head.split()[1], json.loads(await reader.readexactly(length)))
                if answer is None:
                    await reader.read()
                if not answer:
                    break
                status = answer.pop("status", "500 E") if "error" in answer else "200 OK"
                body = json.dumps(answer).encode()
                writer.write(f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
                await writer.drain()
        writer.close()

    def _answer(self, path: str, body: dict[str, Any]) -> Any:
        if path == "/abort_request":
            self.aborted.append(body["rid"])
            return {"aborted": True} if self.takes_aborts else {}
        found = [parse(name) for name in body["rid"]]
        sent = [(one.row, one.attempt) for one in found if one is not None]
        if self.gone:
            return {}
        if sent:
            self.lists.append(sent)
        if self.known & set(body["rid"]):
            return {"status": "400 Bad Request", "error": {"message": "Duplicate request ID detected"}}
        self.known |= set(body["rid"])
        if any(self.refuses(one) for one in sent):
            return {"status": "400 Bad Request", "error": {"message": "too long"}}
        if any(self.fails(one) for one in sent):
            self.gone = self.ends_after_failing
            return {"error": {"message": "it broke"}}
        starved = any(self.stuck(one) for one in sent)
        for row, attempt in sent:
            if self.arrives and not self.stuck((row, attempt)) and not (starved and row in self.behind):
                self.ledger.written[row] = TOKENS
        if starved:
            return None
        return [{"meta_info": {"id": name, "finish_reason": {"type": "length"}}} for name in body["rid"]]


@asynccontextmanager
async def prefill(engine: FakeEngine) -> AsyncIterator[Prefill]:
    """A prefill with lists of at most 12 rows, over an engine that is given SECONDS for each."""
    lease = shard_lease(generation=3, lease_seconds=600)
    held = HeldLease(lease, "wrk_a", time.monotonic() + 600)
    async with engine.serving():
        client = EngineClient(engine.port, "key", SECONDS)
        try:
            yield Prefill(client, InFlight(100), held, engine.ledger, RID, 12 * TOKENS)
        finally:
            await client.aclose()


def failures(engine: FakeEngine, todo: Iterable[int]) -> dict[int, RowFailure]:
    """Why rows failed of those to be prefilled; none is in flight after them."""
    found: list[dict[int, RowFailure]] = []

    async def scenario() -> None:
        async with prefill(engine) as work:
            await work.run(rows_of(engine.ledger), list(todo))
            assert work.in_flight == {}
            found.append(work.failures)

    run(scenario())
    return found[0]


def rows_of(ledger: Ledger) -> list[Any]:
    return [np.zeros(length, dtype=np.int32) for length in ledger.lengths]


def run(scenario: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(scenario, 60))


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    """Of 24 rows, two lists."""
    return Ledger.create(tmp_path / "ledger", [TOKENS] * 24)


def test_a_row_that_is_stuck_once_is_aborted_by_its_own_id_and_sent_again_alone(ledger: Ledger) -> None:
    engine = FakeEngine(ledger, lambda sent: sent == (1, 0))

    async def scenario() -> None:
        async with prefill(engine) as work:
            await work.run(rows_of(ledger), range(24))
            assert work.failures == {}
            assert work.in_flight == {}
            assert work.budget.used == 0

    run(scenario())
    # Rows 10 and 11 are in the same list: an abort by a shorter prefix would have ended them too.
    assert engine.aborted == [rid(1, 0)]
    assert [len(sent) for sent in engine.lists] == [12, 12, 1]
    assert engine.lists[-1] == [(1, 1)]
    assert ledger.progress()[0] == 24


def test_a_row_that_is_stuck_alone_too_becomes_a_row_failure_and_the_rest_goes_on(ledger: Ledger) -> None:
    engine = FakeEngine(ledger, lambda sent: sent[0] == 1)

    async def scenario() -> None:
        async with prefill(engine) as work:
            await work.run(rows_of(ledger), range(24))
            (failed,) = work.failures.items()
            assert failed[0] == 1
            assert failed[1].code == "timed_out"
            assert failed[1].reason == "the engine gave no answer within 0.5 s, with this row alone in its request"
            assert work.in_flight == {}
            assert work.budget.used == 0

    run(scenario())
    assert engine.aborted == [rid(1, 0), rid(1, 1)]
    assert ledger.progress()[0] == 23


def test_rows_that_wait_behind_a_stuck_one_are_aborted_with_it_and_come_through_alone(ledger: Ledger) -> None:
    engine = FakeEngine(ledger, lambda sent: sent[0] == 13, behind=[17, 20])
    assert set(failures(engine, range(24))) == {13}
    assert engine.aborted == [rid(13, 0), rid(17, 0), rid(20, 0), rid(13, 1)]
    assert sorted(engine.lists[2:]) == [[(13, 1)], [(17, 1)], [(20, 1)]]
    assert ledger.progress()[0] == 23


def test_rows_that_are_all_written_are_done_whether_or_not_the_engine_answers(ledger: Ledger) -> None:
    engine = FakeEngine(ledger, lambda sent: sent[0] == 5)
    ledger.written[5] = TOKENS
    assert failures(engine, range(12)) == {}
    assert engine.aborted == []
    assert len(engine.lists) == 1


def test_a_row_that_a_living_engine_answers_with_its_own_error_is_set_aside_alone(ledger: Ledger) -> None:
    engine = FakeEngine(ledger, lambda sent: False)
    engine.fails = lambda sent: sent[0] == 1
    assert failures(engine, range(24)) == {1: RowFailure("engine_aborted", "/generate: HTTP 500: it broke")}
    assert ledger.progress()[0] == 23
    assert engine.aborted == [*(rid(row, 0) for row in range(12)), rid(1, 1)]
    assert sorted(len(sent) for sent in engine.lists) == [1] * 12 + [12, 12]


def test_an_engine_that_ends_with_its_error_is_down_and_the_rows_are_under_suspicion(ledger: Ledger) -> None:
    engine = FakeEngine(ledger, lambda sent: False)
    engine.fails, engine.ends_after_failing = lambda sent: sent[0] == 1, True

    async def scenario() -> None:
        async with prefill(engine) as work:
            with pytest.raises(EngineDownError, match="it broke") as caught:
                await work.run(rows_of(ledger), range(12))
            assert not isinstance(caught.value, EngineGoneError)
            assert work.in_flight == {row: rid(row, 0) for row in range(12)}
            assert work.failures == {}

    run(scenario())


def test_a_row_that_is_refused_takes_no_other_row_of_its_list_with_it(ledger: Ledger) -> None:
    engine = FakeEngine(ledger, lambda sent: False)
    engine.refuses = lambda sent: sent[0] == 1
    assert failures(engine, range(24)) == {1: RowFailure("engine_refused", "too long")}
    assert ledger.progress()[0] == 23


def test_what_is_under_way_is_aborted_by_its_full_ids_and_sent_again_by_others(ledger: Ledger) -> None:
    engine = FakeEngine(ledger, lambda sent: sent in {(1, 0), (13, 0)}, behind=[2, 3])

    async def scenario() -> None:
        async with prefill(engine) as work:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(work.run(rows_of(ledger), range(24)), SECONDS / 2)
            assert work.in_flight == {row: rid(row, 0) for row in range(24)}
            await work.abort(work.in_flight)
            again = replace(work, in_flight={})
            await again.run(rows_of(ledger), [row for row in range(24) if not ledger.complete(row)])
            assert again.failures == {}

    run(scenario())
    assert engine.aborted == [rid(row, 0) for row in range(24)]
    assert ledger.progress()[0] == 24


def test_several_stuck_rows_are_waited_for_side_by_side(ledger: Ledger) -> None:
    engine = FakeEngine(ledger, lambda sent: sent[0] < 12)
    assert set(failures(engine, range(12))) == set(range(12))
    # All were sent again before the first of them was given up.
    assert len(engine.lists) == 13
    assert [name.split(".")[-2] for name in engine.aborted] == ["0"] * 12 + ["1"] * 12


@pytest.mark.parametrize("alone", [False, True])
def test_an_engine_that_takes_no_abort_either_is_down_and_the_late_rows_are_under_suspicion(
    ledger: Ledger, alone: bool
) -> None:
    engine = FakeEngine(ledger, lambda sent: sent[0] == 1)
    engine.takes_aborts = False

    async def scenario() -> None:
        async with prefill(engine) as work:
            with pytest.raises(EngineDownError):
                await (work.run_alone if alone else work.run)(rows_of(ledger), range(12))
            assert 1 in work.in_flight
            assert work.failures == {}
            assert work.budget.used == 0

    run(scenario())


def test_a_row_given_up_is_not_tried_again_among_suspects(ledger: Ledger) -> None:
    engine = FakeEngine(ledger, lambda sent: sent[0] == 1)

    async def scenario() -> None:
        async with prefill(engine) as work:
            await work.run_alone(rows_of(ledger), [0, 1])
            sent = len(engine.lists)
            await work.run_alone(rows_of(ledger), [1])
            assert len(engine.lists) == sent
            assert set(work.failures) == {1}

    run(scenario())


def test_the_row_time_out_must_be_positive_and_is_longer_than_the_stall_time_out() -> None:
    for seconds in (0, -1):
        with pytest.raises(ValidationError, match="row_timeout"):
            Settings(row_timeout=seconds)
    assert Settings().row_timeout > 2 * Settings().stall_timeout


def test_rows_that_are_to_be_alone_are_not_sent_to_an_engine_that_is_gone_already(ledger: Ledger) -> None:
    engine = FakeEngine(ledger, lambda sent: False)
    engine.gone = True

    async def scenario() -> None:
        async with prefill(engine) as work:
            with pytest.raises(EngineGoneError):
                await work.run_alone(rows_of(ledger), [3])
            assert work.budget.used == 0

    run(scenario())
    assert engine.lists == []


def test_rows_that_are_to_be_alone_stay_alone_while_the_bound_recovers(ledger: Ledger) -> None:
    engine = FakeEngine(ledger, lambda sent: sent[0] == 1)

    async def scenario() -> None:
        async with prefill(engine) as work:
            work.budget.halve()
            alone = asyncio.create_task(work.run_alone(rows_of(ledger), [1]))
            beside = asyncio.create_task(work.budget.acquire(TOKENS))
            await asyncio.sleep(SECONDS / 2)
            work.budget.recover()
            await asyncio.sleep(SECONDS / 4)
            assert not alone.done()
            assert not beside.done()
            await alone
            await beside

    run(scenario())


def test_rows_that_are_to_be_alone_wait_for_the_last_row_in_flight_whatever_the_bound(ledger: Ledger) -> None:
    engine = FakeEngine(ledger, lambda sent: False)

    async def scenario() -> None:
        async with prefill(engine) as work:
            work.budget.halve()
            since = await work.budget.acquire(TOKENS)
            alone = asyncio.create_task(work.run_alone(rows_of(ledger), [1]))
            await asyncio.sleep(0)
            work.budget.recover()
            await asyncio.sleep(SECONDS / 2)
            assert engine.lists == []
            work.budget.release(TOKENS, since)
            await alone

    run(scenario())


@pytest.fixture
def nothing_arrives(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> FakeEngine:
    """An engine that answers, but whose states reach no file; writes that stand still are noticed soon."""
    monkeypatch.setattr("worker.prefill._WRITE_STALL_S", 0.4)
    engine = FakeEngine(ledger, lambda sent: False)
    engine.arrives = False
    return engine


def test_a_write_that_does_not_come_back_is_the_storage_s_fault_and_no_row_s(
    ledger: Ledger, nothing_arrives: FakeEngine
) -> None:

    async def scenario() -> None:
        async with prefill(nothing_arrives) as work:
            with ledger.writing(), pytest.raises(StorageWriteError, match="ETIMEDOUT"):
                await work.run(rows_of(ledger), range(24))
            assert work.failures == {}

    run(scenario())


def test_states_that_wait_behind_a_write_to_another_file_are_waited_for(
    ledger: Ledger, nothing_arrives: FakeEngine
) -> None:
    done = [0]

    async def storage_comes_back() -> None:
        await asyncio.sleep(0.6)
        ledger.written[:] = TOKENS
        done[0] = 24

    async def scenario() -> None:
        async with prefill(nothing_arrives) as work:
            work.queue = lambda: (24, done[0])
            back = asyncio.create_task(storage_comes_back())
            await work.run(rows_of(ledger), range(24))
            await back
            assert work.failures == {}

    run(scenario())
    assert [len(sent) for sent in nothing_arrives.lists] == [12, 12]


def test_a_writer_that_stands_still_over_another_file_is_the_storage_s_fault(
    ledger: Ledger, nothing_arrives: FakeEngine
) -> None:

    async def scenario() -> None:
        async with prefill(nothing_arrives) as work:
            work.queue = lambda: (25, 1)
            with pytest.raises(StorageWriteError, match="ETIMEDOUT"):
                await work.run(rows_of(ledger), range(24))
            assert work.failures == {}

    run(scenario())


def test_states_that_are_missing_once_the_writer_is_through_are_the_rows_failure(
    ledger: Ledger, nothing_arrives: FakeEngine
) -> None:
    given = [24]

    def queue() -> tuple[int, int]:
        # Others' states keep coming.
        given[0] += 1
        return given[0], given[0] - 1

    async def scenario() -> None:
        async with prefill(nothing_arrives) as work:
            work.queue = queue
            await work.run(rows_of(ledger), [3])
            assert {row: failure.code for row, failure in work.failures.items()} == {3: "capture_incomplete"}

    run(scenario())
