"""What commits of plans and shards promise, on SQLite and on Postgres."""

from typing import Any

import pytest
from fixtures_service import LEASE_SECONDS, Clock, Rig, in_threads, proof


@pytest.fixture(autouse=True)
def worker(rig: Rig) -> str:
    """A registered worker."""
    return rig.register()


def errors_of(rig: Rig, job: str) -> list[dict[str, Any]]:
    """All errors of a job."""
    return list(rig.client.get(f"/v1/jobs/{job}/errors").json()["data"])


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
    rig.finish()
    assert rig.state(job)["progress"]["shards_done"] == 3


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


def test_a_shard_all_of_whose_rows_failed_commits_without_a_file(rig: Rig) -> None:
    job = rig.planned(2)
    lease = rig.lease()
    report = {"errors": [{"row_id": 0, "code": "nan", "reason": "not finite"}]}
    rig.post(f"/v1/tasks/{lease['task']}/row-errors", {**proof(lease), **report})
    empty = {"bytes": 0, "sha256": "", "rows": 0, "tokens": 0, "row_errors": 1}
    rig.post(f"/v1/tasks/{lease['task']}/commit-shard", {**proof(lease), **empty})
    rig.finish()
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


def test_files_of_lost_generations_are_gone_when_the_job_ends(rig: Rig, clock: Clock) -> None:
    job = rig.planned(1)
    rig.write_shard(rig.lease())
    clock.seconds += LEASE_SECONDS
    rig.commit_shard(rig.lease())
    rig.upkeep()
    names = {file.name for file in (rig.storage / "jobs" / job / "shards").iterdir()}
    assert names == {"shard-00000.g2.safetensors"}


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
