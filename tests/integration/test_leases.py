"""What leases promise, on SQLite and on Postgres."""

import threading
import uuid
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from fixtures_service import LEASE_SECONDS, PINS, Clock, Rig, in_threads, open_rig, proof, settings_for

from service.leases import Next, TaskState
from service.tasks import repository

VERBS: dict[str, dict[str, Any]] = {
    "heartbeat": {},
    "row-errors": {"errors": []},
    "commit-shard": {"bytes": 10, "sha256": "0" * 64, "rows": 1, "tokens": 7},
    "fail": {"code": "boom", "reason": "it broke"},
    "release": {},
}


@pytest.fixture(autouse=True)
def worker(rig: Rig) -> str:
    """A registered worker."""
    return rig.register()


def test_shards_are_given_out_oldest_job_first_and_in_order(rig: Rig) -> None:
    first, second = rig.planned(2), rig.planned(2)
    order = [(lease["job"], lease["shard"]["index"]) for lease in (rig.lease() for _ in range(4))]
    assert order == [(first, 0), (first, 1), (second, 0), (second, 1)]


def test_a_claim_that_is_repeated_returns_the_same_lease(rig: Rig, clock: Clock) -> None:
    rig.planned(2)
    request_id = uuid.uuid4().hex
    first = rig.lease(request_id=request_id)
    assert rig.lease(request_id=request_id) == first
    rig.commit_shard(first)
    assert rig.lease(request_id=request_id)["task"] != first["task"]


def test_a_repeated_claim_starts_the_term_anew(rig: Rig, clock: Clock) -> None:
    rig.planned(1)
    request_id = uuid.uuid4().hex
    rig.lease(request_id=request_id)
    clock.seconds += LEASE_SECONDS - 1
    lease = rig.lease(request_id=request_id)
    clock.seconds += LEASE_SECONDS - 1
    rig.upkeep()
    rig.commit_shard(lease)


@pytest.mark.parametrize("verb", VERBS)
def test_a_stale_generation_is_refused_whatever_it_asks(rig: Rig, clock: Clock, verb: str) -> None:
    rig.planned(1)
    old = rig.lease()
    rig.write_shard(old)
    clock.seconds += LEASE_SECONDS
    rig.upkeep()
    new = rig.lease()
    assert (new["task"], new["generation"]) == (old["task"], old["generation"] + 1)
    rig.refused(f"/v1/tasks/{old['task']}/{verb}", {**proof(old), **VERBS[verb]}, "lease_lost")
    rig.refused(f"/v1/tasks/{old['task']}/{verb}", {**proof(new), "secret": old["secret"], **VERBS[verb]}, "lease_lost")
    mixed = {**proof(new), "generation": old["generation"], **VERBS[verb]}
    rig.refused(f"/v1/tasks/{old['task']}/{verb}", mixed, "lease_lost")
    rig.commit_shard(new)


def test_an_expiry_that_comes_too_late_changes_nothing(rig: Rig, clock: Clock) -> None:
    rig.planned(1)
    lease = rig.lease()
    clock.seconds += LEASE_SECONDS
    with rig.context.database.read() as session:
        (found,) = repository.expired(session, rig.context.database.clock, 10)
    rig.post(f"/v1/tasks/{lease['task']}/heartbeat", proof(lease))
    after = Next(TaskState.READY, 0, 1)
    with rig.context.database.write() as session:
        changed = repository.expire(
            session, rig.context.database.clock, found, lease["generation"], after, ("lease_expired", "late")
        )
    assert not changed
    rig.commit_shard(lease)


def test_a_stale_plan_is_refused(rig: Rig, clock: Clock) -> None:
    job = rig.job()
    old = rig.lease()
    clock.seconds += LEASE_SECONDS
    rig.upkeep()
    new = rig.lease()
    assert new["plan"]["tokens_dir"] != old["plan"]["tokens_dir"]
    rig.refused(f"/v1/tasks/{old['task']}/commit-plan", rig.plan(old), "lease_lost")
    rig.commit_plan(new)
    assert rig.state(job)["state"] == "running"


