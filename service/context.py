"""What a running service is made of, put together once and handed to every endpoint."""

import threading
from dataclasses import dataclass, field
from typing import Annotated

from fastapi import Depends, Request

from service.db.engine import Database
from service.leases import Bounds
from service.settings import Settings
from service.storage import Storage


@dataclass
class Context:
    """The parts of one service process. `wake` starts the upkeep at once, `stopping` ends long answers."""

    settings: Settings
    database: Database
    storage: Storage
    wake: threading.Event = field(default_factory=threading.Event)
    stopping: threading.Event = field(default_factory=threading.Event)
    event_streams: int = 0

    @property
    def bounds(self) -> Bounds:
        """How often a task is tried."""
        return Bounds(self.settings.max_attempts, self.settings.max_expiries)


def _context(request: Request) -> Context:
    context = request.app.state.context
    assert isinstance(context, Context)
    return context


ContextDep = Annotated[Context, Depends(_context)]
