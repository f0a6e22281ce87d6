"""A shard of one gigabyte: downloaded in constant memory on both sides, and gone on with after a break.

The shard is committed through the worker protocol, as a worker does it, but made of zeros: no engine runs here.
"""

import hashlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest
from fixtures_service_process import PlayedWorker, ServiceProcess, until
from fixtures_stack import PATIENCE, Stack, open_stack
from memory_peaks import forget_peak, peak_memory

from layertap.layout import ShardLayout
from layertap.schemas.jobs import Job

LAYERS = [0, 4, 8]
TOKENS = 7_400_000
MEMORY = 100 * 1024 * 1024


class Committed(NamedTuple):
    """A succeeded job of one shard of `nbytes` bytes."""

    stack: Stack
    job: Job
    nbytes: int
    sha256: str


@pytest.fixture(scope="module")
def committed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Committed]:
    with open_stack(tmp_path_factory.mktemp("big")) as stack:
        worker = PlayedWorker(ServiceProcess(stack.root, stack.port))
        worker.register()
        job = stack.submit([{"text": "one"}], worker.MODEL, LAYERS, shard_bytes=2**31)
        worker.plan(worker.claim(), [[TOKENS]])
        lease = worker.claim()
        layout = ShardLayout.of([TOKENS], LAYERS, 16, "BF16", True)
        file = stack.storage / lease["shard"]["file"]
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("wb") as shard:
            shard.write(layout.header())
            shard.truncate(layout.nbytes)
        with file.open("rb") as shard:
            sha256 = hashlib.file_digest(shard, "sha256").hexdigest()
        held = {"worker": worker.id, "generation": lease["generation"], "secret": lease["secret"]}
        figures = {"bytes": layout.nbytes, "sha256": sha256, "rows": 1, "tokens": TOKENS}
        worker.post(f"/v1/tasks/{lease['task']}/commit-shard", **held, **figures)
        worker.close()
        yield Committed(stack, stack.succeeded(job), layout.nbytes, sha256)


def pull_command(committed: Committed, folder: Path) -> list[str]:
    url, job = committed.stack.url, committed.job.id
    return [sys.executable, "-m", "layertap.cli", "--url", url, "pull", job, str(folder), "--json"]


def test_a_gigabyte_shard_downloads_in_constant_memory_on_both_sides(committed: Committed, tmp_path: Path) -> None:
    assert committed.nbytes > 10**9
    service = committed.stack.service_pid
    before = forget_peak(service)
    code = (
        "import json, resource, runpy, sys\n"
        "import layertap.cli\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "try:\n    layertap.cli.main()\n"
        "except SystemExit as end:\n    assert not end.code, end.code\n"
        "print(json.dumps(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before), file=sys.stderr)\n"
    )
    words = [sys.executable, "-c", code, *pull_command(committed, tmp_path / "out")[3:]]
    done = subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE, env=committed.stack.env, check=True)
    report = json.loads(done.stdout)
    assert (report["bytes"], report["received_bytes"]) == (committed.nbytes, committed.nbytes)
    assert 1024 * int(done.stderr.split()[-1]) < MEMORY
    assert peak_memory(service) - before < MEMORY


def test_a_pull_that_is_killed_goes_on_where_it_was(committed: Committed, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    words = pull_command(committed, folder)
    with subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=committed.stack.env) as pull:

        def partly() -> bool:
            assert pull.poll() is None
            return any(path.stat().st_size > committed.nbytes // 8 for path in folder.glob("*.part"))

        until(partly, 60)
        os.kill(pull.pid, signal.SIGKILL)
    (part,) = folder.glob("*.part")
    there = part.stat().st_size
    assert committed.nbytes // 8 < there < committed.nbytes
    assert not (folder / "manifest.json").exists()

    again = subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE, env=committed.stack.env, check=True)
    report = json.loads(again.stdout)
    assert report["received_bytes"] <= committed.nbytes - committed.nbytes // 8
    (shard,) = folder.glob("*.safetensors")
    with shard.open("rb") as file:
        assert hashlib.file_digest(file, "sha256").hexdigest() == committed.sha256


def test_ranges_of_a_gigabyte_shard_are_exact(committed: Committed) -> None:
    stored = next((committed.stack.storage / "jobs" / committed.job.id / "shards").glob("*.safetensors"))
    url = f"/v1/jobs/{committed.job.id}/shards/0/content"
    with httpx.Client(base_url=committed.stack.url, trust_env=False) as http, stored.open("rb") as file:
        whole = http.head(url)
        assert whole.headers["content-length"] == str(committed.nbytes)
        assert whole.headers["etag"] == f'"{committed.sha256}"'
        for first, last in ((0, 9), (100, 5000), (committed.nbytes - 10, committed.nbytes - 1)):
            part = http.get(url, headers={"range": f"bytes={first}-{last}"})
            assert part.status_code == 206
            assert part.headers["content-range"] == f"bytes {first}-{last}/{committed.nbytes}"
            file.seek(first)
            assert part.content == file.read(last + 1 - first)
        beyond = http.get(url, headers={"range": f"bytes={committed.nbytes}-"})
        assert beyond.status_code == 416
