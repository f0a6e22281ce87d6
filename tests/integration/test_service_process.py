"""Promises about the process: how it starts, stops, is killed, and ends connections that stall."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import psutil
import pytest
from fixtures_service import Process, Rig, proof, service_processes, wait_until

Start = Callable[..., Process]


def rig_of(service: Process) -> Rig:
    """What a client and its workers say to a service process."""
    return Rig(httpx.Client(base_url=service.url, timeout=20), service.storage)


def refusal(folder: Path, *arguments: str, **env: str) -> tuple[int, str]:
    """Exit status and message of a service that does not start."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("LAYERTAP_")}
    ended = subprocess.run(
        [sys.executable, "-m", "service", "--storage", str(folder / "storage"), *arguments],
        cwd=folder,
        env={**environment, **env},
        capture_output=True,
        text=True,
        timeout=60,
    )
    return ended.returncode, ended.stderr


def test_a_kill_in_the_middle_of_a_job_loses_nothing(database_url: str, start_service: Start) -> None:
    service = start_service(database_url)
    with rig_of(service).client as client:
        rig = Rig(client, service.storage)
        rig.register()
        job = rig.planned(3)
        rig.commit_shard(rig.lease())
        held = rig.lease()
        body = rig.write_shard(held)
    service.kill()
    service = start_service(database_url)
    with rig_of(service).client as client:
        rig = Rig(client, service.storage)
        path = f"/v1/tasks/{held['task']}/commit-shard"
        assert rig.post(path, body)["state"] == "done"
        assert rig.post(path, body)["state"] == "done"
        rig.commit_shard(rig.lease())
        done = wait_until(lambda: (state := rig.state(job))["state"] == "succeeded" and state)
        assert done["progress"]["shards_done"] == 3


def test_a_kill_between_the_last_commit_and_the_manifest_is_made_good(database_url: str, start_service: Start) -> None:
    service = start_service(database_url, LAYERTAP_UPKEEP_SECONDS="3600")
    with rig_of(service).client as client:
        rig = Rig(client, service.storage)
        rig.register()
        job = rig.planned(1)
        lease = rig.lease()
        # Where the manifest is to lie stands a folder, so that the job can't be finished.
        blocked = service.storage / "jobs" / job / "manifest.json"
        (blocked / "x").mkdir(parents=True)
        rig.commit_shard(lease)
        wait_until(lambda: "could not be finished" in service.log())
        assert rig.state(job)["state"] == "finalizing"
    service.kill()
    (blocked / "x").rmdir()
    blocked.rmdir()
    service = start_service(database_url)
    with rig_of(service).client as client:
        rig = Rig(client, service.storage)
        wait_until(lambda: rig.state(job)["state"] == "succeeded")
        assert json.loads(blocked.read_text())["complete"]


@pytest.mark.postgres
def test_postgres_leases_expire_by_its_own_clock_and_any_replica_goes_on(
    request: pytest.FixtureRequest, start_service: Start
) -> None:
    server = request.getfixturevalue("postgres")
    url = server.create()
    first = start_service(url, LAYERTAP_LEASE_SECONDS="1", LAYERTAP_UPKEEP_SECONDS="0.1")
    second = start_service(url, LAYERTAP_LEASE_SECONDS="1", LAYERTAP_UPKEEP_SECONDS="0.1")
    with rig_of(first).client as one, rig_of(second).client as two:
        rig, other = Rig(one, first.storage), Rig(two, second.storage)
        rig.register()
        job = rig.planned(1)
        lease = rig.lease()
        body = rig.write_shard(lease)
        first.kill()
        again = wait_until(lambda: other.claim()["lease"], 10)
        assert again["generation"] == 2
        other.refused(f"/v1/tasks/{lease['task']}/commit-shard", body, "lease_lost")
        other.commit_shard(again)
        wait_until(lambda: other.state(job)["state"] == "succeeded")
    assert second.stop() == 0
    server.drop(url)


def test_a_second_service_on_one_sqlite_file_is_refused(tmp_path: Path, start_service: Start) -> None:
    url = f"sqlite:///{tmp_path}/layertap.sqlite3"
    start_service(url)
    status, message = refusal(tmp_path, "--port", "0", "--database-url", url)
    assert status == 1
    assert "another service has" in message
    assert "Traceback" not in message


def test_wrong_settings_are_named(tmp_path: Path) -> None:
    status, message = refusal(tmp_path, "--host", "0.0.0.0", "--port", "0")
    assert (status, "LAYERTAP_TOKEN" in message, "Traceback" in message) == (2, True, False)
    status, message = refusal(tmp_path, "--port", "0", LAYERTAP_LEASE_SECONDS="soon")
    assert (status, "lease_seconds" in message) == (2, True)
    status, message = refusal(tmp_path, "--port", "0", "--database-url", "mysql://x/y")
    assert (status, "sqlite:///FILE" in message) == (1, True)


