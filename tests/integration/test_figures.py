"""How fast it goes: what workers report is shown with the worker, in a job's progress, and as metrics."""

from typing import Any

import pytest
from fixtures_service import LEASE_SECONDS, Clock, Rig, proof
from prometheus_client.parser import text_string_to_metric_families

FIGURES = {
    "tokens_per_second": 900.0,
    "tokens_per_second_mean": 800.0,
    "plain_tokens_per_second": 1000.0,
    "plain_share": 0.9,
    "bytes_per_second": 9000.0,
    "pool_fill": 0.5,
    "writer_wait": 0.1,
    "writer_busy": 0.6,
    "queued_runs": 2,
    "gpu_use": 0.95,
}


def poll(rig: Rig, worker: str = "wrk_aaaaaaaa", **figures: Any) -> None:
    rig.post(f"/v1/workers/{worker}/control", {"loaded_model": "tiny", "figures": FIGURES | figures})


def beat(rig: Rig, lease: dict[str, Any], speed: float | None, worker: str = "wrk_aaaaaaaa") -> None:
    body = {**proof(lease, worker), "tokens_done": 3, "tokens_per_second": speed}
    rig.post(f"/v1/tasks/{lease['task']}/heartbeat", body)


def workers(rig: Rig) -> dict[str, Any]:
    return {worker["id"]: worker["figures"] for worker in rig.client.get("/v1/workers").json()["data"]}


def now(rig: Rig, job: str) -> Any:
    return rig.state(job)["progress"]["now"]


def metrics(rig: Rig) -> dict[tuple[str, ...], float]:
    """Every sample as (name, values of its labels, by label): value."""
    answer = rig.client.get("/metrics")
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/plain")
    return {
        (sample.name, *dict(sorted(sample.labels.items())).values()): sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
    }


def test_a_workers_figures_are_the_latest_it_reported(rig: Rig) -> None:
    rig.register()
    assert workers(rig) == {"wrk_aaaaaaaa": None}
    poll(rig)
    poll(rig, tokens_per_second=950.0, gpu_use=None)
    assert workers(rig) == {"wrk_aaaaaaaa": FIGURES | {"tokens_per_second": 950.0, "gpu_use": None}}
    rig.post("/v1/workers/wrk_aaaaaaaa/control", {})
    assert workers(rig) == {"wrk_aaaaaaaa": None}


@pytest.mark.parametrize("goodbye", [True, False])
def test_a_worker_that_is_not_there_has_no_figures(rig: Rig, clock: Clock, goodbye: bool) -> None:
    rig.register()
    poll(rig)
    if goodbye:
        rig.post("/v1/workers/wrk_aaaaaaaa/goodbye", {})
    clock.seconds += LEASE_SECONDS
    rig.upkeep()
    assert workers(rig) == {"wrk_aaaaaaaa": None}
    assert not [name for name in metrics(rig) if name[0].startswith("layertap_worker_")]


def test_a_job_adds_up_what_its_shards_report(rig: Rig) -> None:
    rig.register()
    rig.register("wrk_bbbbbbbb")
    job = rig.planned(4)
    assert now(rig, job) is None
    poll(rig)
    poll(rig, "wrk_bbbbbbbb", plain_tokens_per_second=2000.0, writer_wait=0.3, pool_fill=None, gpu_use=None)
    leases = [rig.lease(), rig.lease(), rig.lease("wrk_bbbbbbbb")]
    assert now(rig, job) is None
    beat(rig, leases[0], 400.0)
    beat(rig, leases[1], None)
    beat(rig, leases[2], 1100.0, "wrk_bbbbbbbb")
    # A shard of 10 bytes has 7 tokens. Two shards of one worker count it once.
    assert now(rig, job) == {
        "tokens_per_second": 1500.0,
        "bytes_per_second": 2143.0,
        "plain_share": 0.5,
        "pool_fill": 0.5,
        "writer_wait": 0.2,
        "gpu_use": 0.95,
    }
    poll(rig, "wrk_bbbbbbbb", plain_tokens_per_second=None)
    assert now(rig, job)["plain_share"] is None
    rig.commit_shard(leases[0])
    assert now(rig, job)["tokens_per_second"] == 1100.0


def test_a_shard_that_is_claimed_anew_starts_without_a_speed(rig: Rig) -> None:
    rig.register()
    job = rig.planned(1)
    lease = rig.lease()
    beat(rig, lease, 400.0)
    rig.post(f"/v1/tasks/{lease['task']}/release", proof(lease))
    assert now(rig, job) is None
    rig.lease()
    assert now(rig, job) is None


