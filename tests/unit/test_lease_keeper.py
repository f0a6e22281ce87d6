"""When a lease may be renewed: work that advances, or a phase inside its deadline, and nothing else."""

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from worker import lease_keeper
from worker.capture.session import Ledger
from worker.lease_keeper import Held, Keeper, due, may_renew, observe


def _held(ledger: Ledger | None = None, phase_deadline: float = 0.0, advanced_at: float = 0.0) -> Held:
    return Held(
        task="task_A",
        worker="wrk_A",
        generation=1,
        secret="s",
        lease_seconds=30,
        valid_until=30,
        next_renewal=10,
        stall_seconds=60,
        phase="x",
        phase_deadline=phase_deadline,
        ledger=ledger,
        advanced_at=advanced_at,
    )


@pytest.mark.parametrize(("now", "renewed"), [(99.0, True), (100.0, False), (500.0, False)])
def test_a_phase_is_renewed_inside_its_deadline_only(now: float, renewed: bool) -> None:
    assert may_renew(_held(phase_deadline=100.0), now) is renewed


def test_captured_tokens_keep_a_lease_and_their_absence_loses_it(tmp_path: Path) -> None:
    ledger = Ledger.create(tmp_path / "ledger", [10, 10])
    held = _held(ledger)
    observe(held, now=100.0)
    assert may_renew(held, now=159.0)
    assert not may_renew(held, now=161.0)
    ledger.written[0] = 3
    observe(held, now=161.0)
    assert (held.rows, held.tokens) == (0, 3)
    assert may_renew(held, now=220.0)
    observe(held, now=230.0)
    assert not may_renew(held, now=230.0)


def test_progress_is_reported_sooner_than_a_third_of_the_lease(tmp_path: Path) -> None:
    ledger = Ledger.create(tmp_path / "ledger", [10, 10])
    held = _held(ledger)
    held.reported = (0, 0)
    observe(held, now=0.5)
    assert not due(held, now=1.5)
    ledger.written[0] = 3
    observe(held, now=1.5)
    assert not due(held, now=0.9)
    assert due(held, now=1.5)
    held.reported = (0, 3)
    assert not due(held, now=9.9)
    assert due(held, now=10.0)


def test_the_speed_is_that_of_the_present_ledger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    beats: list[dict[str, Any]] = []

    def answer(request: httpx.Request) -> httpx.Response:
        beats.append(json.loads(request.content))
        return httpx.Response(200, json={"lease_seconds": 30})

    clock = [100.0]
    monkeypatch.setattr(lease_keeper.time, "monotonic", lambda: clock[0])
    keeper = Keeper(httpx.Client(base_url="http://service", transport=httpx.MockTransport(answer)))
    lease = {"task": "task_A", "worker": "w", "generation": 1, "secret": "s", "lease_seconds": 30, "valid_until": 130}
    keeper.handle({"op": "hold", **lease, "stall_seconds": 60, "phase": "layout", "deadline_seconds": 60})
    clock[0] += 10
    keeper.tick()
    # The second engine's ledger begins with what the first one wrote.
    for name, before in (("first", 0), ("second", 800)):
        ledger = Ledger.create(tmp_path / name, [10_000])
        ledger.written[0] = before
        phase = {"op": "phase", "task": "task_A", "phase": "prefill", "deadline_seconds": 60}
        keeper.handle({**phase, "ledger": str(ledger.path)})
        keeper.tick()
        clock[0] += 2
        ledger.written[0] += 700
        keeper.tick()
    speeds = [beat["tokens_per_second"] for beat in beats]
    assert speeds[0] is None
    assert {speed for speed in speeds if speed is not None} == {350.0}
    assert speeds.count(350.0) == 2
