"""Which engine runs: one at a time, kept warm between tasks and jobs of the same model, replaced when another is
asked for.

Tasks use it side by side; a change of model waits until none does. An engine that has died is used by nobody again.
"""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from layertap.schemas.workers import ModelFacts
from worker.engine.canary import check
from worker.engine.engine import Engine
from worker.engine.spec import EngineSpec
from worker.inflight import InFlight
from worker.patch.choice import choose
from worker.patch.package import find_package
from worker.settings import Settings

logger = logging.getLogger(__name__)

_INFLIGHT_CHUNKS = 4


class NoEngineError(Exception):
    """No engine serves the asked model."""


class EngineHost:
    """Owns the worker's engine."""

    def __init__(self, settings: Settings, device: str, chunk: int) -> None:
        self._settings = settings
        self._device = device
        self._engine: Engine | None = None
        self._facts: ModelFacts | None = None
        self._users = 0
        self._idle = asyncio.Condition()
        self._started = 0
        self.budget = InFlight(settings.max_inflight_tokens or _INFLIGHT_CHUNKS * chunk)
        self.status = "no engine"

    @property
    def model(self) -> str | None:
        """Name of the model that is served, if any."""
        usable = self._engine is not None and self._engine.alive
        return self._facts.name if usable and self._facts is not None else None

    async def ensure(self, facts: ModelFacts) -> None:
        """Makes the engine serve that model, once nobody uses another. Raises `EngineLaunchError` or `CanaryError`."""
        async with self._idle:
            if self.model == facts.name:
                return
            await self._idle.wait_for(lambda: self._users == 0)
            if self.model == facts.name:
                return
            await self._stop()
            self.status = f"loading {facts.name}"
            self._started += 1
            engine = Engine(self._spec(facts), self._directory(self._started), self._settings.stall_timeout)
            try:
                await engine.launch(self._settings.launch_timeout)
                self._engine = engine
                self.status = f"checking {facts.name}"
                await check(engine, facts)
            except BaseException as error:
                self.status = f"could not serve {facts.name}: {error}"
                await self._stop()
                raise
            self._facts = facts
            self.status = f"serving {facts.name}"

    @asynccontextmanager
    async def use(self, model: str) -> AsyncIterator[Engine]:
        """The engine, kept for as long as the block runs. Raises `NoEngineError` if it does not serve `model`."""
        engine = self._engine
        if self.model != model or engine is None:
            raise NoEngineError(model)
        self._users += 1
        try:
            yield engine
        finally:
            self._users -= 1
            await asyncio.shield(self._notify())

    async def stop(self) -> None:
        """Ends the engine, used or not."""
        await self._stop()
        self.status = "no engine"

    async def _stop(self) -> None:
        engine, self._engine, self._facts = self._engine, None, None
        if engine is not None:
            await engine.stop()

    async def _notify(self) -> None:
        async with self._idle:
            self._idle.notify_all()

    def _directory(self, number: int) -> Path:
        return self._settings.run_dir.resolve() / f"engine-{number}"

    def _spec(self, facts: ModelFacts) -> EngineSpec:
        settings = self._settings
        return EngineSpec(
            model_path=facts.path,
            dtype=facts.pins.dtype,
            device=self._device,
            tensor_parallel=settings.tensor_parallel,
            chunked_prefill_size=settings.chunked_prefill_size,
            max_total_tokens=settings.max_total_tokens,
            extra_args=tuple(settings.engine_arg),
            pool_bytes=settings.pool_bytes,
            engine_version=facts.pins.engine_version,
            installer=choose(settings.installer, find_package()),
            patch_dir=None if settings.patch_dir is None else str(settings.patch_dir.resolve()),
        )
