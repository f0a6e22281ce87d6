"""The real service as a child process, and a worker that a test plays step by step over HTTP."""

import hashlib
import os
import re
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from fixtures_client import NUMPY_DTYPES, shard_bytes

import layertap
from layertap import storage_paths
from layertap.children import Child
from layertap.cli.run import command
from layertap.client import Client
from layertap.layout import ShardLayout
from layertap.schemas.shards import Pins
from layertap.schemas.workers import ModelFacts

PINS = Pins(model_hash="m", tokenizer_hash="t", chat_template_hash="c", engine_version="0.5.23", dtype="bfloat16")
LISTENING = re.compile(r"listening on (http://\S+)")


def until(condition: Callable[[], Any], seconds: float = 30, pause: float = 0.02) -> Any:
    """What `condition` returns once that is true, asked every `pause` seconds. Fails after `seconds`."""
    deadline = time.monotonic() + seconds
    while True:
        value = condition()
        if value:
            return value
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(pause)


def free_port() -> int:
    """A port that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass
class ServiceProcess:
    """A running service; `restart` brings it back on the same port with the same data."""

    root: Path
    port: int
    child: Child | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def storage(self) -> Path:
        return self.root / "storage"

    def start(self) -> None:
        words = [*command("service"), "--host", "127.0.0.1", "--port", str(self.port)]
        words += ["--database-url", f"sqlite:///{self.root / 'db.sqlite3'}", "--storage", str(self.storage)]
        env = {name: value for name, value in os.environ.items() if not name.startswith("LAYERTAP_")}
        self.child = Child("service", words, self.root / "service.log", env)
        until(self._listening)

    def _listening(self) -> bool:
        assert self.child is not None
        assert self.child.exit_code is None, self.child.last_lines()
        return any(LISTENING.search(line) for line in self.child.last_lines(50))

    def stop(self) -> None:
        assert self.child is not None
        assert self.child.stop(20), self.child.last_lines()


@pytest.fixture(scope="module")
def module_service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    service = ServiceProcess(tmp_path_factory.mktemp("service"), free_port())
    service.start()
    yield service
    service.stop()


@pytest.fixture
def service_process(module_service: ServiceProcess) -> Iterator[ServiceProcess]:
    """The module's service, without jobs and data sets before and after."""
    yield module_service
    with Client(module_service.url) as client:
        for job in client.jobs():
            if not job.state.terminal:
                client.cancel(job.id)
        for job in client.jobs():
            client.wait(job.id, 30)
            client.delete(job.id)
        for dataset in client.datasets():
            client.delete(dataset.id)


@pytest.fixture
def service_client(service_process: ServiceProcess) -> Iterator[Client]:
    with Client(service_process.url) as client:
        yield client


