"""The worker: registers, claims, works, and stops in order.

Lanes claim tasks side by side: one plans, the others extract shards with the one engine. A control poll, apart from
lease renewal, learns of cancelled and lost tasks and of a drain. SIGTERM finishes nothing new: tasks in hand are handed
back, the engine is ended, and the service is told.
"""

import asyncio
import errno
import logging
import secrets
import shutil
import socket
import time
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from functools import partial
from importlib.metadata import version
from pathlib import Path

from layertap.schemas.incidents import IncidentReport
from layertap.schemas.tasks import (
    ClaimRequest,
    ClaimResponse,
    ControlRequest,
    Goodbye,
    Lease,
    Release,
    TaskFailure,
    TaskKind,
)
from layertap.schemas.workers import ModelFacts, WorkerRegister
from layertap.storage_paths import NONCE_FILE
from worker.engine.host import EngineHost, EngineUnavailableError
from worker.extract import LAYOUT_SECONDS, Extraction
from worker.in_hand import shard_lanes
from worker.leases import HeldLease, LeaseKeeper
from worker.patience import Newest
from worker.plan.plan import PlanError
from worker.plan_task import QUIET_SECONDS, run_plan
from worker.prefill import StorageWriteError
from worker.service_api import LeaseLostError, ServiceApi, ServiceError, ServiceUnreachableError
from worker.settings import Settings
from worker.shard_prefill import EngineKeepsDyingError

logger = logging.getLogger(__name__)

REGISTER_PATIENCE_S = 600.0
REPORT_PATIENCE_S = 60.0
_LAUNCH_BACKOFF_MOST_S = 60.0
_SPACE_PAUSE_S = 2.0
_DISK_S = 10.0
_SPACE_SPARE_BYTES = 16 << 20
_NONCE_POLL_S = 0.2


class StorageMismatchError(Exception):
    """The storage root is not the one that the service uses."""


