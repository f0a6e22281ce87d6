"""`layertap up`, with the real service and a worker script that registers and leaves an orphan behind."""

import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from fixtures_service_process import free_port, until

from layertap.children import children_of

WORKER = textwrap.dedent(
    """
    import subprocess, sys, time
    from pathlib import Path
    from fixtures_service_process import PlayedWorker, ServiceProcess
    root, port, pids, mode = Path(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4]
    if mode == "broken":
        sys.exit("no engine here")
    if mode == "stubborn":
        import signal
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    orphan = subprocess.Popen(["sleep", "600"], start_new_session=True)
    pids.write_text(str(orphan.pid))
    PlayedWorker(ServiceProcess(root, port)).register()
    print("registered", flush=True)
    time.sleep(600)
    """
)
UP = textwrap.dedent(
    """
    import json, sys
    from pathlib import Path
    from layertap.cli import up
    up._WORKER_STOP_SECONDS = 2.0
    url, service, worker, logs = json.loads(sys.argv[1])
    sys.exit(up._run(url, service, worker, Path(logs), verbose=True))
    """
)


@dataclass
class Up:
    """A running `up`, and what it should leave nothing of."""

    process: subprocess.Popen[str]
    root: Path
    said: Path

    def ready(self) -> None:
        until(lambda: "Layertap is up" in self.said.read_text(), 60)

    def family(self) -> list[int]:
        """Both children and the worker's orphan."""
        return [*children_of(self.process.pid), int((self.root / "orphan").read_text())]


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def _start(root: Path, mode: str) -> Up:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    (root / "worker.py").write_text(WORKER)
    service = [sys.executable, "-P", "-m", "service", "--host", "127.0.0.1", "--port", str(port)]
    service += ["--database-url", f"sqlite:///{root / 'db.sqlite3'}", "--storage", str(root / "storage")]
    worker = [sys.executable, str(root / "worker.py"), str(root), str(port), str(root / "orphan"), mode]
    tests = str(Path(__file__).parents[1])
    env = {k: v for k, v in os.environ.items() if not k.startswith("LAYERTAP_")} | {"PYTHONPATH": tests}
    said = root / "said"
    with said.open("w") as output:
        arguments = json.dumps([url, service, worker, str(root / "logs")])
        process = subprocess.Popen(
            [sys.executable, "-c", UP, arguments], stdout=output, stderr=output, env=env, text=True
        )
    return Up(process, root, said)


@pytest.fixture
def up(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Up]:
    running = _start(tmp_path, getattr(request, "param", "good"))
    yield running
    if running.process.poll() is None:
        running.process.terminate()
    running.process.wait(30)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_ends_worker_service_and_orphans(up: Up, number: signal.Signals) -> None:
    up.ready()
    family = up.family()
    assert len(family) == 3
    up.process.send_signal(number)
    assert up.process.wait(30) == 0
    assert not [pid for pid in family if _alive(pid)]
    assert "registered" in (up.root / "logs" / "worker.log").read_text()
    assert "worker | registered" in up.said.read_text()


@pytest.mark.parametrize("up", ["stubborn"], indirect=True)
def test_a_worker_that_ignores_the_stop_is_killed_in_bounded_time(up: Up) -> None:
    up.ready()
    family = up.family()
    up.process.terminate()
    assert up.process.wait(30) == 0
    assert not [pid for pid in family if _alive(pid)]
    assert "did not stop in time" in up.said.read_text()


@pytest.mark.parametrize("up", ["broken"], indirect=True)
def test_a_worker_that_can_not_start_ends_up_with_its_last_words(up: Up) -> None:
    assert up.process.wait(60) == 1
    said = up.said.read_text()
    assert "the worker ended with code 1" in said
    assert "no engine here" in said


def test_a_service_that_dies_takes_the_worker_with_it(up: Up) -> None:
    up.ready()
    family = up.family()
    service = next(pid for pid in family if "service" in Path(f"/proc/{pid}/cmdline").read_text().split("\0"))
    os.kill(service, signal.SIGKILL)
    assert up.process.wait(30) == 1
    assert not [pid for pid in family if _alive(pid)]
    assert "the service was ended by signal 9" in up.said.read_text()


def test_killing_up_itself_ends_service_and_worker(up: Up) -> None:
    up.ready()
    children = children_of(up.process.pid)
    orphan = int((up.root / "orphan").read_text())
    try:
        up.process.kill()
        until(lambda: not [pid for pid in children if _alive(pid)])
    finally:
        os.kill(orphan, signal.SIGKILL)
