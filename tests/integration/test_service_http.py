"""What holds for every request: problems, Host and Origin, the token, and the size of bodies."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fixtures_service import Rig, open_rig, settings_for
from pydantic import ValidationError

from service.problems import ProblemError
from service.settings import Settings
from service.storage import Storage, StorageEscapeError


def rig_with(folder: Path, **settings: Any) -> Any:
    """A service with these settings."""
    return open_rig(settings_for(f"sqlite:///{folder}/layertap.sqlite3", folder, **settings), None)


def problem(answer: Any, status: int, code: str) -> dict[str, Any]:
    """The problem of an answer, once it is known to be one, whole."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    body: dict[str, Any] = answer.json()
    assert body["code"] == code
    assert body["type"] == f"urn:layertap:problem:{code}"
    assert body["status"] == status
    assert body["title"]
    assert body["detail"]
    assert all(error["field"] and error["reason"] and error["remedy"] for error in body["errors"])
    assert body["errors"]
    return body


def test_every_kind_of_error_is_a_problem(sqlite_rig: Rig) -> None:
    client = sqlite_rig.client
    problem(client.get("/nope"), 404, "not_found")
    problem(client.get("/v1/jobs/job_none"), 404, "job_not_found")
    problem(client.get("/v1/jobs?limit=0"), 422, "invalid_request")
    problem(client.post("/v1/jobs", content=b"{"), 422, "invalid_request")
    missing = problem(client.post("/v1/jobs", json={"model": "x"}), 422, "invalid_request")
    assert missing["errors"][0]["field"] == "dataset"


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("PUT", "/v1/jobs/job_x", "DELETE, GET"),
        ("PATCH", "/v1/datasets", "GET, POST"),
        ("POST", "/v1/jobs/job_x/shards/0/content", "GET, HEAD"),
        ("DELETE", "/healthz", "GET"),
    ],
)
def test_a_method_that_is_not_possible_names_those_that_are(
    sqlite_rig: Rig, method: str, path: str, allowed: str
) -> None:
    answer = sqlite_rig.client.request(method, path)
    problem(answer, 405, "method_not_allowed")
    assert answer.headers["allow"] == allowed


