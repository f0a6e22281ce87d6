"""Watches one engine from launch to end and says when it is sick. Looks once a second.

A look that hangs or fails, as one at /proc or a driver may, does not blind it: what was seen before stands, and counts
as standing still.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from layertap.schemas.incidents import Evidence, IncidentKind
from worker.capture.session import Ledger, LedgerError, sessions_dir
from worker.engine.client import EngineDownError
from worker.engine.engine import Engine, EngineLaunchError, EngineUnpatchedError
from worker.engine.judgement import CheckError
from worker.patience import Newest, within
from worker.watchdog.evidence import compose, patch_state, processes_of, tail
from worker.watchdog.gpu import GpuUse, gpu_lines, gpu_use
from worker.watchdog.observe import Seen, engine_processes, port_open
from worker.watchdog.rules import Limits, Observation, Phase, Trace, Verdict, decide

logger = logging.getLogger(__name__)

T = TypeVar("T")

LOOK_EVERY_S = 1.0
_LOOK_S = 5.0
_STACKS_S = 90.0
_DYING_S = 10.0


class Guard:
    """The watchdog of one engine. `in_flight` says how many tokens it held since last asked, `oldest` how many seconds
    the oldest request in flight has been there.
    """

    def __init__(
        self,
        engine: Engine,
        limits: Limits,
        in_flight: Callable[[], int],
        oldest: Callable[[], float | None] = lambda: None,
    ) -> None:
        self.engine = engine
        self._limits = limits
        self._in_flight = in_flight
        self._oldest = oldest
        self._trace = Trace(Phase.LAUNCHING, time.monotonic())
        self._looks = Newest(self._look, (0, 0, True), _LOOK_S)
        # Apart from the rest: a driver that hangs, or somebody else's process that can't be read, says nothing of the
        # engine.
        self._gpu = Newest(self._look_at_gpus, None, _LOOK_S)
        self._processes = Newest[list[Seen]](self._look_at_processes, [], _LOOK_S)

    def enter(self, phase: Phase) -> None:
        """The engine is in that phase now."""
        self._trace.enter(phase, time.monotonic())

    @property
    def phase(self) -> Phase:
        """The phase the engine is in."""
        return self._trace.phase

    @property
    def gpu_busy(self) -> int | None:
        """Per cent that its busiest GPU was in use at the last look; None without one."""
        return None if self._trace.seen is None else self._trace.seen.gpu_busy

    async def until_sick(self) -> Verdict:
        """Looks until the engine is found sick. In `idle` and `serving` it tells the two apart by itself."""
        while True:
            observation = await self._observe()
            now = time.monotonic()
            if self.phase in (Phase.IDLE, Phase.SERVING):
                self._trace.enter(Phase.SERVING if observation.in_flight else Phase.IDLE, now)
            self._trace.record(observation, now)
            verdict = decide(self._trace, self._limits, now)
            if verdict is not None:
                return verdict
            await asyncio.sleep(LOOK_EVERY_S)

    async def through(self, step: Coroutine[Any, Any, None]) -> Verdict | None:
        """Runs a step of coming up under watch: None when it succeeds, else what went wrong."""
        task, watch = asyncio.create_task(step), asyncio.create_task(self.until_sick())
        try:
            await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
            unanswered = task.done() and _went_down(task.exception())
            if unanswered:
                # Its connections break a moment before a server has ended.
                await asyncio.wait({watch}, timeout=_DYING_S)
            if not task.done() or (unanswered and watch.done()):
                return watch.result()
            return _verdict_of(task.exception(), self.phase)
        finally:
            for each in (task, watch):
                each.cancel()
            await asyncio.gather(task, watch, return_exceptions=True)

    async def evidence(self) -> Evidence:
        """What there is to keep of the engine before it is killed."""
        signals = self._trace.describe(time.monotonic())
        spec = self.engine.spec
        facts = {name: str(value) for name, value in spec.__dict__.items()}
        facts["patch_state"] = await patch_state(None if spec.patch_dir is None else Path(spec.patch_dir))
        engine = self.engine
        processes = await _or_nothing(within(_STACKS_S, processes_of, engine.directory, engine.pid), [])
        # After the processes, whose stacks may stand in the log.
        log = await _or_nothing(within(_LOOK_S, tail, engine.log_path), "")
        gpus = await _or_nothing(within(_LOOK_S, gpu_lines), [])
        return compose(log, processes, gpus, signals, facts)

    async def _observe(self) -> Observation:
        engine = self.engine
        looks = asyncio.gather(self._looks.find(), self._processes.find(), self._gpu.find())
        (log_bytes, tokens_captured, answers), seen, gpu = await looks
        return Observation(
            # Before it is spawned it has not died.
            server_alive=engine.pid is None or engine.alive,
            group=len(seen),
            log_bytes=log_bytes,
            cpu_seconds=sum(process.cpu_seconds for process in seen),
            read_bytes=sum(process.read_bytes for process in seen),
            memory_bytes=sum(process.rss_bytes for process in seen) + (0 if gpu is None else gpu.bytes_used),
            tokens_captured=tokens_captured,
            in_flight=self._in_flight(),
            port_open=answers,
            gpu_busy=None if gpu is None else gpu.busy,
            oldest_request_s=self._oldest(),
        )

    def _look_at_processes(self) -> list[Seen]:
        return engine_processes(self.engine.directory, self.engine.pid)

    def _look_at_gpus(self) -> GpuUse | None:
        return gpu_use(self.engine.gpus)

    def _look(self) -> tuple[int, int, bool]:
        """Bytes of its log, tokens captured, whether its port takes a connection."""
        engine = self.engine
        with suppress(OSError):
            engine.rotate_log()
        return engine.log_bytes(), _captured(engine), engine.pid is not None and port_open(engine.client.port)


async def _or_nothing(call: Awaitable[T], nothing: T) -> T:
    """What the call finds; a sick engine must be ended with evidence or without."""
    try:
        return await call
    except Exception:
        logger.exception("evidence is missing")
        return nothing


def _went_down(error: BaseException | None) -> bool:
    """Whether it comes of a server that does not answer."""
    while error is not None and not isinstance(error, EngineDownError):
        error = error.__cause__
    return error is not None


def _verdict_of(error: BaseException | None, phase: Phase) -> Verdict | None:
    match error:
        case None:
            return None
        case EngineUnpatchedError():
            return Verdict(IncidentKind.UNPATCHED, str(error))
        case EngineLaunchError():
            return Verdict(IncidentKind.DIED_LAUNCHING, str(error))
        case CheckError():
            return Verdict(IncidentKind.FAILED_CHECK, str(error))
        case _:
            raise error


def _captured(engine: Engine) -> int:
    total = 0
    for path in sessions_dir(engine.directory).glob("*.ledger"):
        try:
            total += Ledger.open(path).progress()[1]
        except (OSError, LedgerError, ValueError):
            continue
    return total