@pytest.mark.parametrize(
    "change",
    [{"tokens_per_second": -1}, {"gpu_use": 1.5}, {"bytes_per_second": 1e300}, {"queued_runs": -1}, {"speed": 1}],
)
def test_figures_that_are_none_are_refused(sqlite_rig: Rig, change: dict[str, Any]) -> None:
    sqlite_rig.register()
    answer = sqlite_rig.client.post("/v1/workers/wrk_aaaaaaaa/control", json={"figures": FIGURES | change})
    assert answer.status_code == 422
    assert answer.json()["errors"][0]["field"] == f"figures.{next(iter(change))}"


def test_the_largest_speeds_still_add_up(rig: Rig) -> None:
    rig.register()
    job = rig.planned(2)
    poll(rig, plain_tokens_per_second=1e-300)
    for _ in range(2):
        beat(rig, rig.lease(), 1e15)
    assert now(rig, job)["tokens_per_second"] == 1e15
    assert metrics(rig)["layertap_job_plain_ratio", job] == 1e15


def test_metrics_of_an_empty_service_are_zero(rig: Rig) -> None:
    found = metrics(rig)
    assert found["layertap_jobs", "running"] == 0
    assert found["layertap_tasks", "shard", "leased"] == 0
    assert found["layertap_workers", "active"] == 0
    assert found["layertap_incidents_total", "hung_serving"] == 0
    assert set(found.values()) == {0}


def test_metrics_hold_jobs_tasks_and_workers(rig: Rig) -> None:
    rig.register()
    poll(rig)
    job, waiting = rig.planned(3), rig.job()
    lease = rig.lease(kinds=["shard"])
    beat(rig, lease, 700.0)
    found = metrics(rig)
    assert (found["layertap_jobs", "running"], found["layertap_jobs", "queued"]) == (1, 1)
    assert (found["layertap_tasks", "shard", "ready"], found["layertap_tasks", "shard", "leased"]) == (2, 1)
    assert not [name for name in found if waiting in name]
    assert found["layertap_workers", "active"] == 1
    assert found["layertap_worker_info", "h", "tiny", "active", "1", "wrk_aaaaaaaa"] == 1
    for name, value in (
        ("tokens_per_second", 900),
        ("bytes_per_second", 9000),
        ("plain_ratio", 0.9),
        ("pool_fill_ratio", 0.5),
        ("writer_wait_ratio", 0.1),
        ("writer_busy_ratio", 0.6),
        ("writer_queue_runs", 2),
        ("gpu_use_ratio", 0.95),
        ("mean_tokens_per_second", 800),
        ("plain_tokens_per_second", 1000),
    ):
        assert found[f"layertap_worker_{name}", "wrk_aaaaaaaa"] == value, name
    assert found["layertap_job_info", job, "tiny", "running"] == 1
    assert found["layertap_job_tokens_per_second", job] == 700
    assert found["layertap_job_plain_ratio", job] == 0.7
    assert (found["layertap_job_planned_tokens", job], found["layertap_job_done_tokens", job]) == (21, 3)


def test_a_job_that_is_over_is_only_counted(rig: Rig) -> None:
    rig.register()
    job = rig.planned(1)
    rig.finish()
    found = metrics(rig)
    assert found["layertap_jobs", "succeeded"] == 1
    assert found["layertap_tasks", "shard", "done"] == 0
    assert not [name for name in found if job in name]


def test_incidents_are_counted_once_each_and_never_uncounted(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("service.incidents.service.KEPT", 2)
    rig.register()
    for number, kind in enumerate(["died_idle", "hung_serving", "died_idle", "died_idle"]):
        incident = {
            "id": f"inc_0000000{number}",
            "worker": "wrk_aaaaaaaa",
            "model": "tiny",
            "kind": kind,
            "phase": "idle",
            "reason": "it ended",
            "happened_at": "2026-11-30T02:15:42Z",
        }
        rig.post("/v1/incidents", incident, 201)
        rig.post("/v1/incidents", incident, 200)
    assert len(rig.client.get("/v1/incidents").json()["data"]) == 2
    found = metrics(rig)
    assert (found["layertap_incidents_total", "died_idle"], found["layertap_incidents_total", "hung_serving"]) == (3, 1)
