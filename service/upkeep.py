"""The background work of a service process: leases that ran out, workers that fell silent or are long gone, jobs that
wait to end.

Every step is guarded by its own statement, so any number of replicas may run this at once.
"""

import logging
import threading
from datetime import timedelta

from service.context import Context
from service.db.clock import utc_now
from service.jobs.finish import finish_jobs
from service.tasks.endings import expire_leases
from service.workers import repository as workers

_log = logging.getLogger(__name__)


def run_once(context: Context) -> None:
    """One round."""
    expire_leases(context)
    with context.database.write() as session:
        workers.mark_lost(session, context.database.clock)
        workers.forget(session, utc_now() - timedelta(seconds=context.settings.worker_keep_seconds))
    finish_jobs(context)


class Upkeep:
    """The thread that runs a round every few seconds, and at once when woken. `stop` ends it."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._thread = threading.Thread(target=self._run, name="upkeep", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread after the round it is in."""
        self._context.stopping.set()
        self._context.wake.set()
        self._thread.join(self._context.settings.stop_seconds)

    def _run(self) -> None:
        context = self._context
        while not context.stopping.is_set():
            try:
                run_once(context)
            except Exception:  # noqa: BLE001 (a failing round must not end the ones after it)
                _log.exception("a round of upkeep failed; the next one tries again")
            context.wake.wait(context.settings.upkeep_seconds)
            context.wake.clear()