def test_an_expired_lease_cannot_commit(rig: Rig, clock: Clock) -> None:
    rig.planned(1)
    lease = rig.lease()
    body = rig.write_shard(lease)
    clock.seconds += LEASE_SECONDS
    rig.upkeep()
    rig.refused(f"/v1/tasks/{lease['task']}/commit-shard", body, "lease_lost")


def test_a_claim_finds_an_expired_lease_without_waiting_for_upkeep(rig: Rig, clock: Clock) -> None:
    rig.planned(1)
    lease = rig.lease()
    clock.seconds += LEASE_SECONDS
    assert rig.lease()["task"] == lease["task"]


def test_a_start_on_sqlite_grants_running_leases_a_full_term_on_a_clock_that_starts_anew(tmp_path: Path) -> None:
    settings = settings_for(f"sqlite:///{tmp_path}/anew.sqlite3", tmp_path / "anew")
    with open_rig(settings, Clock(5000.0)) as before:
        before.register()
        before.planned(1)
        lease = before.lease()
    clock = Clock(3.0)
    with open_rig(settings, clock) as after:
        for seconds in (0.0, LEASE_SECONDS - 1):
            clock.seconds += seconds
            after.upkeep()
            assert after.claim()["lease"] is None
            assert after.client.get("/v1/workers").json()["data"][0]["state"] == "active"
        clock.seconds += 1
        again = after.lease()
        assert (again["task"], again["generation"]) == (lease["task"], 2)


def test_a_heartbeat_keeps_a_lease(rig: Rig, clock: Clock) -> None:
    job = rig.planned(1, rows=3)
    lease = rig.lease()
    for _ in range(3):
        clock.seconds += LEASE_SECONDS - 1
        body = {**proof(lease), "rows_done": 2, "tokens_done": 14}
        assert rig.post(f"/v1/tasks/{lease['task']}/heartbeat", body)["lease_seconds"] == LEASE_SECONDS
        rig.upkeep()
    progress = rig.state(job)["progress"]
    assert (progress["rows_done"], progress["tokens_done"], progress["shards_done"]) == (2, 14, 0)
    rig.commit_shard(lease)


def test_three_failures_end_a_shard_and_the_job_ends_failed_with_the_rest(rig: Rig) -> None:
    job = rig.planned(2)
    rig.commit_shard(rig.lease())
    states = [rig.fail(rig.lease())["state"] for _ in range(3)]
    assert states == ["ready", "ready", "failed"]
    rig.upkeep()
    done = rig.state(job)
    assert done["state"] == "failed"
    assert done["failure"]["code"] == "shards_failed"
    assert "boom: it broke" in done["failure"]["reason"]
    manifest = rig.client.get(f"/v1/jobs/{job}/manifest").json()
    assert not manifest["complete"]
    assert len(manifest["shards"]) == 1


def test_a_failure_that_is_not_retryable_ends_a_plan_and_its_job(rig: Rig) -> None:
    job = rig.job()
    assert rig.fail(rig.lease(), retryable=False)["state"] == "failed"
    rig.upkeep()
    assert rig.state(job)["failure"] == {"code": "boom", "reason": "it broke"}


def test_ten_expiries_end_a_shard(rig: Rig, clock: Clock) -> None:
    job = rig.planned(1)
    for _ in range(10):
        rig.lease()
        clock.seconds += LEASE_SECONDS
        rig.upkeep()
    assert rig.claim()["lease"] is None
    assert rig.state(job)["state"] == "failed"
    assert "lease_expired" in rig.state(job)["failure"]["reason"]


def test_a_released_lease_costs_nothing(rig: Rig) -> None:
    rig.planned(1)
    for _ in range(12):
        lease = rig.lease()
        assert rig.post(f"/v1/tasks/{lease['task']}/release", proof(lease))["state"] == "ready"
    rig.commit_shard(rig.lease())


