"""What leases promise, on SQLite and on Postgres."""

import threading
import uuid
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from fixtures_service import LEASE_SECONDS, PINS, Clock, Rig, open_rig, proof, settings_for, wait_until

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


def finish(rig: Rig) -> None:
    """Claim and commit whatever is claimable."""
    while lease := rig.claim()["lease"]:
        rig.commit_shard(lease)
    rig.upkeep()


def test_a_job_goes_from_queued_to_succeeded(rig: Rig) -> None:
    job = rig.job()
    assert rig.state(job)["state"] == "queued"
    plan = rig.lease()
    assert rig.state(job)["state"] == "planning"
    assert plan["plan"]["tokens_dir"] == f"jobs/{job}/tokens.g1"
    rig.commit_plan(plan, 2)
    assert rig.state(job)["state"] == "running"
    finish(rig)
    done = rig.state(job)
    assert done["state"] == "succeeded"
    assert done["progress"] | {"tokens_per_second": None} == {
        "rows_total": 2,
        "rows_done": 2,
        "row_errors": 1,
        "tokens_total": 14,
        "tokens_done": 14,
        "bytes_total": 20,
        "shards_total": 2,
        "shards_done": 2,
        "tokens_per_second": None,
        "eta_seconds": None,
    }
    manifest = rig.client.get(f"/v1/jobs/{job}/manifest").json()
    assert manifest["complete"]
    assert [shard["index"] for shard in manifest["shards"]] == [0, 1]
    assert manifest["layers"] == [0, 3]
    assert manifest["engine"] == {"version": "0.5.23"}


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


def test_a_commit_repeated_after_a_lost_reply_is_answered_and_counted_once(rig: Rig) -> None:
    job = rig.planned(1)
    lease = rig.lease()
    body = rig.write_shard(lease)
    path = f"/v1/tasks/{lease['task']}/commit-shard"
    assert rig.post(path, body)["state"] == "done"
    assert rig.post(path, body)["state"] == "done"
    rig.upkeep()
    assert rig.post(path, body)["state"] == "done"
    done = rig.state(job)
    assert (done["state"], done["progress"]["rows_done"], done["progress"]["shards_done"]) == ("succeeded", 1, 1)
    rig.refused(path, {**body, "sha256": "0" * 64}, "lease_lost")


def test_a_plan_repeated_after_a_lost_reply_makes_its_shards_once(rig: Rig) -> None:
    job = rig.job()
    lease = rig.lease()
    rig.commit_plan(lease, 3)
    assert rig.commit_plan(lease, 3)["state"] == "done"
    assert rig.state(job)["progress"]["shards_total"] == 3
    finish(rig)
    assert rig.state(job)["progress"]["shards_done"] == 3


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


def test_a_commit_without_its_file_is_refused_and_the_lease_stays(rig: Rig) -> None:
    rig.planned(1)
    lease = rig.lease()
    body = rig.write_shard(lease, b"0123456789")
    path = f"/v1/tasks/{lease['task']}/commit-shard"
    assert "has 10 bytes" in rig.refused(path, {**body, "bytes": 11}, "shard_missing")["detail"]
    (rig.storage / lease["shard"]["file"]).unlink()
    rig.refused(path, body, "shard_missing")
    rig.commit_shard(lease)


def test_a_shard_that_loses_a_row_silently_is_refused(rig: Rig) -> None:
    rig.planned(1, rows=3)
    lease = rig.lease()
    body = rig.write_shard(lease)
    path = f"/v1/tasks/{lease['task']}/commit-shard"
    rig.refused(path, {**body, "rows": 2}, "rows_do_not_add_up")
    rig.refused(path, {**body, "rows": 2, "row_errors": 1}, "row_errors_do_not_add_up")


def test_row_errors_count_once_their_lease_has_committed(rig: Rig, clock: Clock) -> None:
    job = rig.planned(1, rows=3)
    old = rig.lease()
    report = {"errors": [{"row_id": 4, "code": "nan", "reason": "not finite"}]}
    rig.post(f"/v1/tasks/{old['task']}/row-errors", {**proof(old), **report})
    clock.seconds += LEASE_SECONDS
    rig.upkeep()
    lease = rig.lease()
    report["errors"][0]["row_id"] = 1
    for _ in range(2):
        rig.post(f"/v1/tasks/{lease['task']}/row-errors", {**proof(lease), **report})
    assert [error["row_id"] for error in errors_of(rig, job)] == [2]
    body = {**rig.write_shard(lease), "rows": 2, "row_errors": 1}
    rig.post(f"/v1/tasks/{lease['task']}/commit-shard", body)
    assert [(error["row_id"], error["stage"]) for error in errors_of(rig, job)] == [(1, "extract"), (2, "upload")]
    assert rig.state(job)["progress"]["row_errors"] == 2


