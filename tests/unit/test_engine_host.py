"""Which engine runs: what becomes of one that would not end. The engine is a stand-in that refuses to."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from layertap.schemas.incidents import IncidentKind, IncidentReport
from layertap.schemas.shards import Pins
from layertap.schemas.workers import ModelFacts
from worker.engine.engine import Engine, EngineStopError
from worker.engine.host import EngineHost, EngineUnavailableError, _gpu_bytes_left, _Serving
from worker.engine.spec import EngineSpec
from worker.gauge import Gauge
from worker.settings import Settings
from worker.watchdog.guard import Guard
from worker.watchdog.rules import Limits

PINS = Pins(model_hash="-", tokenizer_hash="-", chat_template_hash=None, engine_version="0.5.23", dtype="BF16")


class Stubborn(Engine):
    """An engine that cannot be ended."""

    async def stop(self) -> None:
        raise EngineStopError("processes [7] of the engine survived SIGKILL for 10 s")


def _facts(name: str) -> ModelFacts:
    return ModelFacts(
        name=name, path="/models", num_layers=2, hidden_size=4, vocab_size=8, max_row_tokens=100, pins=PINS
    )


@pytest.fixture
def reports() -> list[IncidentReport]:
    """The incidents that the host reports."""
    return []


@pytest.fixture
def host(tmp_path: Path, reports: list[IncidentReport]) -> EngineHost:
    """A host whose engine serves `old` and cannot be ended."""

    async def report(incident: IncidentReport) -> None:
        reports.append(incident)

    made = EngineHost(Settings(run_dir=tmp_path), "cpu", 1024, "wrk_1", report, list)
    spec = EngineSpec("/models", "BF16", "cpu", "0.5.23", installer=None)
    engine = Stubborn(spec, tmp_path, prefill_timeout=1)
    guard = Guard(engine, Limits(), lambda: 0, lambda: None)
    made._serving = _Serving(engine, guard, Gauge(engine, guard, made.budget), _facts("old"), None)
    made._last = "old"
    return made


@pytest.fixture
def full_run_dir(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing more can be written where the engine keeps its files."""

    def full(engine: Engine, applied: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Engine, "_spawn", full)


async def _fail() -> None:
    raise OSError(28, "No space left on device")


def test_an_engine_that_would_not_end_is_an_incident_and_no_other_is_started(
    host: EngineHost, reports: list[IncidentReport], tmp_path: Path
) -> None:
    with pytest.raises(EngineUnavailableError, match="survived SIGKILL"):
        asyncio.run(host.ensure(_facts("new")))
    (incident,) = reports
    assert incident.kind is IncidentKind.NOT_CLEANED_UP
    assert incident.model == "old"
    assert incident.processes_left == 1
    assert "survived SIGKILL" in incident.reason
    assert list((tmp_path / "incidents").glob("*.json"))


def test_a_worker_that_stops_says_so_too(host: EngineHost, reports: list[IncidentReport]) -> None:
    with pytest.raises(EngineStopError):
        asyncio.run(host.stop())
    assert [incident.kind for incident in reports] == [IncidentKind.NOT_CLEANED_UP]


