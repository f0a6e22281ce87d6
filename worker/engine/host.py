"""Which engine runs: one at a time, kept warm between tasks and jobs of the same model, watched from launch to end.

Tasks use it side by side; a change of model waits until none does. A sick engine is ended with its evidence kept, and
nobody uses it again; a launch that fails is tried in other ways until it is known what was to blame.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from layertap.schemas.figures import WorkerFigures
from layertap.schemas.incidents import Blame, IncidentKind, IncidentReport
from layertap.schemas.workers import ModelFacts
from worker.engine.engine import Engine, EngineStopError, end_marked
from worker.engine.self_check import check, check_unpatched
from worker.engine.spec import EngineSpec, Strategy
from worker.engine.warm_up import warm_up
from worker.gauge import Gauge
from worker.in_hand import inflight_tokens
from worker.inflight import InFlight
from worker.patch.choice import choose, offers
from worker.patch.package import find_package
from worker.patience import within
from worker.settings import Settings
from worker.watchdog.attribution import Attempt, Settled, Way, next_step, ways
from worker.watchdog.gpu import gpu_bytes_used
from worker.watchdog.guard import Guard
from worker.watchdog.incident import Draft
from worker.watchdog.rules import Limits, Phase, Verdict

logger = logging.getLogger(__name__)

_DRIVER_S, _SWEEP_S, _ENDING_S = 10.0, 60.0, 50.0
_GPU_RETURN_S, _GPU_LOOK_EVERY_S, _GPU_SLACK_BYTES = 20.0, 0.5, 64 << 20
_ENDED_KEPT = 64
_RETRY_FIRST_S, _RETRY_MOST_S = 2.0, 300.0

Report = Callable[[IncidentReport], Awaitable[None]]


class NoEngineError(Exception):
    """No engine serves the asked model."""


class EngineUnavailableError(Exception):
    """The model cannot be served here and now; the message says why, and when it is tried again."""


@dataclass
class _Breaker:
    """After failed launches of a model, no new one is tried before `retry_at`: one try is let through then."""

    failures: int = 0
    retry_at: float = 0.0
    reason: str = ""

    def trip(self, reason: str) -> None:
        self.failures += 1
        self.reason = reason
        self.retry_at = time.monotonic() + min(_RETRY_FIRST_S * 2**self.failures, _RETRY_MOST_S)


@dataclass(frozen=True)
class _Serving:
    """An engine that serves, and what goes with it; `gpu_before`: bytes in use on its GPUs before it was started."""

    engine: Engine
    guard: Guard
    gauge: Gauge
    facts: ModelFacts
    gpu_before: int | None


class EngineHost:
    """Owns the worker's engine. `report` is told of each incident, `tasks` names the tasks in hand."""

    def __init__(
        self, settings: Settings, device: str, chunk: int, worker: str, report: Report, tasks: Callable[[], list[str]]
    ) -> None:
        self._settings = settings
        self._device = device
        self._worker = worker
        self._report = report
        self._tasks = tasks
        self._serving: _Serving | None = None
        self._watch: asyncio.Task[Any] | None = None
        self._users = 0
        self._kept: Counter[str] = Counter()
        self._last = ""
        """The model that was served last. If its engine died, no other model's is started while a shard needs it."""
        self._notices: set[asyncio.Task[None]] = set()
        self._idle = asyncio.Condition()
        self._started = 0
        self._breakers: dict[str, _Breaker] = {}
        self._limits = Limits(
            launch_quiet=settings.launch_quiet,
            launch_total=settings.launch_timeout,
            check_total=settings.check_timeout,
            serving_quiet=settings.stall_timeout,
        )
        self.budget = InFlight(inflight_tokens(settings.max_inflight_tokens, chunk, device))
        self.status = "no engine"
        self._ended: dict[Path, IncidentReport] = {}
        """The incidents of engines that died or hung while they served, by the engine's directory."""

    @property
    def model(self) -> str | None:
        """Name of the model that is served, if any."""
        return self._serving.facts.name if self._serving is not None and self._serving.engine.alive else None

    def figures(self) -> WorkerFigures | None:
        """How the engine fares, since it was last asked and before; None while none serves."""
        return self._serving.gauge.look() if self._serving is not None and self._serving.engine.alive else None

    @asynccontextmanager
    async def kept(self, model: str) -> AsyncIterator[None]:
        """If that model is served, or was last, no other takes its place while the block runs."""
        self._kept[model] += 1
        try:
            yield
        finally:
            self._kept[model] -= 1
            self._notify()

    async def ensure(self, facts: ModelFacts) -> None:
        """Makes the engine serve that model, once nobody uses or keeps another. Raises `EngineUnavailableError`."""
        async with self._idle:
            await self._idle.wait_for(lambda: self.model == facts.name or self._free_for(facts.name))
            if self.model == facts.name:
                return
            breaker = self._breakers.setdefault(facts.name, _Breaker())
            wait = breaker.retry_at - time.monotonic()
            if wait > 0:
                raise EngineUnavailableError(f"{breaker.reason}; tried again in {wait:.0f} s")
            await self._after_sickness()
            try:
                await self._end_engine()
                await self._bring_up(facts)
            except (EngineUnavailableError, EngineStopError, OSError) as error:
                breaker.trip(str(error))
                self.status = f"unhealthy: {error}"
                raise EngineUnavailableError(str(error)) from error
            self._last = facts.name
            self._breakers.pop(facts.name, None)
            self.status = f"serving {facts.name}"

    @asynccontextmanager
    async def use(self, model: str) -> AsyncIterator[Engine]:
        """The engine, kept for as long as the block runs. Raises `NoEngineError` if it does not serve `model`."""
        serving = self._serving
        if self.model != model or serving is None:
            raise NoEngineError(f"no engine serves {model}")
        self._users += 1
        try:
            yield serving.engine
        finally:
            self._users -= 1
            self._notify()

    async def blame_row(self, engine: Engine) -> str | None:
        """A row alone in flight ended that engine: has its incident say so. Its id, or None before there is one."""
        incident = self._ended.get(engine.directory)
        if incident is None:
            return None
        blamed = incident.model_copy(update={"blame": Blame.ROW})
        self._ended[engine.directory] = blamed
        await self._report(blamed)
        return blamed.id

    async def stop(self) -> None:
        """Ends the engine, used or not."""
        if self._watch is not None:
            if self._serving is None:
                # It is ending an engine, which must not be left half ended.
                await asyncio.wait({self._watch}, timeout=_ENDING_S)
            self._watch.cancel()
            # One that failed is no reason to leave the engine behind.
            await asyncio.wait({self._watch})
        await self._end_engine()
        self.status = "no engine"

    async def _bring_up(self, facts: ModelFacts) -> None:
        """Starts engines until one serves or it is known why none does, one incident for the first failure."""
        spec = self._spec(facts)
        every = self._ways()
        attempts: list[Attempt] = []
        draft: Draft | None = None
        while not isinstance(step := next_step(attempts, every), Settled):
            way = step.way
            self.status = f"loading {facts.name}" + ("" if way else " unpatched, to see whom to blame")
            try:
                failure = await self._start(facts, _in_way(spec, way))
            except (EngineStopError, OSError) as error:
                if draft is not None:
                    draft.tried.append(f"no other way: {error}"[:1000])
                    await self._publish(draft, Blame.UNKNOWN)
                raise
            attempts.append(Attempt(way, failure is None))
            if failure is not None and draft is None:
                draft = failure
            if draft is not None:
                how = "unpatched" if way is None else f"patched by {way.installer}, reading by {way.strategy}"
                draft.tried.append(f"{how}: {'healthy' if failure is None else failure.verdict.reason}"[:1000])
        if draft is not None:
            await self._publish(draft, step.blame)
        if not step.serving:
            reason = draft.verdict.reason if draft is not None else "no engine came up"
            raise EngineUnavailableError(f"{facts.name} cannot be served ({step.blame.value} to blame): {reason}")

    async def _start(self, facts: ModelFacts, spec: EngineSpec) -> Draft | None:
        """One start under watch: None when the engine is up (kept, if patched), else what is known of the failure.

        Raises `EngineStopError` where something of an earlier engine is still there.
        """
        self._started += 1
        run_dir = self._settings.run_dir.resolve()
        try:
            await within(_SWEEP_S, end_marked, run_dir)
        except OSError as error:
            raise EngineStopError(f"what is left of earlier engines could not be looked for: {error}") from error
        engine = Engine(spec, run_dir / f"engine-{self._started}", self._settings.row_timeout)
        before = await _gpu_bytes(engine)
        guard = Guard(engine, self._limits, self.budget.recent, self.budget.oldest)
        healthy, left = False, ""
        try:
            verdict = await self._launch(engine, guard, facts)
            healthy = verdict is None
            draft = None if verdict is None else await self._keep(guard, verdict, facts.name)
        finally:
            if not healthy or spec.installer is None:
                left = await _end(engine)
        if draft is not None:
            if left:
                draft.processes_left = 1
                draft.verdict = replace(draft.verdict, reason=f"{draft.verdict.reason}; could not be ended: {left}")
            draft.gpu_bytes_left = await _gpu_bytes_left(engine, before)
            return draft
        if spec.installer is not None:
            self._serving = _Serving(engine, guard, Gauge(engine, guard, self.budget), facts, before)
            guard.enter(Phase.IDLE)
            self._watch = asyncio.create_task(self._watch_over(engine, guard, facts.name, before))
        return None

    async def _launch(self, engine: Engine, guard: Guard, facts: ModelFacts) -> Verdict | None:
        async def come_up() -> None:
            await engine.start()
            await engine.until_serving()

        verdict = await guard.through(come_up())
        if verdict is not None:
            return verdict
        if engine.spec.installer is None:
            guard.enter(Phase.SELF_CHECK)
            return await guard.through(check_unpatched(engine))

        async def warm() -> None:
            engine.plain_tokens_per_s = round(await warm_up(engine, facts.vocab_size, facts.max_row_tokens))

        async def check_itself() -> None:
            engine.judgement = await check(engine, facts)

        for phase, words, step in (
            (Phase.WARMING, "warming up", warm),
            (Phase.SELF_CHECK, "checking", check_itself),
        ):
            guard.enter(phase)
            self.status = f"{words} {facts.name}"
            verdict = await guard.through(step())
            if verdict is not None:
                return verdict
        assert engine.judgement is not None
        for remark in engine.judgement.remarks:
            logger.warning("%s: %s", facts.name, remark)
        return None

    async def _watch_over(self, engine: Engine, guard: Guard, model: str, before: int | None) -> None:
        """Ends the engine once it is sick, evidence first, and reports the incident."""
        verdict = await guard.until_sick()
        logger.error("engine of %s is sick: %s", model, verdict.reason)
        self.status = f"ending a sick engine: {verdict.reason}"
        draft = await self._keep(guard, verdict, model)
        self._serving = None
        if left := await _end(engine):
            draft.processes_left = 1
            draft.tried.append(f"could not be ended: {left}"[:1000])
        draft.gpu_bytes_left = await _gpu_bytes_left(engine, before)
        if draft.verdict.kind is IncidentKind.OUT_OF_MEMORY:
            self.budget.halve()
        self.status = "no engine"
        self._ended[engine.directory] = await self._publish(draft, Blame.UNKNOWN)
        for forgotten in list(self._ended)[:-_ENDED_KEPT]:
            del self._ended[forgotten]

    async def _keep(self, guard: Guard, verdict: Verdict, model: str) -> Draft:
        return Draft.of(self._worker, model, self._tasks(), guard.phase, verdict, await guard.evidence())

    async def _publish(self, draft: Draft, blame: Blame) -> IncidentReport:
        report = draft.report(blame)
        Draft.save(report, self._settings.run_dir / "incidents")
        await self._report(report)
        return report

    async def _after_sickness(self) -> None:
        """Waits until a sick engine has been ended and reported; a healthy one's watch is called off."""
        watch = self._watch
        if watch is None:
            return
        if self.model is not None:
            watch.cancel()
        # Not awaited itself: a lane that is cancelled here would cancel the watch, and leave the engine half ended.
        await asyncio.wait({watch})
        if not watch.cancelled() and (error := watch.exception()) is not None:
            logger.error("the watch over the engine failed", exc_info=error)
        self._watch = None

    async def _end_engine(self) -> None:
        """Ends a healthy engine. What it leaves behind is an incident. Raises `EngineStopError` if it would not end."""
        serving, self._serving = self._serving, None
        if serving is None:
            return
        # In the watch's place: a lane that is cancelled here leaves it to the next to wait for.
        self._watch = ending = asyncio.create_task(_end(serving.engine))
        await asyncio.wait({ending})
        self._watch, survived = None, ending.result()
        left = await _gpu_bytes_left(serving.engine, serving.gpu_before)
        memory = left is not None and left > _GPU_SLACK_BYTES
        if survived or memory:
            words = survived or f"{(left or 0) >> 20} MiB of GPU memory are still taken"
            draft = await self._keep(serving.guard, Verdict(IncidentKind.NOT_CLEANED_UP, words), serving.facts.name)
            draft.processes_left, draft.gpu_bytes_left = int(bool(survived)), left
            await self._publish(draft, Blame.UNKNOWN)
        if survived:
            raise EngineStopError(survived)

    def _free_for(self, model: str) -> bool:
        # Only one model is kept at a time, the last: its own lanes always pass, so nobody waits in a ring.
        return self._users == 0 and (model == self._last or not self._kept[self._last])

    def _notify(self) -> None:
        # Not waited for: a launch under way has the lock for as long as it takes.
        notice = asyncio.create_task(self._tell_those_who_wait())
        self._notices.add(notice)
        notice.add_done_callback(self._notices.discard)

    async def _tell_those_who_wait(self) -> None:
        async with self._idle:
            self._idle.notify_all()

    def _ways(self) -> list[Way]:
        settings = self._settings
        package = find_package()
        first = choose(settings.installer, package)
        others = [name for name in offers(package) if name != first] if settings.installer == "auto" else []
        strategies: list[Strategy] = ["hooks", "collect"] if settings.strategy == "auto" else [settings.strategy]
        return ways([first, *others], strategies)

    def _spec(self, facts: ModelFacts) -> EngineSpec:
        settings = self._settings
        return EngineSpec.of(
            facts,
            self._device,
            tensor_parallel=settings.tensor_parallel,
            chunked_prefill_size=settings.chunked_prefill_size,
            max_total_tokens=settings.max_total_tokens,
            extra_args=tuple(settings.engine_arg),
            pool_bytes=settings.pool_bytes,
            installer=choose(settings.installer, find_package()),
            patch_dir=None if settings.patch_dir is None else str(settings.patch_dir.resolve()),
        )


def _in_way(spec: EngineSpec, way: Way | None) -> EngineSpec:
    if way is None:
        return replace(spec, installer=None)
    return replace(spec, installer=way.installer, strategy=way.strategy)


async def _end(engine: Engine) -> str:
    """Ends an engine; what is left of it, in words, or nothing."""
    try:
        await engine.stop()
    except EngineStopError as error:
        logger.critical("%s", error)
        return str(error)
    return ""


async def _gpu_bytes(engine: Engine) -> int | None:
    """Bytes in use on its GPUs; None without any, or where the driver does not say."""
    try:
        return await within(_DRIVER_S, gpu_bytes_used, engine.gpus)
    except OSError as error:
        logger.warning("%s", error)
        return None


async def _gpu_bytes_left(engine: Engine, before: int | None) -> int | None:
    """Memory of its GPUs in use beyond what was before the engine, once it has had time to come back; None without."""
    if before is None:
        return None
    left, until = 0, time.monotonic() + _GPU_RETURN_S
    while time.monotonic() < until:
        used = await _gpu_bytes(engine)
        if used is None:
            return None
        left = used - before
        if left <= _GPU_SLACK_BYTES:
            break
        await asyncio.sleep(_GPU_LOOK_EVERY_S)
    return left