def test_errors_of_a_job_are_paged_by_row(rig: Rig) -> None:
    job = rig.job()
    lease = rig.lease()
    errors = [{"row_id": row, "code": "too_long", "reason": "r"} for row in (9, 0, 1)]
    rig.post(f"/v1/tasks/{lease['task']}/row-errors", {**proof(lease), "errors": errors})
    rig.commit_plan(lease)
    page = rig.client.get(f"/v1/jobs/{job}/errors", params={"limit": 2}).json()
    assert ([error["row_id"] for error in page["data"]], page["has_more"]) == ([0, 1], True)
    page = rig.client.get(f"/v1/jobs/{job}/errors", params={"limit": 2, "after": page["last_id"]}).json()
    assert [(error["row_id"], error["line"], error["stage"]) for error in page["data"]] == [
        (2, 3, "upload"),
        (9, 10, "plan"),
    ]
    assert not page["has_more"]


def errors_of(rig: Rig, job: str) -> list[dict[str, Any]]:
    """All errors of a job."""
    return list(rig.client.get(f"/v1/jobs/{job}/errors").json()["data"])


def test_a_shard_all_of_whose_rows_failed_commits_without_a_file(rig: Rig) -> None:
    job = rig.planned(2)
    lease = rig.lease()
    report = {"errors": [{"row_id": 0, "code": "nan", "reason": "not finite"}]}
    rig.post(f"/v1/tasks/{lease['task']}/row-errors", {**proof(lease), **report})
    empty = {"bytes": 0, "sha256": "", "rows": 0, "tokens": 0, "row_errors": 1}
    rig.post(f"/v1/tasks/{lease['task']}/commit-shard", {**proof(lease), **empty})
    finish(rig)
    assert rig.state(job)["state"] == "succeeded"
    assert [shard["index"] for shard in rig.client.get(f"/v1/jobs/{job}/shards").json()["data"]] == [1]


def test_a_plan_without_rows_fails_the_job_and_lists_why(rig: Rig) -> None:
    job = rig.job()
    lease = rig.lease()
    errors = [{"row_id": row, "code": "too_long", "reason": "r"} for row in (0, 1, 4)]
    rig.post(f"/v1/tasks/{lease['task']}/row-errors", {**proof(lease), "errors": errors})
    rig.commit_plan(lease, 0)
    rig.upkeep()
    assert rig.state(job)["failure"]["code"] == "no_rows"
    assert [error["row_id"] for error in errors_of(rig, job)] == [0, 1, 2, 4]


def test_a_plan_that_does_not_fit_the_storage_fails_the_job_before_any_shard_is_given_out(rig: Rig) -> None:
    job = rig.job()
    free = rig.context.storage.free_bytes()
    assert rig.commit_plan(rig.lease(), 1, size=2 * free)["state"] == "failed"
    rig.upkeep()
    assert rig.state(job)["failure"]["code"] == "not_enough_space"
    assert rig.claim()["lease"] is None


def test_what_a_running_job_has_reserved_is_not_promised_twice(rig: Rig) -> None:
    free = rig.context.storage.free_bytes()
    rig.planned(1, size=free * 2 // 3)
    second = rig.job()
    assert rig.commit_plan(rig.lease(kinds=["plan"]), 1, size=free * 2 // 3)["state"] == "failed"
    rig.upkeep()
    assert rig.state(second)["failure"]["code"] == "not_enough_space"


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"rows": 5}, "plan_does_not_add_up"),
        ({"tokens": 5}, "plan_does_not_add_up"),
        ({"shards": [{"first_row": 1, "rows": 1, "tokens": 7, "bytes": 10}], "rows": 1}, "plan_has_gaps"),
    ],
)
def test_a_plan_that_loses_rows_is_refused(rig: Rig, change: dict[str, Any], code: str) -> None:
    rig.job()
    lease = rig.lease()
    rig.refused(f"/v1/tasks/{lease['task']}/commit-plan", {**rig.plan(lease), **change}, code)


def test_a_cancelled_job_keeps_its_committed_shards_and_drops_the_rest(rig: Rig) -> None:
    job = rig.planned(3)
    rig.commit_shard(rig.lease())
    held = rig.lease()
    answer = rig.client.post(f"/v1/jobs/{job}/cancel")
    assert (answer.status_code, answer.json()["state"]) == (202, "cancelling")
    assert rig.claim()["lease"] is None
    control = {"held": [{"task": held["task"], "generation": held["generation"]}], "loaded_model": "tiny"}
    assert rig.post("/v1/workers/wrk_aaaaaaaa/control", control)["drop"] == [held["task"]]
    rig.upkeep()
    assert rig.state(job)["state"] == "cancelling"
    assert rig.post(f"/v1/tasks/{held['task']}/release", proof(held))["state"] == "cancelled"
    rig.upkeep()
    assert rig.state(job)["state"] == "cancelled"
    manifest = rig.client.get(f"/v1/jobs/{job}/manifest").json()
    assert (manifest["complete"], len(manifest["shards"])) == (False, 1)
    assert rig.client.post(f"/v1/jobs/{job}/cancel").json()["state"] == "cancelled"


