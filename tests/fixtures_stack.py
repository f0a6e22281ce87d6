"""The whole chain as real processes: one service, and workers with real engines, below one folder of their own.

Every process that a stack starts, and every one that those start, bears the stack's mark in its environment. At the end
all are stopped, and that none is left is checked, so that a test that leaks a process fails.
"""

import json
import os
import re
import shutil
import signal
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from fixtures_service_process import free_port, until

import layertap
from layertap.children import Child
from layertap.cli.run import command
from layertap.client import Client
from layertap.reader import Extraction
from layertap.schemas.jobs import Job, JobState
from worker.capture.session import Ledger, sessions_dir
from worker.engine import processes
from worker.engine.engine import MARK as ENGINE_MARK

Rows = Sequence[Mapping[str, Any] | str]
"""Lines of a data set: objects, or text as it is."""
MARK = "TEST_STACK"
CHUNK = 128
CHUNKED = ("--chunked-prefill-size", str(CHUNK), "--max-inflight-tokens", "2048")
"""Flags of a worker whose engine takes longer rows in several chunks, several rows at a time."""
SLOW = ("--chunked-prefill-size", "64", "--max-inflight-tokens", "64")
"""Flags of a worker that goes slowly enough to be interrupted: one small chunk in the engine at a time."""
PATIENCE = 900.0
"""Seconds that work may take: no promise, just a bound that a busy machine keeps too."""
_START_SECONDS = 180.0
_STOP_SECONDS = 75.0
_GONE_SECONDS = 20.0
_LOG_LINES, _LINE_CHARS, _ENGINE_LOGS = 60, 400, 6
_REGISTERED = re.compile(r"registered as (wrk_\w+)")
_open: list["Stack"] = []
_STRICT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role == 'system' %}{{ raise_exception('no system turns') }}{% endif %}"
    "{% set text = message.content %}"
    "{% if message.role == 'assistant' and not loop.last %}{% set text = text.split('</think>')[-1] %}{% endif %}"
    "{{ '<|im_start|>' + message.role + '\\n' + text + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


