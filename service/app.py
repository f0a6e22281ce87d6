"""The composition root: one function that opens a service's parts, and one that makes the HTTP app over them."""

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI
from starlette.concurrency import run_in_threadpool

from service import VERSION, problems
from service.context import Context
from service.datasets import endpoints as datasets
from service.db.clock import Clock
from service.db.engine import Database
from service.db.migrate import migrate
from service.guard import Guard
from service.health import endpoints as health
from service.incidents import endpoints as incidents
from service.jobs import endpoints as jobs
from service.leftovers import clear_leftovers
from service.metrics import endpoints as metrics
from service.openapi import describe
from service.settings import Settings
from service.shards import endpoints as shards
from service.storage import Storage
from service.tasks import endpoints as tasks
from service.tasks import repository as task_rows
from service.upkeep import Upkeep
from service.workers import endpoints as workers
from service.workers import repository as worker_rows

_log = logging.getLogger(__name__)


def open_context(settings: Settings, clock: Clock | None = None) -> Context:
    """Open database and storage, migrate, and clear away what a process that died left behind."""
    database = Database(settings, clock)
    try:
        migrate(database)
        storage = Storage(settings.storage)
        storage.prepare()
        context = Context(settings, database, storage)
        if database.clock.restarts:
            with database.write() as session:
                task_rows.grant_full_terms(session, database.clock, settings.lease_seconds)
                worker_rows.grant_full_terms(session, database.clock, settings.lease_seconds)
        clear_leftovers(context)
    except BaseException:
        database.close()
        raise
    return context


def create_app(context: Context | None = None, *, upkeep: bool = True) -> FastAPI:
    """The app over `context`, which it closes at its end. Without one it can only describe itself."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        assert context is not None, "an app without context can't be run"
        thread = Upkeep(context)
        if upkeep:
            thread.start()
        try:
            yield
        finally:
            context.stopping.set()
            if upkeep:
                await run_in_threadpool(thread.stop)
            context.database.close()

    app = FastAPI(
        title="Layertap",
        version=VERSION,
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        generate_unique_id_function=lambda route: (
            f"{route.name}_head" if "HEAD" in (route.methods or ()) else route.name
        ),
    )
    problems.install(app)
    for router in (
        datasets.router,
        jobs.router,
        shards.router,
        workers.models_router,
        workers.router,
        tasks.router,
        incidents.router,
        incidents.jobs_router,
        metrics.router,
        health.router,
    ):
        app.include_router(router)
    describe(app)
    if context is not None:
        app.state.context = context
        app.add_middleware(Guard, settings=context.settings)
    return app