def test_a_queued_job_is_cancelled_at_once(rig: Rig) -> None:
    job = rig.job()
    rig.client.post(f"/v1/jobs/{job}/cancel")
    rig.upkeep()
    assert rig.state(job)["state"] == "cancelled"


def test_a_plan_committed_while_its_job_is_cancelled_makes_no_shards(rig: Rig) -> None:
    job = rig.job()
    lease = rig.lease()
    rig.client.post(f"/v1/jobs/{job}/cancel")
    assert rig.commit_plan(lease)["state"] == "cancelled"
    rig.upkeep()
    assert rig.state(job)["state"] == "cancelled"


def test_the_lease_of_a_dead_worker_does_not_keep_a_cancelled_job_open(rig: Rig, clock: Clock) -> None:
    job = rig.planned(1)
    rig.lease()
    rig.client.post(f"/v1/jobs/{job}/cancel")
    clock.seconds += LEASE_SECONDS
    rig.upkeep()
    assert rig.state(job)["state"] == "cancelled"


def test_a_retry_queues_only_what_was_not_committed(rig: Rig) -> None:
    job = rig.planned(3)
    kept = rig.lease()
    rig.commit_shard(kept)
    rig.fail(rig.lease(), retryable=False)
    finish(rig)
    assert rig.state(job)["state"] == "failed"
    assert rig.client.post(f"/v1/jobs/{job}/retry").json()["state"] == "running"
    lease = rig.lease()
    assert (lease["shard"]["index"], lease["generation"]) == (1, 2)
    rig.commit_shard(lease)
    rig.upkeep()
    done = rig.state(job)
    assert (done["state"], done["failure"], done["progress"]["shards_done"]) == ("succeeded", None, 3)
    assert rig.client.get(f"/v1/jobs/{job}/manifest").json()["complete"]


def test_a_retry_of_a_cancelled_job_plans_again_where_there_is_no_plan(rig: Rig) -> None:
    job = rig.job()
    rig.client.post(f"/v1/jobs/{job}/cancel")
    rig.upkeep()
    assert rig.client.post(f"/v1/jobs/{job}/retry").json()["state"] == "queued"
    rig.commit_plan(rig.lease())
    finish(rig)
    assert rig.state(job)["state"] == "succeeded"


def test_retry_and_delete_fit_their_states_only(rig: Rig) -> None:
    job = rig.planned(1)
    assert rig.client.post(f"/v1/jobs/{job}/retry").json()["code"] == "job_not_retryable"
    assert rig.client.delete(f"/v1/jobs/{job}").json()["code"] == "job_not_over"
    finish(rig)
    assert rig.client.post(f"/v1/jobs/{job}/retry").json()["code"] == "job_not_retryable"
    assert rig.client.post(f"/v1/jobs/{job}/cancel").json()["code"] == "job_over"
    assert rig.client.delete(f"/v1/jobs/{job}").status_code == 204
    assert rig.client.get(f"/v1/jobs/{job}").status_code == 404
    assert not (rig.storage / "jobs" / job).exists()


def test_files_of_lost_generations_are_gone_when_the_job_ends(rig: Rig, clock: Clock) -> None:
    job = rig.planned(1)
    rig.write_shard(rig.lease())
    clock.seconds += LEASE_SECONDS
    rig.commit_shard(rig.lease())
    rig.upkeep()
    names = {file.name for file in (rig.storage / "jobs" / job / "shards").iterdir()}
    assert names == {"shard-00000.g2.safetensors"}


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


def in_threads(count: int, work: Any) -> None:
    """Run `work(n)` in so many threads at once; fails if one of them does."""
    failures: list[BaseException] = []
    barrier = threading.Barrier(count)

    def run(number: int) -> None:
        try:
            barrier.wait(10)
            work(number)
        except BaseException as error:  # noqa: BLE001 (told to the test's own thread)
            failures.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not failures, failures


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


def test_shards_committed_at_once_are_each_counted(rig: Rig) -> None:
    job = rig.planned(40)
    held = [rig.lease() for _ in range(40)]

    def work(number: int) -> None:
        for lease in held[number::8]:
            rig.commit_shard(lease)

    in_threads(8, work)
    rig.upkeep()
    done = rig.state(job)
    assert (done["state"], done["progress"]["shards_done"]) == ("succeeded", 40)


def test_cancel_against_claims_leaves_no_task_behind(rig: Rig) -> None:
    job = rig.planned(60)
    held: list[dict[str, Any]] = []

    def work(number: int) -> None:
        if number == 0:
            wait_until(lambda: len(held) > 5)
            assert rig.client.post(f"/v1/jobs/{job}/cancel").status_code == 202
            return
        while lease := rig.claim()["lease"]:
            held.append(lease)

    in_threads(6, work)
    for lease in held:
        rig.post(f"/v1/tasks/{lease['task']}/release", proof(lease))
    rig.upkeep()
    assert rig.state(job)["state"] == "cancelled"
