"""A real service process of a benchmark's own, and what a worker tells it before there is work to claim."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from layertap import storage_paths
from layertap.children import Child
from layertap.cli.run import command
from layertap.schemas.shards import Pins

MODEL = "bench"
PINS = Pins(model_hash="m", tokenizer_hash="t", chat_template_hash=None, engine_version="0", dtype="BF16")
_START_SECONDS = 60.0
_STOP_SECONDS = 20.0
_LEASE_SECONDS = 3600


class Service:
    """A running service, spoken to as client and worker would."""

    def __init__(self, url: str, storage: Path) -> None:
        self.url = url
        self.storage = storage
        self._http = httpx.Client(base_url=url, timeout=60, trust_env=False)

    def close(self) -> None:
        """Frees the connection."""
        self._http.close()

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """The answer to a JSON request. Raises `RuntimeError` when it is refused."""
        response = self._http.post(path, json=body)
        if not response.is_success:
            raise RuntimeError(f"{path}: {response.status_code} {response.text}")
        answer: dict[str, Any] = response.json()
        return answer

    def upload(self, content: bytes) -> str:
        """Uploads a small data set; its id."""
        response = self._http.post("/v1/datasets", params={"name": "rows"}, content=content)
        response.raise_for_status()
        return str(response.json()["id"])

    def register(self, worker: str) -> None:
        """Makes a worker known that offers `MODEL`: 12 blocks of hidden size 8."""
        facts = {
            "name": MODEL,
            "path": f"/models/{MODEL}",
            "num_layers": 12,
            "hidden_size": 8,
            "vocab_size": 100,
            "max_row_tokens": 4096,
            "pins": PINS.model_dump(),
        }
        nonce = (self.storage / storage_paths.NONCE_FILE).read_text()
        self.post("/v1/workers", {"id": worker, "host": "h", "version": "1", "storage_nonce": nonce, "models": [facts]})

    def claim(self, worker: str, *kinds: str) -> dict[str, Any]:
        """A lease. Raises `RuntimeError` when there is none."""
        answer = self.post("/v1/tasks/claim", claim_body(worker, os.urandom(8).hex(), *kinds))
        if answer["lease"] is None:
            raise RuntimeError("nothing was claimable")
        return dict(answer["lease"])

    def planned_job(self, worker: str, shards: int, shard_bytes: int) -> str:
        """A running job with so many ready shards of one row each; its id."""
        body = {"dataset": self.upload(b'{"text": "one"}\n'), "model": MODEL, "layers": [0, 3]}
        job = str(self.post("/v1/jobs", body)["id"])
        lease = self.claim(worker, "plan")
        listed = [{"first_row": i, "rows": 1, "tokens": 7, "bytes": shard_bytes} for i in range(shards)]
        plan = {"shards": listed, "rows": shards, "tokens": 7 * shards, "row_errors": 0, "pins": PINS.model_dump()}
        self.post(f"/v1/tasks/{lease['task']}/commit-plan", {**proof(lease, worker), **plan})
        return job


def claim_body(worker: str, request_id: str, *kinds: str) -> dict[str, Any]:
    """Body of a claim by a worker whose engine has `MODEL` loaded."""
    return {"worker": worker, "request_id": request_id, "kinds": list(kinds), "loaded_model": MODEL}


def proof(lease: dict[str, Any], worker: str) -> dict[str, Any]:
    """What every message about a held task carries."""
    return {"worker": worker, "generation": lease["generation"], "secret": lease["secret"]}


@contextmanager
def running(folder: Path, database_url: str | None = None) -> Iterator[Service]:
    """A service with its files below `folder`, on SQLite unless told otherwise; ended at the end."""
    storage = folder / "storage"
    words = [*command("service"), "--host", "127.0.0.1", "--port", "0", "--storage", str(storage)]
    words += ["--database-url", database_url or f"sqlite:///{folder / 'layertap.sqlite3'}"]
    env = dict(os.environ) | {"LAYERTAP_LEASE_SECONDS": str(_LEASE_SECONDS)}
    child = Child("service", words, folder / "service.log", env)
    try:
        service = Service(_address(child), storage)
        try:
            yield service
        finally:
            service.close()
    finally:
        child.stop(_STOP_SECONDS)


def _address(child: Child) -> str:
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline and child.exit_code is None:
        for line in child.last_lines(100):
            if "listening on " in line:
                return line.rpartition("listening on ")[2].strip()
        time.sleep(0.05)
    raise RuntimeError("the service did not start:\n" + "\n".join(child.last_lines()))