class Worker:
    """One worker process. `models` are what it offers, `device` and `chunk` describe its engine."""

    def __init__(self, settings: Settings, models: list[ModelFacts], device: str, chunk: int) -> None:
        self.id = f"wrk_{secrets.token_hex(10)}"
        self._settings = settings
        self._lanes = shard_lanes(settings.shard_lanes, device)
        self._models = {facts.name: facts for facts in models}
        self._storage = settings.storage.resolve()
        self._api = ServiceApi(settings.service, settings.token)
        # Longer than it takes to give up a stuck row or to end a hung engine, which is done under the lease.
        patience = 2 * settings.row_timeout + settings.stall_timeout
        self._keeper = LeaseKeeper(self.id, settings.service, settings.token, patience)
        self._host = EngineHost(
            settings, device, chunk, self.id, self._report_incident, lambda: list(self._keeper.held)
        )
        self._stopping = asyncio.Event()
        self._layouts = asyncio.Lock()
        self._waiting_for_space = 0
        self._free = [Newest(partial(_free_bytes, folder), 0, _DISK_S) for folder in (self._storage, settings.run_dir)]

    def stop(self) -> None:
        """Asks for a graceful stop; `run` returns once it is done."""
        self._stopping.set()

    async def run(self) -> None:
        """Works until stopped. Raises `StorageMismatchError` or a `service_api` error at the start."""
        try:
            await self._keeper.start()
            await self._until_stopped(self._register())
            if not self._stopping.is_set():
                await self._work()
        finally:
            async with asyncio.timeout(self._settings.stop_timeout):
                await self._end()

    async def _work(self) -> None:
        lanes = [self._lane(TaskKind.PLAN)] + [self._lane(TaskKind.SHARD) for _ in range(self._lanes)]
        async with asyncio.TaskGroup() as group:
            for lane in lanes:
                group.create_task(lane)
            group.create_task(self._control())
            group.create_task(self._watch_keeper())

    async def _end(self) -> None:
        await self._host.stop()
        try:
            await self._api.goodbye(self.id, Goodbye())
        except (ServiceError, ServiceUnreachableError) as error:
            logger.warning("the service was not told of the end: %s", error)
        await self._keeper.stop()
        await self._api.aclose()

    async def _until_stopped(self, work: Awaitable[None]) -> None:
        """Runs `work`, giving it up when a stop is asked for."""
        task = asyncio.ensure_future(work)
        stopping = asyncio.create_task(self._stopping.wait())
        await asyncio.wait({task, stopping}, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if not task.done():
            task.cancel()
            await asyncio.wait({task})
        if not task.cancelled():
            task.result()

    async def _pause(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._stopping.wait()
        except TimeoutError:
            return

    async def _register(self) -> None:
        nonce_file = self._storage / NONCE_FILE
        for _ in range(int(REGISTER_PATIENCE_S / _NONCE_POLL_S)):
            if nonce_file.exists():
                break
            await asyncio.sleep(_NONCE_POLL_S)
        else:
            raise StorageMismatchError(f"{nonce_file} is missing: point --storage at the storage root of the service")
        message = WorkerRegister(
            id=self.id,
            host=socket.gethostname(),
            version=version("layertap"),
            storage_nonce=nonce_file.read_text().strip(),
            models=list(self._models.values()),
        )
        await self._api.register(message, REGISTER_PATIENCE_S)
        logger.info("registered as %s with models %s", self.id, ", ".join(self._models))

    async def _control(self) -> None:
        while not self._stopping.is_set():
            message = ControlRequest(
                held=self._keeper.in_hand(),
                loaded_model=self._host.model,
                status="waiting_for_space" if self._waiting_for_space else self._host.status,
                draining=False,
                figures=self._host.figures(),
            )
            try:
                answer = await self._api.control(self.id, message)
            except (ServiceError, ServiceUnreachableError) as error:
                logger.warning("control poll: %s", error)
            else:
                for task in answer.drop:
                    if (held := self._keeper.held.get(task)) is not None:
                        held.drop("dropped by the service", lost=False)
                if not answer.known:
                    await self._register()
                if answer.drain:
                    self.stop()
            await self._pause(self._settings.poll_interval)

    async def _watch_keeper(self) -> None:
        await self._until_stopped(self._wait(self._keeper.failed))
        if not self._stopping.is_set():
            logger.error("the lease keeper ended; stopping, since no lease could be kept")
            self.stop()

    async def _wait(self, event: asyncio.Event) -> None:
        await event.wait()

    async def _lane(self, kind: TaskKind) -> None:
        launches_failed = 0
        while not self._stopping.is_set():
            sent_at = time.monotonic()
            answer = await self._claim(kind)
            if answer is not None and answer.load_model is not None:
                # Kept until a shard of its own keeps it, or a lane that waits for another model's would end it unused.
                async with self._host.kept(answer.load_model):
                    loaded = await self._load(answer.load_model)
                    sent_at = time.monotonic()
                    answer = await self._claim(kind) if loaded and not self._stopping.is_set() else None
                launches_failed = 0 if loaded else launches_failed + 1
                if not loaded:
                    await self._pause(min(2.0**launches_failed, _LAUNCH_BACKOFF_MOST_S))
            if answer is None:
                continue
            if answer.lease is not None:
                await self._perform(answer.lease, sent_at)
            else:
                await self._pause(answer.retry_after_seconds)

    async def _claim(self, kind: TaskKind) -> ClaimResponse | None:
        request = ClaimRequest(
            worker=self.id, request_id=secrets.token_hex(12), kinds=[kind], loaded_model=self._host.model
        )
        try:
            return await self._api.claim(request, REPORT_PATIENCE_S)
        except (ServiceError, ServiceUnreachableError) as error:
            logger.warning("claim: %s", error)
            await self._pause(self._settings.poll_interval)
            return None

    async def _load(self, name: str) -> bool:
        facts = self._models.get(name)
        if facts is None:
            logger.error("asked to load %s, which this worker never offered", name)
            return False
        try:
            await self._until_stopped(self._host.ensure(facts))
        except EngineUnavailableError as error:
            logger.error("%s", error)
            return False
        return True

    async def _perform(self, lease: Lease, sent_at: float) -> None:
        """Works on a lease until it is done, dropped, or the worker stops; tells the service how it ended."""
        is_plan = lease.kind is TaskKind.PLAN
        phase, seconds = ("plan", QUIET_SECONDS) if is_plan else ("layout", LAYOUT_SECONDS)
        held = self._keeper.hold(lease, sent_at, phase, seconds)
        work = asyncio.create_task(self._plan(held) if is_plan else self._extract(held))
        ends = [asyncio.create_task(held.dropped.wait()), asyncio.create_task(self._stopping.wait())]
        try:
            # From before its layout on, or the engine might be given to another model meanwhile. Plans need no engine.
            async with nullcontext() if is_plan else self._host.kept(lease.model):
                await asyncio.wait({work, *ends}, return_when=asyncio.FIRST_COMPLETED)
                if not work.done():
                    work.cancel()
                    await asyncio.wait({work})
            await self._report_end(held, work)
        finally:
            work.cancel()
            for end in ends:
                end.cancel()
            self._keeper.let_go(held)

    async def _report_end(self, held: HeldLease, work: "asyncio.Task[None]") -> None:
        error = asyncio.CancelledError() if work.cancelled() else work.exception()
        task = held.lease.task
        match error:
            case None:
                return
            case LeaseLostError():
                logger.warning("%s is no longer ours: %s", task, error)
            case asyncio.CancelledError():
                if not held.lost:
                    await self._release(held, held.drop_reason or "the worker stops")
            case EngineUnavailableError() | ServiceUnreachableError():
                await self._release(held, str(error) or type(error).__name__)
            case StorageWriteError(full=True) | OSError(errno=errno.ENOSPC | errno.EDQUOT):
                await self._release(held, str(error))
                await self._wait_for_space(held.lease)
            case PlanError():
                await self._fail(held, error.code, error.reason, error.retryable)
            case EngineKeepsDyingError():
                await self._fail(held, "engine_keeps_dying", str(error), True)
            case StorageWriteError() | OSError():
                await self._fail(held, "storage_error", str(error), True)
            case _:
                logger.error("%s failed", task, exc_info=error)
                await self._fail(held, "worker_error", f"{type(error).__name__}: {error}", True)

    async def _report_incident(self, report: IncidentReport) -> None:
        try:
            await self._api.report_incident(report, REPORT_PATIENCE_S)
        except (ServiceError, ServiceUnreachableError) as error:
            logger.warning("incident %s stays on this machine: %s", report.id, error)

    async def _plan(self, held: HeldLease) -> None:
        facts = self._models[held.lease.model]
        await run_plan(self._api, self._keeper, held, self._storage, facts, facts.max_row_tokens)

    async def _wait_for_space(self, lease: Lease) -> None:
        """Claims nothing until the storage has room for the task again, with some to spare."""
        needed = _SPACE_SPARE_BYTES + (lease.shard.bytes if lease.shard else 0)
        self._waiting_for_space += 1
        try:
            logger.warning(
                "waiting for space: %s needs %d bytes free in %s, and %d in %s",
                lease.task, needed, self._storage, _SPACE_SPARE_BYTES, self._settings.run_dir,
            )  # fmt: skip
            while not self._stopping.is_set() and not await self._has_room(needed):
                await self._pause(_SPACE_PAUSE_S)
        finally:
            self._waiting_for_space -= 1

    async def _has_room(self, needed: int) -> bool:
        """Whether the storage has that many bytes free, and the run directory some for sessions and logs."""
        storage, run_dir = [await free.find() for free in self._free]
        return storage >= needed and run_dir >= _SPACE_SPARE_BYTES

    async def _extract(self, held: HeldLease) -> None:
        facts = self._models[held.lease.model]
        extraction = Extraction(
            self._api,
            self._keeper,
            self._host,
            facts,
            self._storage,
            self._settings.launch_timeout,
            self._layouts,
        )
        await extraction.run(held)

    async def _release(self, held: HeldLease, reason: str) -> None:
        message = Release(**held.proof.model_dump(), reason=reason[:2000])
        await self._tell("release", held, lambda: self._api.release(held.lease.task, message, REPORT_PATIENCE_S))

    async def _fail(self, held: HeldLease, code: str, reason: str, retryable: bool) -> None:
        logger.error("%s failed: %s: %s", held.lease.task, code, reason)
        message = TaskFailure(**held.proof.model_dump(), code=code, reason=reason[:8000], retryable=retryable)
        await self._tell("fail", held, lambda: self._api.fail(held.lease.task, message, REPORT_PATIENCE_S))

    async def _tell(self, what: str, held: HeldLease, message: Callable[[], Awaitable[object]]) -> None:
        try:
            await message()
        except (ServiceError, ServiceUnreachableError) as error:
            logger.warning("%s of %s: %s", what, held.lease.task, error)


def _free_bytes(folder: Path) -> int:
    return shutil.disk_usage(folder).free
