"""The states of a job, its cancellation and its retry, on SQLite and on Postgres."""

from typing import Any

import pytest
from fixtures_service import LEASE_SECONDS, Clock, Rig, in_threads, proof, wait_until


@pytest.fixture(autouse=True)
def worker(rig: Rig) -> str:
    """A registered worker."""
    return rig.register()


def test_a_job_goes_from_queued_to_succeeded(rig: Rig) -> None:
    job = rig.job()
    assert rig.state(job)["state"] == "queued"
    plan = rig.lease()
    assert rig.state(job)["state"] == "planning"
    assert plan["plan"]["tokens_dir"] == f"jobs/{job}/tokens.g1"
    rig.commit_plan(plan, 2)
    assert rig.state(job)["state"] == "running"
    rig.finish()
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
        "now": None,
        "eta_seconds": None,
    }
    manifest = rig.client.get(f"/v1/jobs/{job}/manifest").json()
    assert manifest["complete"]
    assert [shard["index"] for shard in manifest["shards"]] == [0, 1]
    assert manifest["layers"] == [0, 3]
    assert manifest["engine"] == {"version": "0.5.23"}


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
    rig.finish()
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
    rig.finish()
    assert rig.state(job)["state"] == "succeeded"


def test_a_retry_that_does_not_fit_the_storage_is_refused_and_can_be_repeated_once_there_is_room(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = rig.planned(3, size=100)
    rig.commit_shard(rig.lease())
    for _ in range(2):
        rig.fail(rig.lease(), retryable=False)
    rig.upkeep()
    before = rig.state(job)
    assert before["state"] == "failed"
    monkeypatch.setattr(rig.context.storage, "free_bytes", lambda: 199)
    problem = rig.refused(f"/v1/jobs/{job}/retry", None, "not_enough_space")
    assert problem["status"] == 409
    assert problem["detail"] == "the shards need 200 bytes, 199 are free and not reserved in the storage"
    assert rig.state(job) == before
    assert rig.claim()["lease"] is None
    monkeypatch.setattr(rig.context.storage, "free_bytes", lambda: 200)
    assert rig.client.post(f"/v1/jobs/{job}/retry").json()["state"] == "running"
    rig.finish()
    assert rig.state(job)["state"] == "succeeded"


def test_a_retry_is_not_promised_what_a_running_job_has_reserved(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    job = rig.planned(1, size=100)
    rig.fail(rig.lease(), retryable=False)
    rig.upkeep()
    monkeypatch.setattr(rig.context.storage, "free_bytes", lambda: 150)
    other = rig.planned(1, size=100)
    rig.refused(f"/v1/jobs/{job}/retry", None, "not_enough_space")
    rig.finish()
    assert rig.state(other)["state"] == "succeeded"
    assert rig.client.post(f"/v1/jobs/{job}/retry").json()["state"] == "running"


def test_retry_and_delete_fit_their_states_only(rig: Rig) -> None:
    job = rig.planned(1)
    assert rig.client.post(f"/v1/jobs/{job}/retry").json()["code"] == "job_not_retryable"
    assert rig.client.delete(f"/v1/jobs/{job}").json()["code"] == "job_not_over"
    rig.finish()
    assert rig.client.post(f"/v1/jobs/{job}/retry").json()["code"] == "job_not_retryable"
    assert rig.client.post(f"/v1/jobs/{job}/cancel").json()["code"] == "job_over"
    assert rig.client.delete(f"/v1/jobs/{job}").status_code == 204
    assert rig.client.get(f"/v1/jobs/{job}").status_code == 404
    assert not (rig.storage / "jobs" / job).exists()


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
