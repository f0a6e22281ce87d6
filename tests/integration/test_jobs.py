"""Creating, listing and following jobs: what is refused, and what a repeat does."""

from typing import Any

import pytest
from fixtures_service import Rig


@pytest.fixture(autouse=True)
def worker(request: pytest.FixtureRequest) -> None:
    """A registered worker."""
    name = "rig" if "rig" in request.fixturenames else "sqlite_rig"
    request.getfixturevalue(name).register()


def test_a_created_job_says_where_to_follow_it(rig: Rig) -> None:
    body = {"dataset": rig.upload()["id"], "model": "tiny", "preset": "eagle3", "metadata": {"run": "7"}}
    answer = rig.client.post("/v1/jobs", json=body)
    job = answer.json()
    assert answer.status_code == 202
    assert answer.headers["location"] == f"/v1/jobs/{job['id']}"
    assert answer.headers["retry-after"]
    assert (job["state"], job["layers"], job["metadata"]) == ("queued", [2, 6, 9], {"run": "7"})
    assert rig.client.get(f"/v1/jobs/{job['id']}").json() == job


@pytest.mark.parametrize(
    ("change", "field", "code"),
    [
        ({"model": "nope"}, "model", "unknown_model"),
        ({"model": "org/nope"}, "model", "unknown_model"),
        ({"model": "/etc/passwd"}, "model", "model_not_allowed"),
        ({"model": "../tiny"}, "model", "model_not_allowed"),
        ({"layers": [13]}, "layers", "invalid_layers"),
        ({"layers": [-1]}, "layers", "invalid_layers"),
        ({"layers": [1, 1]}, "layers", "invalid_layers"),
        ({"preset": "eagle3"}, "layers", "invalid_layers"),
        ({"layers": None}, "layers", "invalid_layers"),
        ({"layers": []}, "layers", "invalid_request"),
        ({"dataset": "ds_none"}, "dataset", "unknown_dataset"),
        ({"max_tokens": 5000}, "max_tokens", "max_tokens_too_large"),
        ({"max_tokens": 1}, "max_tokens", "invalid_request"),
        ({"layer": [1]}, "layer", "invalid_request"),
    ],
)
def test_a_request_that_cannot_be_met_names_the_field_and_the_remedy(
    sqlite_rig: Rig, change: dict[str, Any], field: str, code: str
) -> None:
    body = {"dataset": sqlite_rig.upload()["id"], "model": "tiny", "layers": [1], **change}
    answer = sqlite_rig.client.post("/v1/jobs", json=body)
    problem = answer.json()
    assert answer.status_code == 422
    assert answer.headers["content-type"] == "application/problem+json"
    assert (problem["code"], problem["type"]) == (code, f"urn:layertap:problem:{code}")
    assert field in problem["errors"][0]["field"]
    assert problem["errors"][0]["remedy"]


def test_text_that_a_database_cannot_hold_is_refused(rig: Rig) -> None:
    body = {"dataset": rig.upload()["id"], "model": "a\x00b", "layers": [1]}
    assert rig.client.post("/v1/jobs", json=body).status_code == 422


def test_an_unknown_model_lists_those_that_are_known(sqlite_rig: Rig) -> None:
    body = {"dataset": sqlite_rig.upload()["id"], "model": "nope", "layers": [1]}
    assert "tiny" in sqlite_rig.client.post("/v1/jobs", json=body).json()["errors"][0]["remedy"]


def test_a_model_may_be_named_by_its_path(sqlite_rig: Rig) -> None:
    assert sqlite_rig.state(sqlite_rig.job("/models/tiny"))["model"] == "tiny"


def test_the_same_key_and_body_is_the_same_job_and_another_body_is_refused(rig: Rig) -> None:
    body = {"dataset": rig.upload()["id"], "model": "tiny", "layers": [1]}
    headers = {"Idempotency-Key": "k"}
    first = rig.client.post("/v1/jobs", json=body, headers=headers)
    again = rig.client.post("/v1/jobs", json=body, headers=headers)
    assert (first.status_code, again.status_code) == (202, 200)
    assert first.json()["id"] == again.json()["id"]
    other = rig.client.post("/v1/jobs", json={**body, "layers": [2]}, headers=headers)
    assert (other.status_code, other.json()["code"]) == (422, "idempotency_key_reused")
    assert len(rig.client.get("/v1/jobs").json()["data"]) == 1


def test_jobs_are_listed_newest_first_by_page_and_by_state(rig: Rig) -> None:
    ids = [rig.job() for _ in range(3)]
    rig.client.post(f"/v1/jobs/{ids[0]}/cancel")
    rig.upkeep()
    page = rig.client.get("/v1/jobs", params={"limit": 2}).json()
    assert [job["id"] for job in page["data"]] == [ids[2], ids[1]]
    assert rig.client.get("/v1/jobs", params={"after": page["last_id"]}).json()["data"][0]["id"] == ids[0]
    assert [job["id"] for job in rig.client.get("/v1/jobs?state=cancelled").json()["data"]] == [ids[0]]
    assert rig.client.get("/v1/jobs?state=nope").json()["errors"][0]["field"] == "state"


def test_events_end_with_the_job_and_tell_only_what_is_new(rig: Rig) -> None:
    job = rig.job()
    rig.client.post(f"/v1/jobs/{job}/cancel")
    rig.upkeep()
    answer = rig.client.get(f"/v1/jobs/{job}/events")
    assert answer.headers["content-type"].startswith("text/event-stream")
    identity, kind, data = answer.text.strip().splitlines()
    assert kind == "event: job"
    assert '"state":"cancelled"' in data
    seen = {"Last-Event-ID": identity.removeprefix("id: ")}
    assert rig.client.get(f"/v1/jobs/{job}/events", headers=seen).text == ""
    assert rig.client.get("/v1/jobs/job_none/events").status_code == 404


def test_the_number_of_event_streams_is_bounded(sqlite_rig: Rig) -> None:
    job = sqlite_rig.job()
    sqlite_rig.context.event_streams = sqlite_rig.context.settings.max_event_streams
    answer = sqlite_rig.client.get(f"/v1/jobs/{job}/events")
    assert (answer.status_code, answer.json()["code"]) == (503, "too_many_streams")


def test_a_worker_that_sees_another_storage_is_refused(sqlite_rig: Rig) -> None:
    body = {"id": "wrk_bbbbbbbb", "host": "h", "version": "1", "storage_nonce": "other", "models": []}
    sqlite_rig.refused("/v1/workers", body, "storage_mismatch")


def test_models_outlive_their_workers_and_are_listed_by_name(rig: Rig) -> None:
    rig.register("wrk_bbbbbbbb", "zeta", "alpha")
    rig.post("/v1/workers/wrk_bbbbbbbb/goodbye", {})
    page = rig.client.get("/v1/models").json()
    assert [model["name"] for model in page["data"]] == ["alpha", "tiny", "zeta"]
    assert page["data"][0]["num_layers"] == 12
