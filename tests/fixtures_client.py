"""Pulled folders and misbehaving servers, for the tests of what users install."""

import hashlib
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from layertap import boundaries, storage_paths
from layertap.layout import ShardLayout
from layertap.schemas.jobs import Final
from layertap.schemas.shards import Manifest, ManifestShard, Pins

JOB = "job_01TEST"
NUMPY_DTYPES = {"BF16": np.dtype(ml_dtypes.bfloat16), "F16": np.dtype("<f2"), "F32": np.dtype("<f4")}


@dataclass
class Expected:
    """What one row should read back as."""

    tensors: dict[str, np.ndarray]


@dataclass
class Folder:
    """A pulled job on disk, and the rows that were put into it."""

    path: Path
    manifest: Manifest
    rows: dict[int, Expected] = field(default_factory=dict)

    @property
    def shard_paths(self) -> list[Path]:
        return [self.path / shard.file for shard in self.manifest.shards]

    def rewrite_manifest(self, **changes: Any) -> None:
        """Puts other values into manifest.json, unchecked."""
        text = (self.path / "manifest.json").read_text()
        (self.path / "manifest.json").write_text(json.dumps(json.loads(text) | changes))


def shard_bytes(layout: ShardLayout, tensors: dict[str, np.ndarray]) -> bytes:
    """The file that a worker would write."""
    data = bytearray(layout.nbytes)
    data[: layout.data_start] = layout.header()
    for name, place in layout.tensors.items():
        raw = np.ascontiguousarray(tensors[name]).tobytes()
        assert len(raw) == place.nbytes, name
        data[place.start : place.start + place.nbytes] = raw
    return bytes(data)


def build(
    path: Path,
    shards: list[list[int]],
    *,
    layers: tuple[int, ...] = (2, 5, 8),
    hidden_size: int = 16,
    dtype: str = "BF16",
    with_final: bool = True,
    job: str = JOB,
    complete: bool = True,
) -> Folder:
    """A folder whose i-th shard holds the row ids `shards[i]`; row r is 3 + r % 7 tokens long."""
    path.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(7)
    entries: list[ManifestShard] = []
    rows: dict[int, Expected] = {}
    for index, row_ids in enumerate(shards):
        lengths = [3 + row % 7 for row in row_ids]
        layout = ShardLayout.of(lengths, layers, hidden_size, dtype, with_final, {"format_version": "1"})
        t, k, h = layout.tokens, len(layers), hidden_size
        tensors = {
            "hidden_states": random.normal(size=(t, k, h)).astype(NUMPY_DTYPES[dtype]),
            "final_hidden_state": random.normal(size=(t, h)).astype(NUMPY_DTYPES[dtype]),
            "input_ids": random.integers(0, 49_000, t),
            "loss_mask": random.integers(0, 2, t).astype(np.uint8),
            "offsets": np.array(layout.offsets),
            "row_ids": np.array(row_ids),
        }
        if not with_final:
            del tensors["final_hidden_state"]
        for i, row in enumerate(row_ids):
            span = slice(layout.offsets[i], layout.offsets[i + 1])
            rows[row] = Expected({n: a[span] for n, a in tensors.items() if n not in ("offsets", "row_ids")})
        data = shard_bytes(layout, tensors)
        name = storage_paths.shard_name(index, 1)
        (path / name).write_bytes(data)
        digest = hashlib.sha256(data).hexdigest()
        entries.append(
            ManifestShard(index=index, file=name, bytes=len(data), sha256=digest, rows=len(row_ids), tokens=t)
        )
    manifest = Manifest(
        job=job,
        complete=complete,
        dataset="ds_01TEST",
        dataset_sha256="0" * 64,
        model="tiny-llama",
        num_layers=8,
        hidden_size=hidden_size,
        layers=list(layers),
        boundaries=[boundaries.names(k, 8) for k in layers],
        final=Final.POST_NORM if with_final else Final.NONE,
        pins=Pins(
            model_hash="m", tokenizer_hash="t", chat_template_hash=None, engine_version="0.5.23", dtype="bfloat16"
        ),
        rows=len(rows),
        tokens=sum(entry.tokens for entry in entries),
        row_errors=0,
        shards=entries,
    )
    (path / "manifest.json").write_text(manifest.model_dump_json())
    return Folder(path, manifest, rows)


