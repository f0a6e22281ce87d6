"""Incidents over HTTP, on both databases: what is kept, what a repeat may change, what is shown to whom."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from fixtures_service import Rig, open_rig, settings_for

from layertap.schemas.incidents import MAX_EVIDENCE_BYTES, MAX_REPORT_BYTES, Evidence

PROCESS = {
    "pid": 7,
    "command": "sglang::scheduler",
    "state": "R",
    "threads": 3,
    "rss_bytes": 1,
    "cpu_seconds": 1.5,
    "wait_channel": "0",
    "stack": "forward (model_runner.py:1)\n",
}


def report(number: int = 0, worker: str = "wrk_aaaaaaaa", **more: Any) -> dict[str, Any]:
    """The body of a report."""
    return {
        "id": f"inc_{number:08d}",
        "worker": worker,
        "model": "tiny",
        "kind": "hung_serving",
        "phase": "serving",
        "reason": "no token for 300 s",
        "evidence": {"log_tail": "the last line\n", "processes": [PROCESS]},
        "happened_at": "2026-11-30T02:15:42Z",
        **more,
    }


def listed(rig: Rig, path: str = "/v1/incidents", **query: Any) -> list[str]:
    """Ids of the incidents, in order."""
    answer = rig.client.get(path, params=query)
    assert answer.status_code == 200, answer.text
    return [item["id"] for item in answer.json()["data"]]


def shown(rig: Rig, number: int = 0) -> dict[str, Any]:
    answer = rig.client.get(f"/v1/incidents/inc_{number:08d}")
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


@pytest.fixture(autouse=True)
def workers(request: pytest.FixtureRequest) -> None:
    """Two workers that the service knows."""
    name = next((name for name in ("rig", "sqlite_rig") if name in request.fixturenames), None)
    if name is not None:
        for worker in ("wrk_aaaaaaaa", "wrk_bbbbbbbb"):
            request.getfixturevalue(name).register(worker)


def test_an_incident_is_kept_with_its_evidence_and_the_jobs_of_its_tasks(rig: Rig) -> None:
    job = rig.planned(2)
    task = rig.lease()["task"]
    made = rig.post("/v1/incidents", report(tasks=[task, "task_unknown"]), 201)
    assert made["jobs"] == [job]
    assert made["evidence"]["log_tail"] == ""
    one = shown(rig)
    assert one["evidence"]["log_tail"] == "the last line\n"
    assert one["evidence"]["processes"] == [PROCESS]
    assert one["tasks"] == sorted([task, "task_unknown"])
    assert (one["jobs"], one["blame"], one["gpu_bytes_left"]) == ([job], "unknown", None)
    assert one["happened_at"] == "2026-11-30T02:15:42Z"
    assert one["reported_at"] > one["happened_at"]


def test_lists_are_newest_first_in_pages_and_without_evidence(rig: Rig) -> None:
    for number in (5, 1, 9, 4):
        rig.post("/v1/incidents", report(number), 201)
    first = rig.client.get("/v1/incidents", params={"limit": 3}).json()
    assert [item["id"][-1] for item in first["data"]] == ["4", "9", "1"]
    assert first["has_more"]
    assert all(item["evidence"] == Evidence().model_dump() for item in first["data"])
    assert listed(rig, limit=3, after=first["last_id"]) == ["inc_00000005"]
    assert listed(rig, after="inc_00000005") == []
    assert listed(rig, after="inc_gone0000") == []


def test_lists_can_be_narrowed_to_a_job_and_to_a_worker(rig: Rig) -> None:
    first, second = rig.planned(1), rig.planned(1)
    tasks = [rig.lease()["task"], rig.lease()["task"]]
    rig.post("/v1/incidents", report(0, tasks=tasks[:1]), 201)
    rig.post("/v1/incidents", report(1, "wrk_bbbbbbbb", tasks=tasks), 201)
    rig.post("/v1/incidents", report(2), 201)
    assert listed(rig, job=first) == ["inc_00000001", "inc_00000000"]
    assert listed(rig, job=second) == ["inc_00000001"]
    assert listed(rig, f"/v1/jobs/{first}/incidents") == ["inc_00000001", "inc_00000000"]
    assert listed(rig, f"/v1/jobs/{first}/incidents", limit=1) == ["inc_00000001"]
    assert listed(rig, worker="wrk_aaaaaaaa") == ["inc_00000002", "inc_00000000"]
    assert listed(rig, worker="wrk_bbbbbbbb", job=first) == ["inc_00000001"]
    assert listed(rig, job="job_none") == []
    assert rig.client.get("/v1/jobs/job_none/incidents").json()["code"] == "job_not_found"


def test_a_repeat_changes_what_was_found_out_since_and_nothing_else(rig: Rig) -> None:
    job = rig.planned(1)
    task = rig.lease()["task"]
    rig.post("/v1/incidents", report(), 201)
    before = shown(rig)
    found = {"blame": "patch", "tried": ["unpatched: healthy"], "processes_left": 1, "gpu_bytes_left": -5}
    other = {"evidence": {"log_tail": "other"}, "reason": "other", "kind": "died_idle", "phase": "idle", "model": "m"}
    answer = rig.post("/v1/incidents", report(tasks=[task], **found, **other), 200)
    assert answer["blame"] == "patch"
    assert shown(rig) == {**before, **found, "tasks": [task], "jobs": [job]}
    assert listed(rig) == ["inc_00000000"]


def test_a_repeat_by_another_worker_is_refused(rig: Rig) -> None:
    rig.post("/v1/incidents", report(), 201)
    rig.refused("/v1/incidents", report(worker="wrk_bbbbbbbb", blame="patch"), "incident_of_another_worker")
    assert shown(rig)["blame"] == "unknown"


def test_a_report_of_an_unknown_worker_is_refused(rig: Rig) -> None:
    problem = rig.refused("/v1/incidents", report(worker="wrk_cccccccc"), "worker_not_found")
    assert problem["status"] == 404
    assert listed(rig) == []


def test_reports_that_come_at_once_make_one_incident(rig: Rig) -> None:
    with ThreadPoolExecutor(6) as threads:
        answers = list(threads.map(lambda _: rig.client.post("/v1/incidents", json=report()), range(6)))
    assert sorted(answer.status_code for answer in answers) == [200] * 5 + [201]
    assert listed(rig) == ["inc_00000000"]


def test_an_incident_outlives_its_job_even_when_it_is_reported_again(rig: Rig) -> None:
    job = rig.planned(1)
    lease = rig.lease()
    rig.post("/v1/incidents", report(tasks=[lease["task"]]), 201)
    rig.commit_shard(lease)
    rig.upkeep()
    assert rig.client.delete(f"/v1/jobs/{job}").status_code == 204
    rig.post("/v1/incidents", report(tasks=[lease["task"]], blame="row"), 200)
    assert (shown(rig)["jobs"], shown(rig)["blame"]) == ([job], "row")
    assert listed(rig, job=job) == ["inc_00000000"]


def test_only_the_newest_incidents_are_kept(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("service.incidents.service.KEPT", 3)
    job = rig.planned(1)
    task = rig.lease()["task"]
    for number in (7, 3, 8, 1, 2):
        rig.post("/v1/incidents", report(number, tasks=[task]), 201)
    rig.post("/v1/incidents", report(8, tasks=[task], blame="nobody"), 200)
    assert [name[-1] for name in listed(rig)] == ["2", "1", "8"]
    assert [name[-1] for name in listed(rig, job=job)] == ["2", "1", "8"]
    assert rig.client.get("/v1/incidents/inc_00000007").json()["code"] == "incident_not_found"


def test_evidence_that_is_too_long_is_cut_in_log_and_stacks(rig: Rig) -> None:
    log = "".join(f"line {number}\n" for number in range(120_000))
    evidence = {
        "log_tail": log,
        "processes": [{**PROCESS, "stack": "frame\n" * 100_000}, PROCESS],
        "signals": {"port": "closed"},
    }
    rig.post("/v1/incidents", report(evidence=evidence), 201)
    kept = shown(rig)["evidence"]
    assert 0.9 * MAX_EVIDENCE_BYTES < len(Evidence.model_validate(kept).model_dump_json()) <= MAX_EVIDENCE_BYTES
    assert kept["log_tail"].endswith("line 119999\n")
    assert kept["processes"][0]["stack"].startswith("frame\nframe\n")
    assert kept["processes"][1] == PROCESS
    assert kept["signals"] == {"port": "closed"}


def test_only_a_report_beyond_four_megabytes_is_refused(sqlite_rig: Rig) -> None:
    fits = report(evidence={"log_tail": "x" * (MAX_REPORT_BYTES - 1000)})
    sqlite_rig.post("/v1/incidents", fits, 201)
    problem = sqlite_rig.refused(
        "/v1/incidents", report(1, evidence={"log_tail": "x" * MAX_REPORT_BYTES}), "body_too_large"
    )
    assert (problem["status"], problem["detail"]) == (413, f"the body is longer than {MAX_REPORT_BYTES} bytes")


def test_secrets_in_a_report_are_not_stored(tmp_path: Path) -> None:
    settings = settings_for(f"sqlite:///{tmp_path}/layertap.sqlite3", tmp_path, token="s3rvice-token")
    with open_rig(settings, None) as rig:
        rig.client.headers["Authorization"] = "Bearer s3rvice-token"
        rig.register()
        said = "--api-key q7Zx Authorization: Bearer q7Zx LAYERTAP_TOKEN=q7Zx HF_TOKEN=q7Zx s3rvice-token"
        evidence = {"log_tail": said, "processes": [{**PROCESS, "command": said, "stack": said}], "engine": {"a": said}}
        body = report(reason=said, tried=[said, "x" * 989 + " HF_TOKEN=q"], evidence=evidence)
        rig.post("/v1/incidents", body, 201)
        text = rig.client.get("/v1/incidents/inc_00000000").text
    assert "q7Zx" not in text
    assert "s3rvice-token" not in text
    assert text.count("LAYERTAP_TOKEN=***") == 6
    assert b"q7Zx" not in (tmp_path / "layertap.sqlite3").read_bytes()


def test_what_a_dying_process_says_is_kept_whatever_it_is(rig: Rig) -> None:
    said = "Segmentation fault\0\x1b[31m \u65e5\u672c \U0001f4a5"
    body = report(reason=said, phase=said, tried=[said], tasks=["a\0b"], evidence={"log_tail": said, "gpu": [said]})
    rig.post("/v1/incidents", body, 201)
    kept = shown(rig)
    assert kept["evidence"]["log_tail"] == said
    assert kept["reason"] == said.replace("\0", "\N{REPLACEMENT CHARACTER}")


@pytest.mark.parametrize(
    ("field", "value"),
    [("id", "job_1"), ("id", "inc_1"), ("kind", "sad"), ("reason", "x" * 4001), ("happened_at", "x"), ("colour", 1)],
)
def test_a_report_that_is_malformed_names_the_field(sqlite_rig: Rig, field: str, value: object) -> None:
    problem = sqlite_rig.refused("/v1/incidents", report(**{field: value}), "invalid_request")
    assert [error["field"] for error in problem["errors"]] == [field]
