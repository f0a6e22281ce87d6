"""What the service remembers of workers, and for how long, on SQLite and on Postgres."""

from datetime import timedelta

import pytest
from fixtures_service import LEASE_SECONDS, Clock, Rig, proof
from sqlalchemy import select, update

from service.db.clock import utc_now
from service.db.models import Task, Worker, WorkerModel
from service.leases import TaskState

WEEK = timedelta(days=7)


def last_seen(rig: Rig, worker: str, ago: timedelta) -> None:
    """As if the worker had spoken last so long ago."""
    with rig.context.database.write() as session:
        session.execute(update(Worker).where(Worker.id == worker).values(seen_at=utc_now() - ago))


def listed(rig: Rig) -> dict[str, str]:
    """The states of the workers that the service knows."""
    return {worker["id"]: worker["state"] for worker in rig.client.get("/v1/workers").json()["data"]}


@pytest.mark.parametrize("goodbye", [True, False])
def test_a_worker_that_ended_or_fell_silent_is_forgotten_after_a_week(rig: Rig, clock: Clock, goodbye: bool) -> None:
    rig.register("wrk_aaaaaaaa")
    if goodbye:
        rig.post("/v1/workers/wrk_aaaaaaaa/goodbye", {})
    clock.seconds += LEASE_SECONDS
    rig.register("wrk_bbbbbbbb", "other")
    last_seen(rig, "wrk_aaaaaaaa", WEEK - timedelta(minutes=1))
    rig.upkeep()
    assert listed(rig) == {"wrk_aaaaaaaa": "gone" if goodbye else "lost", "wrk_bbbbbbbb": "active"}
    last_seen(rig, "wrk_aaaaaaaa", WEEK + timedelta(minutes=1))
    rig.upkeep()
    assert listed(rig) == {"wrk_bbbbbbbb": "active"}
    with rig.context.database.read() as session:
        assert session.scalars(select(WorkerModel.worker_id)).all() == ["wrk_bbbbbbbb"]
    # Jobs may name its models still.
    assert [model["name"] for model in rig.client.get("/v1/models").json()["data"]] == ["other", "tiny"]


def test_a_worker_that_is_present_is_kept_whatever_the_wall_clock_says(rig: Rig) -> None:
    rig.register()
    last_seen(rig, "wrk_aaaaaaaa", 100 * WEEK)
    rig.upkeep()
    assert listed(rig) == {"wrk_aaaaaaaa": "active"}


def test_a_worker_with_an_incident_is_kept_as_long_as_the_incident(rig: Rig, clock: Clock) -> None:
    for worker in ("wrk_aaaaaaaa", "wrk_bbbbbbbb"):
        rig.register(worker)
    incident = {
        "id": "inc_00000001",
        "worker": "wrk_aaaaaaaa",
        "model": "tiny",
        "kind": "died_idle",
        "phase": "idle",
        "reason": "the server process ended while idle",
        "happened_at": "2026-11-30T02:15:42Z",
    }
    rig.post("/v1/incidents", incident, 201)
    clock.seconds += LEASE_SECONDS
    for worker in ("wrk_aaaaaaaa", "wrk_bbbbbbbb"):
        last_seen(rig, worker, 2 * WEEK)
    rig.upkeep()
    assert listed(rig) == {"wrk_aaaaaaaa": "lost"}
    assert rig.client.get("/v1/incidents/inc_00000001").json()["worker"] == "wrk_aaaaaaaa"


def test_a_worker_that_holds_a_lease_is_kept_and_what_it_committed_outlives_it(rig: Rig, clock: Clock) -> None:
    rig.register()
    job = rig.planned(2)
    rig.commit_shard(rig.lease())
    held = rig.lease()
    with rig.context.database.write() as session:
        session.execute(update(Worker).values(state="lost", seen_at=utc_now() - 2 * WEEK))
    rig.upkeep()
    assert listed(rig) == {"wrk_aaaaaaaa": "lost"}
    rig.post(f"/v1/tasks/{held['task']}/release", proof(held))
    rig.upkeep()
    assert listed(rig) == {}
    with rig.context.database.read() as session:
        done = session.scalar(
            select(Task).where(Task.job_id == job, Task.kind == "shard", Task.state == TaskState.DONE)
        )
        assert done is not None
    rig.register("wrk_bbbbbbbb")
    lease = rig.lease("wrk_bbbbbbbb")
    rig.post(f"/v1/tasks/{lease['task']}/commit-shard", {**rig.write_shard(lease), "worker": "wrk_bbbbbbbb"})
    rig.upkeep()
    assert rig.state(job)["state"] == "succeeded"


def test_a_worker_that_comes_back_after_it_was_forgotten_is_told_to_register(rig: Rig, clock: Clock) -> None:
    rig.register()
    clock.seconds += LEASE_SECONDS
    last_seen(rig, "wrk_aaaaaaaa", 2 * WEEK)
    rig.upkeep()
    assert not rig.post("/v1/workers/wrk_aaaaaaaa/control", {})["known"]
    rig.register()
    assert listed(rig) == {"wrk_aaaaaaaa": "active"}
