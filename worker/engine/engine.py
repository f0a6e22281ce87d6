"""The engine's life: launch, wait until it serves with the capture in, stop for certain.

The server runs in its own session, so that one signal reaches its whole process group, and is tied to the worker, so
that it does not outlive it. What escapes the group is found by its mark.
"""

import asyncio
import json
import logging
import os
import secrets
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

from worker import tied
from worker.capture.report import Attached, attached_dir, read_reports
from worker.capture.session import sessions_dir
from worker.engine import processes
from worker.engine.client import EngineClient, EngineDownError, EngineInfo
from worker.engine.spec import EngineSpec, command, environment
from worker.patch.choice import make, patch_digest
from worker.patch.installer import Applied
from worker.patch.package import PatchError, find_package

logger = logging.getLogger(__name__)

MARK = "LAYERTAP_RUN_DIR"
_POLL_S = 0.2
_TERM_S = 3.0
_KILL_S = 10.0
_LOG_TAIL_LINES = 60


class EngineLaunchError(Exception):
    """The engine did not come up, or came up without the capture; the message says which, `log_tail` its last words."""

    def __init__(self, message: str, log_tail: str) -> None:
        super().__init__(message)
        self.log_tail = log_tail


class EngineStopError(Exception):
    """Processes of the engine survived every way to end them, or its patch could not be taken out."""


class Engine:
    """One engine, from launch to stop. `directory` holds its log, reports and sessions."""

    def __init__(self, spec: EngineSpec, directory: Path, prefill_timeout: float) -> None:
        self.spec = spec
        self.directory = directory
        self.info: EngineInfo | None = None
        self.reports: list[Attached] = []
        self._port = _free_port()
        self._api_key = secrets.token_hex(24)
        self._installer = make(spec.installer, find_package(), None if spec.patch_dir is None else Path(spec.patch_dir))
        self._process: subprocess.Popen[bytes] | None = None
        self.client = EngineClient(self._port, self._api_key, prefill_timeout)

    @property
    def log_path(self) -> Path:
        """The server's output, all of it."""
        return self.directory / "engine.log"

    @property
    def alive(self) -> bool:
        """Whether the server process runs."""
        return self._process is not None and self._process.poll() is None

    async def launch(self, timeout: float) -> None:
        """Starts the server; returns once it serves and every rank reported in. Raises `EngineLaunchError`."""
        shutil.rmtree(self.directory, ignore_errors=True)
        for folder in (self.directory, attached_dir(self.directory), sessions_dir(self.directory)):
            folder.mkdir(parents=True, exist_ok=True)
        try:
            self._process = self._start(await self._patched())
            logger.info("engine launching: %s on port %d, log %s", self.spec.model_path, self._port, self.log_path)
            await self._wait_serving(timeout)
            await self._check_attached()
        except BaseException:
            await self.stop()
            raise

    async def _patched(self) -> Applied:
        try:
            return await asyncio.to_thread(self._installer.apply)
        except PatchError as error:
            raise EngineLaunchError(f"the capture cannot be installed: {error}", "") from error

    def _start(self, applied: Applied) -> "subprocess.Popen[bytes]":
        argv = tied.command(os.getpid(), command(self.spec, self._port, self._api_key, applied))
        env = environment(self.spec, os.environ, self.directory, applied)
        with self.log_path.open("wb") as log:
            return subprocess.Popen(
                argv, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )

    async def _wait_serving(self, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        while not await self.client.serving():
            if not self.alive:
                code = None if self._process is None else self._process.returncode
                raise EngineLaunchError(f"the engine ended while launching (exit code {code})", self.log_tail())
            if time.monotonic() > deadline:
                raise EngineLaunchError(f"the engine did not serve within {timeout:.0f} s", self.log_tail())
            await asyncio.sleep(_POLL_S)

    async def _check_attached(self) -> None:
        self.reports = read_reports(self.directory)
        if len(self.reports) != self.spec.tensor_parallel:
            raise EngineLaunchError(
                f"the capture reported in on {len(self.reports)} of {self.spec.tensor_parallel} ranks: "
                "the engine runs unpatched",
                self.log_tail(),
            )
        if any(report.pp_size > 1 for report in self.reports):
            raise EngineLaunchError("pipeline parallelism is not supported; use tensor parallelism", self.log_tail())
        try:
            self.info = await self.client.info()
        except EngineDownError as error:
            raise EngineLaunchError(f"the engine stopped answering: {error}", self.log_tail()) from error

    def log_tail(self, lines: int = _LOG_TAIL_LINES) -> str:
        """The last lines of the log."""
        try:
            with self.log_path.open("rb") as log:
                log.seek(max(0, self.log_path.stat().st_size - (64 << 10)))
                text = log.read().decode(errors="replace")
        except OSError:
            return ""
        return "\n".join(text.splitlines()[-lines:]).replace(self._api_key, "***")

    async def stop(self) -> None:
        """Ends every process: terminate, kill the group, sweep by mark, verify. Raises `EngineStopError`."""
        await self.client.aclose()
        await asyncio.to_thread(self._stop)

    def _stop(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            self._end(process)
        try:
            self._installer.revert()
        except PatchError as error:
            raise EngineStopError(f"the engine has ended, but its patch stays in: {error}") from error

    def _end(self, process: "subprocess.Popen[bytes]") -> None:
        _signal_group(process.pid, signal.SIGTERM)
        try:
            process.wait(_TERM_S)
        except subprocess.TimeoutExpired:
            logger.warning("engine %d ignored SIGTERM for %.0f s, killing its group", process.pid, _TERM_S)
        _signal_group(process.pid, signal.SIGKILL)
        process.wait(_KILL_S)
        end_marked(self.directory)

    def describe(self) -> dict[str, object]:
        """What the manifest says of the engine."""
        assert self.info is not None
        first = self.reports[0]
        return {
            "engine": "sglang",
            "engine_version": self.info.version,
            "architecture": first.architecture,
            "strategy": first.strategy,
            "installer": first.installer,
            "patch_digest": patch_digest(self._installer),
            "tensor_parallel": first.tp_size,
            "server_args": json.loads(json.dumps(self.info.server_args)),
        }


def end_marked(directory: Path, timeout: float = _KILL_S) -> int:
    """Ends every process that bears the mark of an engine at or below `directory`; returns how many there were.

    Raises `EngineStopError` if one survives.
    """
    pids = processes.marked(MARK, str(directory), prefix=True)
    left = processes.kill_and_verify(pids, timeout)
    if left:
        raise EngineStopError(f"processes {left} of the engine survived SIGKILL for {timeout:.0f} s")
    return len(pids)


def _signal_group(group: int, sig: signal.Signals) -> None:
    try:
        os.killpg(group, sig)
    except ProcessLookupError:
        return


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