@pytest.fixture
def pulled(tmp_path: Path) -> Folder:
    """Three shards whose row ids are neither contiguous nor in order over the shards."""
    return build(tmp_path / "pulled", [[4, 5, 9], [0, 2], [11, 30, 31]])


Fault = Callable[["_Handler", bytes], None]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: "FaultyServer"  # type: ignore[assignment]

    def do_GET(self) -> None:
        self.rfile.read(int(self.headers.get("content-length", "0")))
        self.server.requests.append((self.path, dict(self.headers)))
        body = self.server.bodies.get(self.path.partition("?")[0])
        if body is None:
            problem = {
                "type": "about:blank",
                "title": "Not found",
                "status": 404,
                "code": "not_found",
                "detail": "gone",
            }
            self.answer(404, json.dumps(problem).encode(), **{"content-type": "application/problem+json"})
            return
        fault = self.server.next_fault()
        if fault is None:
            self.serve(body)
        else:
            fault(self, body)

    do_POST = do_DELETE = do_GET  # noqa: N815  the names that http.server looks for

    def serve(self, body: bytes, *, cut: int | None = None) -> None:
        """Answers as the service does, Range and If-Range too; `cut` closes the connection after that many bytes."""
        start, etag = 0, f'"{hashlib.sha256(body).hexdigest()}"'
        wanted = self.headers.get("range", "")
        if wanted.startswith("bytes=") and self.headers.get("if-range", etag) == etag:
            start = int(wanted.removeprefix("bytes=").rstrip("-"))
        headers = {"etag": etag}
        if start:
            headers["content-range"] = f"bytes {start}-{len(body) - 1}/{len(body)}"
        self.answer(206 if start else 200, body[start:], cut=cut, **headers)

    def answer(self, status: int, body: bytes, *, cut: int | None = None, **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body if cut is None else body[:cut])
        if cut is not None:
            self.wfile.flush()
            self.close_connection = True

    def log_message(self, format: str, *args: object) -> None:
        """Silence."""


class FaultyServer(ThreadingHTTPServer):
    """A real HTTP server that answers from `bodies` and plays `faults`, one a request, before it behaves."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.bodies: dict[str, bytes] = {}
        self.faults: list[Fault | None] = []
        self.requests: list[tuple[str, dict[str, str]]] = []
        self.lock = threading.Lock()
        self.release = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def next_fault(self) -> Fault | None:
        with self.lock:
            return self.faults.pop(0) if self.faults else None

    def offer(self, folder: Folder) -> None:
        """Serves a job's manifest and shards as the service would."""
        base = f"/v1/jobs/{folder.manifest.job}"
        self.bodies[f"{base}/manifest"] = (folder.path / "manifest.json").read_bytes()
        for shard in folder.manifest.shards:
            self.bodies[f"{base}/shards/{shard.index}/content"] = (folder.path / shard.file).read_bytes()


def cut_after(count: int) -> Fault:
    """Closes the connection after `count` bytes of the body."""
    return lambda handler, body: handler.serve(body, cut=count)


def status(code: int, **headers: str) -> Fault:
    """Answers with a bare status."""
    return lambda handler, body: handler.answer(code, b"", **headers)


def whole(handler: _Handler, body: bytes) -> None:
    """Answers 200 with everything, whatever Range asks for."""
    handler.answer(200, body)


def flipped(handler: _Handler, body: bytes) -> None:
    """Answers with one bit wrong."""
    handler.answer(200, body[:-1] + bytes([body[-1] ^ 1]))


def silence(handler: _Handler, body: bytes) -> None:
    """Sends the head and a little, then nothing until the test is over."""
    handler.serve(body, cut=100)
    handler.server.release.wait(60)


@pytest.fixture
def faulty() -> Iterator[FaultyServer]:
    server = FaultyServer()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield server
    server.release.set()
    server.shutdown()
    thread.join()
    server.server_close()