def test_a_lane_that_is_cancelled_while_a_sick_engine_is_ended_ends_and_the_ending_goes_on(host: EngineHost) -> None:
    async def scenario() -> None:
        host._serving = None
        ended = asyncio.Event()

        async def end_it() -> None:
            await asyncio.sleep(0.1)
            ended.set()

        host._watch = asyncio.create_task(end_it())
        lanes = [asyncio.create_task(host.ensure(_facts("new"))) for _ in range(2)]
        await asyncio.sleep(0.01)
        for lane in lanes:
            lane.cancel()
        outcomes = await asyncio.gather(*lanes, return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [asyncio.CancelledError] * 2
        await asyncio.wait_for(ended.wait(), 10)

    asyncio.run(scenario())


def test_no_engine_starts_while_one_is_being_ended_for_a_lane_that_was_cancelled(
    host: EngineHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        seen: list[str] = []

        async def slow(engine: Engine) -> None:
            await asyncio.sleep(0.2)
            seen.append("ended")

        async def bring_up(facts: ModelFacts) -> None:
            seen.append("started")

        monkeypatch.setattr(Stubborn, "stop", slow)
        monkeypatch.setattr(host, "_bring_up", bring_up)
        lane = asyncio.create_task(host.ensure(_facts("new")))
        await asyncio.sleep(0.05)
        lane.cancel()
        await asyncio.wait({lane})
        assert lane.cancelled()
        await host.ensure(_facts("new"))
        assert seen == ["ended", "started"]

    asyncio.run(scenario())


def test_a_watch_that_failed_is_in_the_way_of_no_later_engine(host: EngineHost) -> None:
    async def scenario() -> None:
        host._watch = asyncio.create_task(_fail())
        for _ in range(2):
            with pytest.raises(EngineUnavailableError, match=r"survived SIGKILL|tried again in"):
                await host.ensure(_facts("new"))

    asyncio.run(scenario())


def test_a_watch_that_failed_keeps_no_engine_from_being_ended(host: EngineHost) -> None:
    async def scenario() -> None:
        host._watch = asyncio.create_task(_fail())
        await asyncio.sleep(0)
        with pytest.raises(EngineStopError):
            await host.stop()

    asyncio.run(scenario())


@pytest.fixture
def brought_up(host: EngineHost, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the host brings up: whatever it is asked to, and its engines can be ended."""
    names: list[str] = []

    async def end(engine: Engine) -> None:
        """There is nothing to end."""

    async def bring_up(facts: ModelFacts) -> None:
        assert host._serving is None
        names.append(facts.name)
        host._serving = replace(serving, facts=facts)

    serving = host._serving
    assert serving is not None
    monkeypatch.setattr(Stubborn, "stop", end)
    monkeypatch.setattr(Stubborn, "alive", True)
    monkeypatch.setattr(host, "_bring_up", bring_up)
    return names


def test_an_engine_that_is_kept_for_a_shard_is_not_given_to_another_model(
    host: EngineHost, brought_up: list[str]
) -> None:
    async def scenario() -> None:
        async with host.kept("old"):
            other = asyncio.create_task(host.ensure(_facts("new")))
            await asyncio.sleep(0.05)
            # Between its lease and its first row a shard uses no engine: it lays its file out.
            async with host.use("old"):
                await asyncio.sleep(0.05)
            await asyncio.sleep(0.05)
            assert (brought_up, host.model) == ([], "old")
        await asyncio.wait_for(other, 10)
        assert host.model == "new"

    asyncio.run(scenario())


def test_two_shards_of_different_models_take_turns_where_neither_is_served(
    host: EngineHost, brought_up: list[str]
) -> None:
    async def scenario() -> None:

        async def shard(name: str) -> None:
            async with host.kept(name):
                await host.ensure(_facts(name))
                await asyncio.sleep(0.05)
                async with host.use(name):
                    await asyncio.sleep(0.05)

        await asyncio.wait_for(asyncio.gather(*(shard(name) for name in ("one", "two", "one", "two"))), 10)
        assert brought_up == ["one", "two"]

    asyncio.run(scenario())


def test_a_model_whose_engine_died_makes_no_room_for_another_while_a_shard_needs_it(
    host: EngineHost, brought_up: list[str]
) -> None:
    async def scenario() -> None:
        async with host.kept("old"):
            other = asyncio.create_task(host.ensure(_facts("new")))
            for _ in range(3):
                host._serving = None
                # As a shard does, which waits a moment before it asks for an engine again.
                await asyncio.sleep(0.05)
                await host.ensure(_facts("old"))
            assert brought_up == ["old"] * 3
        await asyncio.wait_for(other, 10)
        assert brought_up == ["old"] * 3 + ["new"]

    asyncio.run(scenario())


def test_leaving_an_engine_waits_for_no_launch(
    host: EngineHost, brought_up: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        launching = asyncio.Event()

        async def never(facts: ModelFacts) -> None:
            launching.set()
            await asyncio.Event().wait()

        monkeypatch.setattr(host, "_bring_up", never)
        async with host.kept("other"):
            lane = asyncio.create_task(host.ensure(_facts("new")))
            await launching.wait()
        lane.cancel()
        await asyncio.wait({lane})

    asyncio.run(asyncio.wait_for(scenario(), 10))


def test_no_engine_is_started_beside_what_is_left_of_another(host: EngineHost, monkeypatch: pytest.MonkeyPatch) -> None:
    def survives(directory: Path) -> int:
        raise EngineStopError(f"processes [7] of the engine in {directory} survived SIGKILL for 10 s")

    async def launch(*args: object) -> None:
        raise AssertionError("an engine was started")

    async def scenario() -> None:
        host._serving = None
        monkeypatch.setattr("worker.engine.host.end_marked", survives)
        monkeypatch.setattr(host, "_launch", launch)
        with pytest.raises(EngineUnavailableError, match=r"processes \[7\]"):
            await host.ensure(_facts("new"))

    asyncio.run(scenario())


def test_a_run_directory_that_takes_nothing_is_an_incident_and_not_the_end_of_the_worker(
    host: EngineHost, reports: list[IncidentReport], full_run_dir: None
) -> None:
    async def scenario() -> None:
        host._serving = None
        with pytest.raises(EngineUnavailableError, match="No space left on device"):
            await host.ensure(_facts("new"))
        (incident,) = reports
        assert incident.kind is IncidentKind.DIED_LAUNCHING

    asyncio.run(scenario())


def test_a_worker_that_stops_waits_for_an_engine_that_is_being_ended(
    host: EngineHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        ended = asyncio.Event()

        async def slow(engine: Engine) -> None:
            await asyncio.sleep(0.2)
            ended.set()

        monkeypatch.setattr(Stubborn, "stop", slow)
        lane = asyncio.create_task(host.ensure(_facts("new")))
        await asyncio.sleep(0.05)
        lane.cancel()
        await asyncio.wait({lane})
        assert not ended.is_set()
        await host.stop()
        assert ended.is_set()

    asyncio.run(scenario())


def test_the_first_failure_is_reported_where_no_second_start_can_be_made(
    host: EngineHost, reports: list[IncidentReport], full_run_dir: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    swept = 0

    def sweep(directory: Path) -> int:
        nonlocal swept
        swept += 1
        if swept > 1:
            raise OSError(5, "Input/output error")
        return 0

    async def scenario() -> None:
        host._serving = None
        monkeypatch.setattr("worker.engine.host.end_marked", sweep)
        with pytest.raises(EngineUnavailableError, match="could not be looked for"):
            await host.ensure(_facts("new"))
        (incident,) = reports
        assert "No space left" in incident.reason
        assert "Input/output error" in incident.tried[-1]

    asyncio.run(scenario())


def test_a_driver_that_says_nothing_after_the_end_leaves_the_memory_unknown(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async def scenario() -> None:
        engine = Stubborn(EngineSpec("/models", "BF16", "cpu", "0.5.23", installer=None), tmp_path, prefill_timeout=1)
        monkeypatch.setattr("worker.engine.host.gpu_bytes_used", lambda names: None)
        assert await _gpu_bytes_left(engine, 70 << 30) is None

    asyncio.run(scenario())