class WorkerProcess:
    """A real `python -m worker`, offering the models it was given, its engine on the CPU."""

    def __init__(self, name: str, run_dir: Path, words: list[str], log: Path, env: Mapping[str, str]) -> None:
        self.run_dir = run_dir
        self.child = Child(name, words, log, env)

    @property
    def id(self) -> str:
        """The id it registered under last; waits for the registration."""

        def registered() -> str | None:
            if found := _REGISTERED.findall(self.log()):
                return str(found[-1])
            assert self.child.exit_code is None, self.log()
            return None

        return str(until(registered, _START_SECONDS))

    def log(self) -> str:
        """What this process has logged."""
        return "\n".join(self.child.last_lines(10_000))

    def engine_logs(self) -> list[Path]:
        """The log of each engine launch of this run directory, oldest first."""
        return sorted(self.run_dir.glob("engine-*/engine.log"))

    def engine_pids(self) -> frozenset[int]:
        """Processes of its engine that are alive, found by the mark that the engine's environment bears."""
        marked = processes.marked(ENGINE_MARK, str(self.run_dir), prefix=True)
        return frozenset(pid for pid in marked if processes.alive(pid))

    def engine(self) -> httpx.Client:
        """A client of the running engine; its address and key stand in its command line."""
        for pid in self.engine_pids():
            words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
            if "--api-key" in words:
                port, key = (words[words.index(flag) + 1] for flag in ("--port", "--api-key"))
                headers = {"authorization": f"Bearer {key}"}
                return httpx.Client(base_url=f"http://127.0.0.1:{port}", headers=headers, timeout=10, trust_env=False)
        raise AssertionError("no engine runs")

    def sessions(self) -> list[Path]:
        """Files of the capture sessions that are open now."""
        # A glob, since an engine's folder may still be on its way.
        return [file for folder in self.run_dir.glob("engine-*") for file in sessions_dir(folder).glob("*")]

    def progress(self) -> list[tuple[int, int]]:
        """For each shard in prefill: tokens written, and tokens in all."""
        found = []
        for file in self.sessions():
            # A session may end while it is looked at.
            with suppress(OSError):
                if file.suffix == ".ledger" and "probe" not in file.name:
                    ledger = Ledger.open(file)
                    found.append((ledger.progress()[1], int(ledger.lengths.sum())))
        return found

    def wait_mid_shard(self, seconds: float = PATIENCE) -> None:
        """Returns once some shard is partly written."""
        until(lambda: any(0 < written < total for written, total in self.progress()), seconds)

    def kill(self) -> None:
        """SIGKILL to the worker process alone."""
        os.kill(self.child.pid, signal.SIGKILL)
        until(lambda: self.child.exit_code is not None)

    def pause(self) -> None:
        """SIGSTOP to the worker process alone."""
        os.kill(self.child.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """SIGCONT."""
        os.kill(self.child.pid, signal.SIGCONT)

    def terminate(self, seconds: float = _STOP_SECONDS) -> int:
        """SIGTERM; the exit code."""
        os.kill(self.child.pid, signal.SIGTERM)
        until(lambda: self.child.exit_code is not None, seconds)
        code = self.child.exit_code
        assert code is not None
        return code


class Stack:
    """One service with its database and storage, and its workers. `env` goes to every process."""

    def __init__(self, root: Path, database_url: str | None = None, env: Mapping[str, str] | None = None) -> None:
        self.root = root
        self.storage = root / "storage"
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.database_url = database_url or f"sqlite:///{root / 'layertap.sqlite3'}"
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("LAYERTAP_")}
        self.env = {**inherited, **(env or {}), MARK: str(root)}
        self.workers: list[WorkerProcess] = []
        self.client = Client(self.url)
        self._service: Child | None = None
        self._uploads = 0

    @property
    def service_pid(self) -> int:
        assert self._service is not None
        return self._service.pid

    def start_service(self) -> None:
        """Starts the service, on the same port and data each time; returns once it answers."""
        words = [*command("service"), "--host", "127.0.0.1", "--port", str(self.port)]
        words += ["--database-url", self.database_url, "--storage", str(self.storage)]
        service = self._service = Child("service", words, self.root / "service.log", self.env)

        def listening() -> bool:
            assert service.exit_code is None, service.last_lines()
            return any("listening on" in line for line in service.last_lines(1000))

        until(listening, _START_SECONDS)

    def kill_service(self) -> None:
        """SIGKILL."""
        assert self._service is not None
        os.kill(self._service.pid, signal.SIGKILL)
        until(lambda: self._service is not None and self._service.exit_code is not None)

    def launch_worker(
        self, name: str, *models: Path, flags: Sequence[str] = (), url: str | None = None, storage: Path | None = None
    ) -> WorkerProcess:
        """Starts a worker with the run directory `name`, without waiting for it."""
        run_dir = self.root / name
        words = [*command("worker"), "--service", url or self.url, "--storage", str(storage or self.storage)]
        words += ["--run-dir", str(run_dir), "--device", "cpu", "--poll-interval", "0.5"]
        for model in models:
            words += ["--model", str(model)]
        worker = WorkerProcess(name, run_dir, [*words, *flags], self.root / f"{name}.log", self.env)
        self.workers.append(worker)
        return worker

    def start_worker(
        self, name: str, *models: Path, flags: Sequence[str] = (), url: str | None = None
    ) -> WorkerProcess:
        """Starts a worker with the run directory `name`; returns once it has registered."""
        worker = self.launch_worker(name, *models, flags=flags, url=url)
        assert worker.id
        return worker

    def write_rows(self, rows: Rows) -> Path:
        """A JSONL file of these rows, strings as they are."""
        self._uploads += 1
        path = self.root / f"rows-{self._uploads}.jsonl"
        lines = (row if isinstance(row, str) else json.dumps(row) for row in rows)
        path.write_text("".join(line + "\n" for line in lines))
        return path

    def submit(self, rows: Rows, model: str, layers: Sequence[int], **more: Any) -> Job:
        """Uploads the rows and asks for their states."""
        dataset = self.client.upload_dataset(self.write_rows(rows))
        return self.client.create_job(dataset.id, model, layers, **more)

    def succeeded(self, job: Job, seconds: float = PATIENCE) -> Job:
        """The job, once it has succeeded."""
        ended = self.client.wait(job.id, seconds)
        assert ended.state is JobState.SUCCEEDED, ended.failure
        return ended

    def pull(self, job: Job) -> Extraction:
        """The job's rows, downloaded and verified."""
        folder = self.root / "pulled" / job.id
        self.client.pull(job.id, folder)
        rows = layertap.open(folder)
        rows.verify()
        return rows

    def extract(
        self,
        rows: Rows,
        model: str,
        layers: Sequence[int],
        seconds: float = PATIENCE,
        **more: Any,
    ) -> Extraction:
        """Uploads, extracts, downloads, verifies."""
        return self.pull(self.succeeded(self.submit(rows, model, layers, **more), seconds))

    def query(self, statement: str, *values: Any) -> list[tuple[Any, ...]]:
        """Reads the SQLite database beside the service."""
        with closing(sqlite3.connect(f"file:{self.root / 'layertap.sqlite3'}?mode=ro", uri=True)) as database:
            return database.execute(statement, values).fetchall()

    def left(self) -> list[int]:
        """Process ids of everything this stack ever started, directly or not, that is alive."""
        found = {*processes.marked(MARK, str(self.root))}
        found |= {*processes.marked(ENGINE_MARK, str(self.root), prefix=True)}
        return sorted(pid for pid in found if processes.alive(pid))

    def logs(self) -> Iterator[tuple[str, str]]:
        """The end of every log, of the newest engines' only."""
        engines = sorted(self.root.glob("*/engine-*/engine.log"), key=lambda path: path.stat().st_mtime)
        for path in [*sorted(self.root.glob("*.log")), *engines[-_ENGINE_LOGS:]]:
            lines = path.read_text(errors="replace").splitlines()[-_LOG_LINES:]
            yield str(path.relative_to(self.root)), "\n".join(line[:_LINE_CHARS] for line in lines)

    def close(self) -> None:
        """Stops everything. Fails if anything is left, or did not stop when asked, and ends it all the same."""
        self.client.close()
        children = [worker.child for worker in self.workers] + ([self._service] if self._service else [])
        late = [child.name for child in children if child.exit_code is None and not child.stop(_STOP_SECONDS)]
        try:
            until(lambda: not self.left(), _GONE_SECONDS)
        finally:
            left = processes.kill_and_verify(self.left(), _GONE_SECONDS)
        assert not left
        assert not late, f"{', '.join(late)} did not stop on SIGTERM within {_STOP_SECONDS:.0f} s"


