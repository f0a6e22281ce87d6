"""The in-flight budget: bounded, first come first served, and honest about what was in the engine."""

import asyncio

import pytest

from worker.inflight import InFlight


def test_room_is_given_in_the_order_asked_for_so_that_a_large_batch_gets_its_turn() -> None:
    async def scenario() -> list[str]:
        budget, order = InFlight(10), []

        async def ask(name: str, tokens: int) -> None:
            await budget.acquire(tokens)
            order.append(name)

        await ask("first", 6)
        waiting = [asyncio.create_task(ask("large", 10)), asyncio.create_task(ask("small", 1))]
        await asyncio.sleep(0)
        budget.release(6)
        await asyncio.sleep(0.01)
        assert order == ["first", "large"]
        budget.release(10)
        await asyncio.gather(*waiting)
        return order

    assert asyncio.run(scenario()) == ["first", "large", "small"]


def test_a_batch_larger_than_the_budget_is_let_in_alone() -> None:
    async def scenario() -> None:
        budget = InFlight(10)
        await asyncio.wait_for(budget.acquire(25), 1)
        assert budget.used == 25

    asyncio.run(scenario())


def test_what_was_in_flight_is_remembered_until_asked() -> None:
    async def scenario() -> None:
        budget = InFlight(10)
        await budget.acquire(7)
        budget.release(7)
        assert budget.recent() == 7
        assert budget.recent() == 0

    asyncio.run(scenario())


def test_the_oldest_in_flight_is_the_one_still_held_among_equals(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("worker.inflight.time.monotonic", lambda: now[0])

    async def scenario() -> None:
        budget = InFlight(100)
        assert budget.oldest() is None
        held = []
        for moment in (100.0, 110.0, 130.0):
            now[0] = moment
            held.append(await budget.acquire(8))
        assert budget.oldest() == 30.0
        budget.release(8, held[1])
        assert budget.oldest() == 30.0
        budget.release(8, held[0])
        assert budget.oldest() == 0.0
        budget.release(8)
        assert budget.oldest() is None

    asyncio.run(scenario())


def test_out_of_memory_halves_and_good_work_brings_back() -> None:
    budget = InFlight(100)
    budget.halve()
    budget.halve()
    assert budget.limit == 25
    for _ in range(20):
        budget.recover()
    assert budget.limit == 100
    for _ in range(20):
        budget.halve()
    assert budget.limit == 1