def test_a_port_that_is_taken_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        status, message = refusal(tmp_path, "--port", str(port), "--database-url", f"sqlite:///{tmp_path}/x")
    assert (status, str(port) in message, "Traceback" in message) == (1, True, False)


def test_sigterm_ends_streams_and_the_process_in_bounded_time(tmp_path: Path, start_service: Start) -> None:
    service = start_service(f"sqlite:///{tmp_path}/layertap.sqlite3")
    with rig_of(service).client as client:
        rig = Rig(client, service.storage)
        rig.register()
        job = rig.job()
        with client.stream("GET", f"/v1/jobs/{job}/events") as stream:
            lines = stream.iter_lines()
            assert next(lines).startswith("id: ")
            started = time.monotonic()
            service.process.send_signal(signal.SIGTERM)
            for _ in lines:
                pass
    assert service.process.wait(15) == 0
    assert time.monotonic() - started < 12
    assert "Traceback" not in service.log()


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"GET /healthz HTTP/1.1\r\nHost: loc",
        b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\nGET /heal",
        b"POST /v1/datasets HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{",
        b"POST /v1/jobs HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{",
        b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n",
    ],
    ids=["silent", "slow headers", "slow second headers", "stalled upload", "stalled body", "idle"],
)
def test_a_connection_that_stalls_is_closed(stalling: Process, sent: bytes) -> None:
    port = int(stalling.url.rsplit(":", 1)[1])
    with socket.create_connection(("127.0.0.1", port), 15) as connection:
        connection.sendall(sent)
        while connection.recv(65536):
            pass
    assert httpx.get(f"{stalling.url}/healthz").status_code == 200


@pytest.fixture(scope="module")
def stalling(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    """A service with short deadlines."""
    folder = tmp_path_factory.mktemp("stalling")
    with service_processes(folder) as start:
        yield start(
            f"sqlite:///{folder}/layertap.sqlite3",
            LAYERTAP_HEADER_SECONDS="0.5",
            LAYERTAP_BODY_STALL_SECONDS="0.5",
            LAYERTAP_KEEP_ALIVE_SECONDS="1",
        )


def test_headers_that_trickle_do_not_move_their_deadline(stalling: Process) -> None:
    port = int(stalling.url.rsplit(":", 1)[1])
    started = time.monotonic()
    with socket.create_connection(("127.0.0.1", port), 15) as connection:
        connection.settimeout(0.1)
        connection.sendall(b"GET /healthz HTTP/1.1\r\nX: ")
        while time.monotonic() - started < 10:
            try:
                connection.sendall(b"x")
                if connection.recv(1) == b"":
                    break
            except TimeoutError:
                continue
            except OSError:
                break
    assert time.monotonic() - started < 5


def test_a_slow_answer_is_no_stall(stalling: Process) -> None:
    with rig_of(stalling).client as client:
        rig = Rig(client, stalling.storage)
        rig.register()
        job = rig.job()
        started = time.monotonic()
        with client.stream("GET", f"/v1/jobs/{job}/events") as stream:
            lines = stream.iter_lines()
            assert next(lines).startswith("id: ")
            wait_until(lambda: time.monotonic() - started > 1.5)
            client.post(f"/v1/jobs/{job}/cancel")
            assert any('"state":"cancelled"' in line for line in lines)


def test_a_1_gb_shard_is_sent_in_constant_memory_and_resumed(tmp_path: Path, start_service: Start) -> None:
    size = 1_000_000_000
    service = start_service(f"sqlite:///{tmp_path}/layertap.sqlite3")
    process = psutil.Process(service.process.pid)
    with rig_of(service).client as client:
        rig = Rig(client, service.storage)
        rig.register()
        job = rig.planned(1)
        lease = rig.lease()
        path = service.storage / lease["shard"]["file"]
        path.parent.mkdir(parents=True)
        with path.open("wb") as file:
            file.truncate(size - 4)
            file.seek(size - 4)
            file.write(b"last")
        body = {**proof(lease), "bytes": size, "sha256": "ab" * 32, "rows": 1, "tokens": 7}
        rig.post(f"/v1/tasks/{lease['task']}/commit-shard", body)
        url = f"/v1/jobs/{job}/shards/0/content"
        before, peak, received = process.memory_info().rss, 0, 0
        with client.stream("GET", url) as answer:
            for chunk in answer.iter_raw(1 << 20):
                received += len(chunk)
                peak = max(peak, process.memory_info().rss)
        assert received == size
        assert peak - before < 50_000_000, f"grew by {(peak - before) / 1e6:.0f} MB"
        resumed = client.get(url, headers={"Range": f"bytes={size - 4}-", "If-Range": answer.headers["etag"]})
        assert (resumed.status_code, resumed.content) == (206, b"last")
