"""What the client does when the service is slow, gone, or answers nonsense."""

import json
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fixtures_client import FaultyServer, cut_after, silence, status

import layertap.client
from layertap import follow, transport
from layertap.client import Client
from layertap.errors import ApiError, ConnectionFailedError, InvalidRequestError, NotFoundError, WaitTimeoutError

JOB: dict[str, Any] = {
    "id": "job_1",
    "state": "queued",
    "dataset": "ds_1",
    "model": "m",
    "layers": [1],
    "preset": None,
    "final": "post_norm",
    "max_tokens": None,
    "overflow": "truncate",
    "loss_mask": "assistant",
    "shard_bytes": 1,
    "metadata": {},
    "progress": {},
    "created_at": "2025-01-01T00:00:00Z",
}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pauses are as many as ever, but short."""
    monkeypatch.setattr(transport, "backoff", lambda attempt: 0.01)
    monkeypatch.setattr(layertap.client, "backoff", lambda attempt: 0.01)
    monkeypatch.setattr(follow, "POLL_SECONDS", 0.02)


@pytest.fixture
def client(faulty: FaultyServer) -> Iterator[Client]:
    with Client(faulty.url, token="secret") as connected:
        yield connected


def _offer(server: FaultyServer, path: str, **changes: Any) -> None:
    server.bodies[path] = json.dumps(JOB | changes).encode()


def test_the_address_comes_from_the_argument_then_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LAYERTAP_URL", raising=False)
    with Client() as client:
        assert client.url == "http://127.0.0.1:8178"
    monkeypatch.setenv("LAYERTAP_URL", "http://elsewhere:9/")
    with Client() as client:
        assert client.url == "http://elsewhere:9"
    with Client("http://here:1") as client:
        assert client.url == "http://here:1"


@pytest.mark.parametrize("url", ["here:80", "ftp://here", "http://", "http://a:b"])
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(ConnectionFailedError, match="http://HOST:PORT"):
        Client(url)


def test_the_token_travels_as_bearer(faulty: FaultyServer, client: Client) -> None:
    _offer(faulty, "/v1/jobs/job_1")
    client.job("job_1")
    assert faulty.requests[0][1]["authorization"] == "Bearer secret"


def test_a_broken_connection_is_tried_again(faulty: FaultyServer, client: Client) -> None:
    _offer(faulty, "/v1/jobs/job_1")
    faulty.faults = [cut_after(5), status(503), status(429, **{"retry-after": "0"})]
    assert client.job("job_1").id == "job_1"
    assert len(faulty.requests) == 4


def test_tries_are_bounded(faulty: FaultyServer, client: Client) -> None:
    faulty.bodies["/v1/jobs/job_1"] = b"{}"
    faulty.faults = [cut_after(1)] * 50
    with pytest.raises(ConnectionFailedError, match="layertap up"):
        client.job("job_1")
    assert len(faulty.requests) == 6


def test_create_job_is_repeated_with_the_same_key(faulty: FaultyServer, client: Client) -> None:
    _offer(faulty, "/v1/jobs")
    faulty.faults = [cut_after(5)]
    client.create_job("ds_1", "m", [1])
    keys = [headers["idempotency-key"] for _, headers in faulty.requests]
    assert len(keys) == 2
    assert keys[0] == keys[1]
    client.create_job("ds_1", "m", [1])
    assert faulty.requests[-1][1]["idempotency-key"] != keys[0]


def test_what_may_not_be_repeated_is_sent_once(faulty: FaultyServer, client: Client, tmp_path: Path) -> None:
    _offer(faulty, "/v1/jobs/job_1/retry")
    faulty.faults = [cut_after(5)]
    with pytest.raises(ConnectionFailedError):
        client.retry("job_1")
    assert len(faulty.requests) == 1
    (tmp_path / "rows.jsonl").write_text("{}\n")
    faulty.faults = [status(503)]
    faulty.bodies["/v1/datasets"] = b""
    with pytest.raises(ApiError, match="503"):
        client.upload_dataset(tmp_path / "rows.jsonl")
    assert len(faulty.requests) == 2


def test_a_deletion_whose_answer_was_lost_is_done(faulty: FaultyServer, client: Client) -> None:
    faulty.bodies["/v1/jobs/job_1"] = b"deleted"
    faulty.faults = [cut_after(1), status(404)]
    client.delete("job_1")
    with pytest.raises(NotFoundError):
        client.delete("job_absent")


def test_a_problem_becomes_an_error_with_its_fields(faulty: FaultyServer, client: Client) -> None:
    problem = {
        "type": "urn:x",
        "title": "No",
        "status": 422,
        "code": "layer_out_of_range",
        "detail": "boundary 9 is out of range",
        "errors": [{"field": "layers", "reason": "9", "remedy": "0 to 8"}],
        "extra": 1,
    }
    body = json.dumps(problem).encode()
    faulty.bodies["/v1/jobs"] = b""
    faulty.faults = [lambda handler, _: handler.answer(422, body)]
    with pytest.raises(InvalidRequestError) as e:
        client.create_job("ds_1", "m", [9])
    assert (e.value.status, e.value.code, e.value.errors[0].remedy) == (422, "layer_out_of_range", "0 to 8")
    assert str(e.value) == "boundary 9 is out of range"
    assert pickle.loads(pickle.dumps(e.value)).code == "layer_out_of_range"


def test_an_answer_that_is_no_layertap_is_named(faulty: FaultyServer, client: Client) -> None:
    faulty.bodies["/v1/jobs/job_1"] = b"<html>"
    with pytest.raises(ConnectionFailedError, match="did not answer as a Layertap service"):
        client.job("job_1")
    faulty.faults = [status(500)]
    with pytest.raises(ApiError, match="answered 500"):
        client.job("job_1")


def test_fields_of_a_newer_service_are_ignored(faulty: FaultyServer, client: Client) -> None:
    _offer(faulty, "/v1/jobs/job_1", colour="green")
    assert client.job("job_1").state == "queued"


def test_a_list_that_never_ends_is_an_error(faulty: FaultyServer, client: Client) -> None:
    page = {"data": [JOB], "first_id": "job_1", "last_id": "job_1", "has_more": True}
    faulty.bodies["/v1/jobs"] = json.dumps(page).encode()
    with pytest.raises(ConnectionFailedError, match="names no next page"):
        list(client.jobs())


def test_waiting_polls_where_events_do_not_come_through(faulty: FaultyServer, client: Client) -> None:
    _offer(faulty, "/v1/jobs/job_1")
    seen: list[str] = []

    def on_update(job: Any) -> None:
        seen.append(job.state)
        _offer(faulty, "/v1/jobs/job_1", state="running" if len(seen) == 1 else "succeeded")

    assert client.wait("job_1", 20, on_update).state == "succeeded"
    assert seen == ["queued", "running", "succeeded"]


def test_events_that_break_off_are_taken_up_again(faulty: FaultyServer, client: Client) -> None:
    _offer(faulty, "/v1/jobs/job_1")
    faulty.bodies["/v1/jobs/job_1/events"] = b""
    running, ended = (json.dumps(JOB | {"state": state}) for state in ("running", "succeeded"))

    def events(text: str) -> Any:
        return lambda handler, _: handler.answer(200, text.encode(), **{"content-type": "text/event-stream"})

    first = f": hello\n\nid: 7\nevent: job\ndata: {running}\n\ndata: {ended[:40]}"
    faulty.faults = [None, events(first), None, events(f"id: 8\ndata: {ended}\n\n")]
    states = [job.state for job in client.follow("job_1", 20)]
    assert states[:2] == ["queued", "running"]
    assert states[-1] == "succeeded"
    streams = [headers for path, headers in faulty.requests if path.endswith("/events")]
    assert streams[1]["last-event-id"] == "7"


def test_waiting_ends_at_its_time_even_when_the_stream_is_silent(faulty: FaultyServer, client: Client) -> None:
    _offer(faulty, "/v1/jobs/job_1")
    faulty.bodies["/v1/jobs/job_1/events"] = b"x" * 1000
    faulty.faults = [None, silence]
    with pytest.raises(WaitTimeoutError, match="still queued"):
        client.wait("job_1", 0.5)


def test_waiting_for_an_unknown_job_is_refused_at_once(client: Client) -> None:
    with pytest.raises(NotFoundError):
        client.wait("job_absent")


def test_an_upload_reports_its_progress(faulty: FaultyServer, client: Client, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"x" * 600_000)
    dataset = {"id": "ds_1", "name": "n", "bytes": 1, "sha256": "", "rows": 1, "bad_rows": 0}
    faulty.bodies["/v1/datasets"] = json.dumps(dataset | {"created_at": JOB["created_at"]}).encode()
    seen: list[int] = []
    assert client.upload_dataset(path, "a name", seen.append).id == "ds_1"
    assert seen == [262_144, 524_288, 600_000]
    assert faulty.requests[0][0] == "/v1/datasets?name=a+name"
    assert faulty.requests[0][1]["content-length"] == "600000"