class PlayedWorker:
    """Speaks the worker protocol; shards hold random numbers of the right shapes. Model: 8 blocks, hidden size 16."""

    MODEL = "tiny"

    def __init__(self, service: ServiceProcess) -> None:
        self.id = f"wrk_{os.urandom(8).hex()}"
        self._storage = service.storage
        self._http = httpx.Client(base_url=service.url, timeout=30, trust_env=False)
        self._random = np.random.default_rng(3)

    def close(self) -> None:
        """Ends the worker; the service takes back what it holds."""
        self.post(f"/v1/workers/{self.id}/goodbye")
        self._http.close()

    def post(self, path: str, **body: Any) -> dict[str, Any]:
        response = self._http.post(path, json=body)
        assert response.is_success, response.text
        answer: dict[str, Any] = response.json()
        return answer

    def register(self) -> None:
        nonce = (self._storage / storage_paths.NONCE_FILE).read_text()
        facts = ModelFacts(
            name=self.MODEL,
            path="/models/tiny",
            num_layers=8,
            hidden_size=16,
            vocab_size=100,
            max_row_tokens=512,
            pins=PINS,
        )
        self.post(
            "/v1/workers",
            id=self.id,
            host="here",
            version=layertap.__version__,
            storage_nonce=nonce,
            models=[facts.model_dump()],
        )

    def claim(self) -> dict[str, Any]:
        """The next lease."""

        def ask() -> dict[str, Any] | None:
            wanted = {"worker": self.id, "request_id": os.urandom(8).hex(), "kinds": ["plan", "shard"]}
            lease: dict[str, Any] | None = self.post("/v1/tasks/claim", **wanted, loaded_model=self.MODEL)["lease"]
            return lease

        lease: dict[str, Any] = until(ask)
        return lease

    def plan(self, lease: dict[str, Any], shards: list[list[int]], errors: dict[int, str] | None = None) -> None:
        """Commits a plan whose i-th shard has rows of the lengths `shards[i]`."""
        held = self._held(lease)
        planned, first = [], 0
        for lengths in shards:
            layout = self._layout(lease, lengths)
            planned.append({"first_row": first, "rows": len(lengths), "tokens": layout.tokens, "bytes": layout.nbytes})
            first += len(lengths)
        if errors:
            listed = [{"row_id": row, "code": "too_long", "reason": why} for row, why in errors.items()]
            self.post(f"/v1/tasks/{lease['task']}/row-errors", **held, errors=listed)
        self.post(
            f"/v1/tasks/{lease['task']}/commit-plan",
            **held,
            shards=planned,
            rows=first,
            tokens=sum(map(sum, shards)),
            row_errors=len(errors or {}),
            pins=PINS.model_dump(),
        )

    def extract(self, lease: dict[str, Any], lengths: list[int]) -> None:
        """Writes and commits the shard of the lease."""
        spec = lease["shard"]
        layout = self._layout(lease, lengths)
        dtypes = {**NUMPY_DTYPES, "I64": np.dtype("<i8"), "U8": np.dtype("u1")}
        tensors = {n: self._random.integers(0, 2, p.shape).astype(dtypes[p.dtype]) for n, p in layout.tensors.items()}
        tensors["offsets"] = np.array(layout.offsets)
        tensors["row_ids"] = np.arange(spec["first_row"], spec["first_row"] + len(lengths))
        data = shard_bytes(layout, tensors)
        path = self._storage / spec["file"]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        self.post(
            f"/v1/tasks/{lease['task']}/commit-shard",
            **self._held(lease),
            bytes=len(data),
            sha256=hashlib.sha256(data).hexdigest(),
            rows=len(lengths),
            tokens=layout.tokens,
        )

    def report(self, lease: dict[str, Any], tokens_per_second: float, **figures: Any) -> None:
        """Says how fast the shard of the lease goes, and the worker with it."""
        told = {
            "tokens_per_second": tokens_per_second,
            "bytes_per_second": 0.0,
            "plain_share": tokens_per_second / figures["plain_tokens_per_second"],
            **figures,
        }
        self.post(f"/v1/tasks/{lease['task']}/heartbeat", **self._held(lease), tokens_per_second=tokens_per_second)
        self.post(f"/v1/workers/{self.id}/control", loaded_model=self.MODEL, figures=told)

    def fail(self, lease: dict[str, Any], reason: str) -> None:
        """Ends the lease for good, by a failure that no retry mends."""
        self.post(
            f"/v1/tasks/{lease['task']}/fail", **self._held(lease), code="engine_died", reason=reason, retryable=False
        )

    def do_job(self, shards: list[list[int]], errors: dict[int, str] | None = None) -> None:
        """Plans the one queued job and extracts every shard of it."""
        self.plan(self.claim(), shards, errors)
        for _ in shards:
            lease = self.claim()
            self.extract(lease, shards[lease["shard"]["index"]])

    def _held(self, lease: dict[str, Any]) -> dict[str, Any]:
        return {"worker": self.id, "generation": lease["generation"], "secret": lease["secret"]}

    def _layout(self, lease: dict[str, Any], lengths: list[int]) -> ShardLayout:
        return ShardLayout.of(lengths, lease["layers"], 16, "BF16", lease["final"] == "post_norm")


@pytest.fixture
def played_worker(service_process: ServiceProcess) -> Iterator[PlayedWorker]:
    worker = PlayedWorker(service_process)
    worker.register()
    yield worker
    worker.close()