def test_a_fault_of_the_service_is_a_problem_that_tells_nothing_of_its_inside(
    sqlite_rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("secret detail")

    monkeypatch.setattr("service.jobs.repository.get", broken)
    answer = sqlite_rig.client.get("/v1/jobs/job_x")
    problem(answer, 500, "internal_error")
    assert "secret detail" not in answer.text


def test_a_database_that_does_not_answer_is_a_problem_worth_a_repeat(tmp_path: Path) -> None:
    with rig_with(tmp_path, database_wait_seconds=0.1) as rig, rig.context.database.read() as session:
        session.connection()
        answer = rig.client.get("/v1/jobs/job_x")
        problem(answer, 503, "database_unavailable")
        assert answer.headers["retry-after"]


def test_only_names_of_this_machine_are_answered(sqlite_rig: Rig) -> None:
    for host in ("localhost", "127.0.0.1:8178", "[::1]:8178", "LOCALHOST:1"):
        assert sqlite_rig.client.get("/healthz", headers={"Host": host}).status_code == 200
    for host in ("evil.example", "evil.example:8178", "127.0.0.1.evil.example", "10.0.0.1", "", "[", "a@b"):
        problem(sqlite_rig.client.get("/healthz", headers={"Host": host}), 421, "host_not_allowed")


def test_pages_of_other_sites_may_not_change_anything(sqlite_rig: Rig) -> None:
    for origin in ("https://evil.example", "null", "http://localhost.evil.example", "http://[", "file://"):
        headers = {"Origin": origin}
        problem(sqlite_rig.client.post("/v1/datasets", content=b"x", headers=headers), 403, "origin_not_allowed")
        assert sqlite_rig.client.get("/v1/datasets", headers=headers).status_code == 200
    allowed = sqlite_rig.client.post("/v1/datasets", content=b"x", headers={"Origin": "http://localhost:8178"})
    problem(allowed, 422, "empty_dataset")


def test_further_host_names_can_be_allowed(tmp_path: Path) -> None:
    with rig_with(tmp_path, allowed_hosts="layertap.example, other") as rig:
        assert rig.client.get("/healthz", headers={"Host": "layertap.example:80"}).status_code == 200
        assert rig.client.get("/healthz", headers={"Host": "third"}).status_code == 421


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[Rig]:
    """A service that asks for a token."""
    with rig_with(tmp_path, token="s3cret", host="0.0.0.0") as rig:
        yield rig


def test_a_token_is_asked_for_on_every_request_to_the_interface(guarded: Rig) -> None:
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic s3cret"}):
        answer = guarded.client.get("/v1/jobs", headers=headers)
        problem(answer, 401, "unauthorized")
        assert answer.headers["www-authenticate"] == "Bearer"
        problem(guarded.client.post("/v1/datasets", content=b"{}", headers=headers), 401, "unauthorized")
        problem(guarded.client.get("/metrics", headers=headers), 401, "unauthorized")
    for path in ("/v1/jobs", "/metrics"):
        assert guarded.client.get(path, headers={"Authorization": "Bearer s3cret"}).status_code == 200
    assert guarded.client.get("/healthz").status_code == 200
    assert guarded.client.get("/healthz", headers={"Host": "10.0.0.7:8178"}).status_code == 200


def test_listening_beyond_loopback_without_a_token_is_refused() -> None:
    with pytest.raises(ValidationError, match="LAYERTAP_TOKEN"):
        Settings(host="0.0.0.0")
    with pytest.raises(ValidationError, match="empty"):
        Settings(token="")  # type: ignore[arg-type]
    assert Settings(host="127.0.0.2").loopback
    assert Settings(host="0.0.0.0", token="t").token is not None  # type: ignore[arg-type]


def test_a_body_beyond_the_bound_is_refused_declared_or_not(tmp_path: Path) -> None:
    def chunks() -> Iterator[bytes]:
        for _ in range(10):
            yield b"x" * 1000

    with rig_with(tmp_path, max_body_bytes=2000) as rig:
        problem(rig.client.post("/v1/jobs", content=b"x" * 2001), 413, "body_too_large")
        problem(rig.client.post("/v1/jobs", content=chunks()), 413, "body_too_large")
        assert rig.upload(b'{"text": "' + b"x" * 5000 + b'"}')["rows"] == 1


def test_readiness_names_what_is_missing(sqlite_rig: Rig) -> None:
    assert sqlite_rig.client.get("/healthz").json()["status"] == "ok"
    assert sqlite_rig.client.get("/readyz").json()["checks"] == {"database": "ok", "storage": "ok"}
    (sqlite_rig.storage / "uploads").rmdir()
    answer = sqlite_rig.client.get("/readyz")
    assert answer.status_code == 503
    assert "can't be written" in answer.json()["checks"]["storage"]


def test_no_path_leads_out_of_the_storage(tmp_path: Path) -> None:
    storage = Storage(tmp_path / "storage")
    storage.prepare()
    (tmp_path / "secret").write_text("x")
    (storage.root / "link").symlink_to(tmp_path)
    for path in ("../secret", "/etc/passwd", "jobs/../../secret", "link/secret", "", "."):
        with pytest.raises(StorageEscapeError):
            storage.path(path)
    assert storage.path("jobs/x") == storage.root / "jobs" / "x"


def test_a_write_is_whole_or_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = Storage(tmp_path)
    storage.prepare()
    storage.write("jobs/j/manifest.json", b"old")

    def full(*_: object) -> None:
        raise OSError(28, "no space left")

    monkeypatch.setattr("service.storage.os.fsync", full)
    with pytest.raises(OSError, match="no space"):
        storage.write("jobs/j/manifest.json", b"new")
    assert storage.path("jobs/j/manifest.json").read_bytes() == b"old"
    assert len(list(storage.path("jobs/j").iterdir())) == 1


def test_every_problem_carries_its_own_error() -> None:
    error = ProblemError(409, "some_code", "why", field="f", remedy="r")
    assert error.problem.errors[0].model_dump() == {"field": "f", "reason": "why", "remedy": "r"}