def test_a_worker_that_says_goodbye_releases_its_leases(rig: Rig) -> None:
    rig.planned(2)
    held = {rig.lease()["task"], rig.lease()["task"]}
    assert rig.post("/v1/workers/wrk_aaaaaaaa/goodbye", {})["state"] == "gone"
    rig.refused(
        "/v1/tasks/claim",
        {"worker": "wrk_aaaaaaaa", "request_id": "r" * 8, "kinds": ["shard"]},
        "unknown_worker",
    )
    rig.register("wrk_bbbbbbbb")
    assert {rig.lease("wrk_bbbbbbbb")["task"], rig.lease("wrk_bbbbbbbb")["task"]} == held


def test_a_worker_with_another_model_loaded_is_told_to_load_the_waiting_one(rig: Rig) -> None:
    rig.register("wrk_aaaaaaaa", "tiny", "other")
    rig.planned(1)
    assert rig.claim(loaded="other") == {"lease": None, "load_model": "tiny", "retry_after_seconds": 1.0}
    assert rig.claim(loaded=None)["load_model"] == "tiny"
    assert rig.claim(loaded="tiny")["lease"] is not None


def test_a_worker_whose_pins_differ_is_given_none_of_the_jobs_shards(rig: Rig) -> None:
    rig.planned(1)
    rig.register("wrk_bbbbbbbb", pins={**PINS, "engine_version": "0.5.22"})
    answer = rig.claim("wrk_bbbbbbbb")
    assert answer["lease"] is None
    assert answer["load_model"] is None
    assert rig.claim("wrk_aaaaaaaa")["lease"] is not None


def test_a_plan_is_given_only_to_workers_that_know_the_model(rig: Rig) -> None:
    rig.job()
    rig.register("wrk_bbbbbbbb", "other")
    assert rig.claim("wrk_bbbbbbbb")["lease"] is None
    assert rig.claim("wrk_aaaaaaaa", loaded=None)["lease"]["kind"] == "plan"


def test_a_silent_worker_counts_as_lost_and_speaks_itself_back(rig: Rig, clock: Clock) -> None:
    clock.seconds += LEASE_SECONDS
    rig.upkeep()
    assert rig.client.get("/v1/workers").json()["data"][0]["state"] == "lost"
    assert rig.post("/v1/workers/wrk_aaaaaaaa/control", {"draining": True})["known"]
    assert rig.client.get("/v1/workers").json()["data"][0]["state"] == "draining"
    assert not rig.post("/v1/workers/wrk_zzzzzzzz/control", {})["known"]


def test_a_task_that_does_not_exist_is_not_found(rig: Rig) -> None:
    for verb, body in VERBS.items():
        rig.refused(
            f"/v1/tasks/task_none/{verb}", {"worker": "w", "generation": 1, "secret": "s", **body}, "task_not_found"
        )


def test_eight_claimers_are_given_each_of_500_tasks_exactly_once(rig: Rig) -> None:
    for number in range(8):
        rig.register(f"wrk_claimer{number}")
    rig.planned(500)
    claimed: Counter[tuple[str, int]] = Counter()
    lock = threading.Lock()

    def work(number: int) -> None:
        while lease := rig.claim(f"wrk_claimer{number}")["lease"]:
            with lock:
                claimed[lease["task"], lease["generation"]] += 1

    in_threads(8, work)
    assert len(claimed) == 500
    assert set(claimed.values()) == {1}
    assert {generation for _, generation in claimed} == {1}


def test_one_claim_sent_many_times_at_once_is_given_one_lease(rig: Rig) -> None:
    rig.planned(20)
    request_id = uuid.uuid4().hex
    leases: list[dict[str, Any]] = []
    in_threads(8, lambda _: leases.append(rig.lease(request_id=request_id)))
    assert len({(lease["task"], lease["generation"], lease["secret"]) for lease in leases}) == 1
