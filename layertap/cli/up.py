"""`layertap up`: a service and a worker on this machine in one command, both gone when it ends."""

import os
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer
from rich.markup import escape

from layertap.children import Child, adopt_orphans, children_of, end_orphans
from layertap.cli.app import app, err, out
from layertap.cli.run import command
from layertap.client import Client
from layertap.errors import LayertapError
from layertap.schemas.workers import WorkerState

HOST = "127.0.0.1"
_TICK_SECONDS = 0.1
_SERVICE_START_SECONDS = 120.0
_WORKER_START_SECONDS = 600.0
_WORKER_STOP_SECONDS = 70.0
"""Longer than the 60 s that a worker gives itself for a graceful stop."""
_SERVICE_STOP_SECONDS = 15.0


class Device(StrEnum):
    """Where the engine computes."""

    CPU = "cpu"
    CUDA = "cuda"


class _StopAsked:
    """How often Ctrl-C, SIGTERM or SIGHUP has come. A plain counter: nothing a signal handler could deadlock on."""

    def __init__(self) -> None:
        self.times = 0

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.times += 1

    def urgently(self) -> bool:
        """Asked more than once: no more waiting."""
        return self.times > 1

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Takes the signals while the block runs."""
        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        before = [signal.signal(number, self) for number in numbers]
        try:
            yield
        finally:
            for number, handler in zip(numbers, before, strict=True):
                signal.signal(number, handler)


class _ChildDiedError(Exception):
    def __init__(self, child: Child) -> None:
        super().__init__(child.name)
        self.child = child


class _Stack:
    """The children of one `up`, the service first."""

    def __init__(self, asked: _StopAsked, verbose: bool) -> None:
        self._asked, self._verbose = asked, verbose
        self.children: list[Child] = []

    def tick(self) -> bool:
        """Waits a moment; false once a stop is asked. Raises `_ChildDiedError`."""
        time.sleep(_TICK_SECONDS)
        if self._verbose:
            self._show_logs()
        if self._asked.times:
            return False
        for child in self.children:
            if child.exit_code is not None:
                raise _ChildDiedError(child)
        return True

    def stop(self) -> None:
        """Ends the worker, then the service, in bounded time."""
        for child in reversed(self.children):
            seconds = _WORKER_STOP_SECONDS if child.name == "worker" else _SERVICE_STOP_SECONDS
            if not child.stop(seconds, self._asked.urgently):
                err.print(f"[yellow]the {child.name} did not stop in time and was killed[/]")
        if self._verbose:
            self._show_logs()

    def _show_logs(self) -> None:
        for child in self.children:
            for line in child.new_lines():
                err.print(f"{child.name:>7} | {line}", markup=False, soft_wrap=True)


@app.command()
def up(
    model: Annotated[list[Path], typer.Option(metavar="DIR", help="Folder of a model, or of models; repeatable.")],
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port of the service, on 127.0.0.1.")] = 8178,
    data_dir: Annotated[Path, typer.Option(metavar="DIR", help="Database, shards and logs.")] = Path(".layertap"),
    device: Annotated[Device | None, typer.Option(help="By default what the worker finds.")] = None,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show what both log.")] = False,
) -> None:
    """Start a service and a worker here; Ctrl-C stops both."""
    for folder in model:
        if not any(folder.glob("config.json")) and not any(folder.glob("*/config.json")):
            raise LayertapError(
                f"--model {folder} holds no config.json; name the folder of a Hugging Face model, or a folder of such"
            )
    service, worker = command("service"), command("worker")
    _check_port(port)
    root = data_dir.absolute()
    url = f"http://{HOST}:{port}"
    storage = str(root / "storage")
    try:
        os.makedirs(storage, exist_ok=True)
    except OSError as e:
        raise LayertapError(f"--data-dir {data_dir} can't be used ({e.strerror}); name another folder") from None
    service += ["--host", HOST, "--port", str(port), "--storage", storage]
    service += ["--database-url", f"sqlite:///{root / 'layertap.sqlite3'}"]
    worker += ["--service", url, "--storage", storage, "--run-dir", str(root / "worker")]
    for folder in model:
        worker += ["--model", str(folder.absolute())]
    worker += ["--device", device] if device else []
    code = _run(url, service, worker, root / "logs", verbose)
    raise typer.Exit(code)


def _run(url: str, service: list[str], worker: list[str], logs: Path, verbose: bool) -> int:
    """Runs both until a stop is asked (0) or one of them ends by itself (1)."""
    asked = _StopAsked()
    stack = _Stack(asked, verbose)
    spared = children_of(os.getpid())
    adopt_orphans()
    with asked.listening(), Client(url, tries=1, timeout=5.0) as client:
        try:
            err.print("starting the service …", style="dim")
            stack.children.append(Child("service", service, logs / "service.log"))
            known = _wait_for_service(stack, client)
            if known is None:
                return 0
            err.print("starting the worker …", style="dim")
            stack.children.append(Child("worker", worker, logs / "worker.log"))
            if not _wait_for_worker(stack, client, known):
                return 0
            names = ", ".join(sorted(m.name for m in client.models()))
            where = f"models: {escape(names)}  logs: {escape(str(logs))}"
            out.print(f"[green]Layertap is up[/] at {url}  {where}  Ctrl-C stops it", soft_wrap=True)
            while stack.tick():
                pass
        except _ChildDiedError as e:
            _print_death(e.child)
            return 1
        finally:
            if stack.children:
                err.print("stopping …", style="dim")
            stack.stop()
            end_orphans(spared)
    return 0


def _wait_for_service(stack: _Stack, client: Client) -> set[str] | None:
    """The ids of the workers it knows from before, once it is ready; None when a stop was asked first."""
    deadline = time.monotonic() + _SERVICE_START_SECONDS
    while stack.tick():
        try:
            client.ready()
            return {worker.id for worker in client.workers()}
        except LayertapError as e:
            if time.monotonic() > deadline:
                raise LayertapError(
                    f"the service was not ready after {_SERVICE_START_SECONDS:.0f} s ({e}); see {stack.children[0].log}"
                ) from None
    return None


def _wait_for_worker(stack: _Stack, client: Client, known: set[str]) -> bool:
    """True once a worker that is not in `known` has registered; false when a stop was asked first."""
    deadline = time.monotonic() + _WORKER_START_SECONDS
    while stack.tick():
        try:
            if any(w.id not in known and w.state is WorkerState.ACTIVE for w in client.workers()):
                return True
        except LayertapError as e:
            if time.monotonic() > deadline:
                raise LayertapError(f"the service stopped answering ({e}); see {stack.children[0].log}") from None
        if time.monotonic() > deadline:
            raise LayertapError(
                f"no worker had registered after {_WORKER_START_SECONDS:.0f} s; see {stack.children[1].log}"
            )
    return False


def _print_death(child: Child) -> None:
    code = child.exit_code
    how = f"was ended by signal {-code}" if code is not None and code < 0 else f"ended with code {code}"
    err.print(f"[bold red]error:[/] the {child.name} {how}; the end of {escape(str(child.log))}:", soft_wrap=True)
    for line in child.last_lines():
        err.print(f"  {line}", markup=False, soft_wrap=True)


def _check_port(port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError as e:
            raise LayertapError(
                f"port {port} on {HOST} can't be used ({e.strerror}); choose another with --port"
            ) from None
