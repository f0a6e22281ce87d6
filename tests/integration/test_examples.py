"""The scripts of `examples/`, run as a reader would, the worker's part played by the test."""

import os
import subprocess
import sys
from pathlib import Path

from fixtures_service_process import PlayedWorker, ServiceProcess

EXAMPLES = Path(__file__).parents[2] / "examples"


def _run(script: str, *args: str, **env: str) -> "subprocess.Popen[str]":
    command = [sys.executable, str(EXAMPLES / script), *args]
    return subprocess.Popen(command, env=os.environ | env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_quickstart_and_read_shards_work_as_they_stand(
    service_process: ServiceProcess, played_worker: PlayedWorker, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    quickstart = _run("quickstart.py", played_worker.MODEL, str(out), LAYERTAP_URL=service_process.url)
    try:
        played_worker.do_job([[9] * 30, [7] * 29])
        said, complaints = quickstart.communicate(timeout=60)
    finally:
        quickstart.kill()
        quickstart.wait()
    assert quickstart.returncode == 0, complaints
    assert "59 rows, 1 bad" in said
    assert "narrator" in said
    assert (out / "manifest.json").exists()
    reader = _run("read_shards.py", str(out))
    said, complaints = reader.communicate(timeout=120)
    assert reader.returncode == 0, complaints
    assert "supervised tokens in 59 rows" in said
