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
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from worker import tied
from worker.capture.report import Attached, attached_dir, read_reports
from worker.capture.session import sessions_dir
from worker.engine import processes
from worker.engine.client import EngineClient, EngineDownError, EngineInfo
from worker.engine.gpus import gpus_of
from worker.engine.judgement import Judgement
from worker.engine.spec import EngineSpec, Strategy, command, environment
from worker.patch.choice import make, patch_digest
from worker.patch.installer import UNPATCHED, Applied
from worker.patch.package import PatchError, find_package
from worker.patience import within

logger = logging.getLogger(__name__)

MARK = "LAYERTAP_ENGINE_DIR"
_POLL_S = 0.2
_KILL_S = 10.0
_LOG_BYTES = 64 << 20
_STOP_S = 45.0


class EngineLaunchError(Exception):
    """The engine did not come up; the message says how far it came."""


class EngineUnpatchedError(EngineLaunchError):
    """The engine serves, but without the capture on every rank."""


class EngineStopError(Exception):
    """Processes of the engine survived every way to end them, or its patch could not be taken out."""


class Engine:
    """One engine, from launch to stop. `directory` holds its log, reports and sessions."""

    def __init__(self, spec: EngineSpec, directory: Path, prefill_timeout: float) -> None:
        self.spec = spec
        self.directory = directory
        self.info: EngineInfo | None = None
        self.reports: list[Attached] = []
        self.judgement: Judgement | None = None
        self.plain_tokens_per_s: float | None = None
        self._port = _free_port()
        self._api_key = secrets.token_hex(24)
        patch_dir = None if spec.patch_dir is None else Path(spec.patch_dir)
        self._installer = make(spec.installer, find_package(), patch_dir) if spec.installer else None
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

    @property
    def strategy(self) -> Strategy:
        """How rows are to be read: as the self-check found right, and until then as the engine was launched."""
        return self.spec.strategy if self.judgement is None else self.judgement.strategy

    @property
    def pid(self) -> int | None:
        """Process id of the server, which leads the engine's session and process group."""
        return None if self._process is None else self._process.pid

    @property
    def gpus(self) -> tuple[str, ...]:
        """The GPUs that it is given, by number or UUID."""
        return gpus_of(self.spec, os.environ)

    def log_bytes(self) -> int:
        """How long the log is."""
        try:
            return self.log_path.stat().st_size
        except OSError:
            return 0

    def rotate_log(self) -> None:
        """Moves a log that has grown too long aside, as `engine.log.1`, and goes on with an empty one."""
        if self.log_bytes() > _LOG_BYTES:
            old = self.log_path.with_suffix(".log.1")
            try:
                shutil.copyfile(self.log_path, old)
            except OSError:
                # No room for it; nor must the log take what is left.
                old.unlink(missing_ok=True)
            os.truncate(self.log_path, 0)

    async def start(self) -> None:
        """Puts the patch in place and starts the server. Raises `EngineLaunchError`. `stop` must follow, always."""
        try:
            shutil.rmtree(self.directory, ignore_errors=True)
            for folder in (self.directory, attached_dir(self.directory), sessions_dir(self.directory)):
                folder.mkdir(parents=True, exist_ok=True)
            self._process = self._spawn(await self._patched())
        except OSError as error:
            raise EngineLaunchError(f"the engine cannot be started in {self.directory}: {error}") from error
        logger.info("engine launching: %s on port %d, log %s", self.spec.model_path, self._port, self.log_path)

    async def until_serving(self) -> None:
        """Returns once the server answers and every rank has reported in. Raises `EngineLaunchError`. Unbounded."""
        while not await self.client.serving():
            if not self.alive:
                code = None if self._process is None else self._process.returncode
                raise EngineLaunchError(f"the engine ended while launching (exit code {code})")
            await asyncio.sleep(_POLL_S)
        self._check_attached()
        try:
            self.info = await self.client.info()
        except EngineDownError as error:
            raise EngineLaunchError(f"the engine stopped answering: {error}") from error

    async def launch(self, timeout: float) -> None:
        """Starts the server and returns once it serves; stops it again if that fails. Raises `EngineLaunchError`."""
        try:
            await self.start()
            async with asyncio.timeout(timeout):
                await self.until_serving()
        except TimeoutError as error:
            await self.stop()
            raise EngineLaunchError(f"the engine did not serve within {timeout:.0f} s") from error
        except BaseException:
            await self.stop()
            raise

    async def _patched(self) -> Applied:
        if self._installer is None:
            return UNPATCHED
        try:
            return await asyncio.to_thread(self._installer.apply)
        except PatchError as error:
            raise EngineLaunchError(f"the capture cannot be installed: {error}") from error

    def _spawn(self, applied: Applied) -> "subprocess.Popen[bytes]":
        argv = tied.command(os.getpid(), command(self.spec, self._port, self._api_key, applied))
        env = environment(self.spec, os.environ, self.directory, applied)
        # Appending, so that the log can be cut short under the running engine.
        with self.log_path.open("ab") as log:
            return subprocess.Popen(
                argv, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )

    def _check_attached(self) -> None:
        try:
            self.reports = read_reports(self.directory)
        except (ValueError, TypeError) as error:
            raise EngineLaunchError(f"a rank's report cannot be read, is it of another release? {error}") from error
        if self._installer is None:
            return
        if len(self.reports) != self.spec.tensor_parallel:
            raise EngineUnpatchedError(
                f"the capture reported in on {len(self.reports)} of {self.spec.tensor_parallel} ranks: "
                "the engine runs unpatched"
            )

    async def stop(self) -> None:
        """Ends every process: kill the group, sweep by mark, verify. Raises `EngineStopError`."""
        await self.client.aclose()
        try:
            await within(_STOP_S, self._stop)
        except OSError as error:
            raise EngineStopError(f"the engine could not be ended: {error}") from error

    def _stop(self) -> None:
        process, self._process = self._process, None
        try:
            if process is not None:
                self._end(process)
        finally:
            self._revert()

    def _revert(self) -> None:
        try:
            if self._installer is not None:
                self._installer.revert()
        except PatchError as error:
            raise EngineStopError(f"the engine has ended, but its patch stays in: {error}") from error

    def _end(self, process: "subprocess.Popen[bytes]") -> None:
        """SIGKILL at once: an engine has nothing to save, and SGLang outlives SIGTERM, reporting a false crash."""
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        # One that does not even die of this, as in a driver's call, is named as a survivor below.
        with suppress(subprocess.TimeoutExpired):
            process.wait(_KILL_S)
        end_marked(self.directory, session=process.pid)

    def describe(self) -> dict[str, object]:
        """What the manifest says of the engine."""
        assert self.info is not None
        assert self._installer is not None
        first = self.reports[0]
        return {
            "engine": "sglang",
            "engine_version": self.info.version,
            "architecture": first.architecture,
            "strategy": self.strategy,
            "self_check": None if self.judgement is None else asdict(self.judgement),
            "plain_tokens_per_s": self.plain_tokens_per_s,
            "installer": first.installer,
            "patch_digest": patch_digest(self._installer),
            "tensor_parallel": first.tp_size,
            "server_args": json.loads(json.dumps(self.info.server_args)),
        }


def end_marked(directory: Path, timeout: float = _KILL_S, session: int | None = None) -> int:
    """Ends every process that bears the mark of an engine at or below `directory`, and all of `session` besides.

    Returns how many there were. Raises `EngineStopError` if one survives.
    """
    pids = processes.marked(MARK, str(directory), prefix=True)
    if session is not None:
        pids += [pid for pid in processes.of_session(session) if pid not in pids]
    left = processes.kill_and_verify(pids, timeout)
    if left:
        raise EngineStopError(f"processes {left} of the engine survived SIGKILL for {timeout:.0f} s")
    return len(pids)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
