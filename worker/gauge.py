"""How the engine that serves now fares: its counters, read each time it is asked, turned into figures."""

import time

from layertap.schemas.figures import WorkerFigures
from worker.capture.counters import Counters
from worker.engine.engine import Engine
from worker.inflight import InFlight
from worker.pace import Pace, Reading
from worker.watchdog.guard import Guard


class Gauge:
    """Of one engine, from the moment that it serves."""

    def __init__(self, engine: Engine, guard: Guard, budget: InFlight) -> None:
        self._counters = Counters.open(engine.directory)
        self._guard = guard
        self._budget = budget
        self._pace = Pace(engine.plain_tokens_per_s)

    def look(self) -> WorkerFigures | None:
        """The figures as of now; None at the first look, or where the engine has no counters."""
        if self._counters is None:
            return None
        now, counted = time.monotonic(), self._counters.read()
        self._pace.add(Reading(now, counted, self._budget.used > 0, self._guard.gpu_busy))
        return self._pace.figures()