@contextmanager
def open_stack(
    root: Path, database_url: str | None = None, env: Mapping[str, str] | None = None, service: bool = True
) -> Iterator[Stack]:
    """A stack below `root` whose service runs; closed, and checked to be gone, at the end."""
    root.mkdir(parents=True, exist_ok=True)
    stack = Stack(root, database_url, env)
    _open.append(stack)
    try:
        if service:
            stack.start_service()
        yield stack
    finally:
        try:
            stack.close()
        finally:
            _open.remove(stack)


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[Stack]:
    """A stack of the test's own, with short leases and no worker yet."""
    with open_stack(tmp_path / "stack", env={"LAYERTAP_LEASE_SECONDS": "4"}) as opened:
        yield opened


@pytest.fixture(scope="session")
def strict_llama(tmp_path_factory: pytest.TempPathFactory, tiny_llama: Path) -> Path:
    """tiny-llama, under that name, with a chat template that makes trouble as real ones do.

    It refuses a system turn, and strips the reasoning of every assistant turn but the last.
    """
    folder = tmp_path_factory.mktemp("models") / tiny_llama.name
    shutil.copytree(tiny_llama, folder, copy_function=os.link)
    (folder / "chat_template.jinja").unlink()
    (folder / "chat_template.jinja").write_text(_STRICT_TEMPLATE)
    return folder


@pytest.fixture(scope="session")
def warm_stack(tmp_path_factory: pytest.TempPathFactory, strict_llama: Path) -> Iterator[Stack]:
    """A healthy stack with one worker that serves tiny-llama, shared by all tests that only use it."""
    with open_stack(tmp_path_factory.mktemp("warm")) as opened:
        opened.start_worker("worker", strict_llama)
        yield opened


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Iterator[None]:
    """Shows the logs of every open stack with a failure."""
    report = yield
    if report.failed:
        report.sections += [(f"log of {name}", text) for stack in _open for name, text in stack.logs()]
    return report
