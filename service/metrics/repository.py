"""What a scrape needs, read at the moment of the scrape. How much that is depends on what is being worked on, not on
how much was done before.
"""

from dataclasses import dataclass

from sqlalchemy import Select, func, select
from sqlalchemy.orm import Session

from layertap.schemas.jobs import Job as JobView
from layertap.schemas.jobs import JobState
from layertap.schemas.workers import WorkerState
from service.db.models import Job, Task, Worker
from service.incidents import repository as incidents
from service.jobs import service as jobs

_MOST = 1000
_LIVE = [state.value for state in JobState if not state.terminal]
_AT_WORK = [state for state in _LIVE if state != JobState.QUEUED]
_PRESENT = [state.value for state in WorkerState if state.present]


@dataclass(frozen=True)
class Snapshot:
    """Jobs, workers and incidents by state or kind, tasks of jobs that are not over by (kind, state).

    `present` are the workers that are there, `at_work` the jobs that are being worked on, 1,000 each at the most.
    """

    jobs: dict[str, int]
    tasks: dict[tuple[str, str], int]
    workers: dict[str, int]
    incidents: dict[str, int]
    present: list[Worker]
    at_work: list[JobView]


def snapshot(session: Session) -> Snapshot:
    """Everything, as it is now."""
    tasks = (
        select(Task.kind, Task.state, func.count())
        .join(Job, Job.id == Task.job_id)
        .where(Job.state.in_(_LIVE))
        .group_by(Task.kind, Task.state)
    )
    present = select(Worker).where(Worker.state.in_(_PRESENT)).order_by(Worker.id).limit(_MOST)
    at_work = select(Job).where(Job.state.in_(_AT_WORK)).order_by(Job.id).limit(_MOST)
    return Snapshot(
        jobs=_counts(session, select(Job.state, func.count()).group_by(Job.state)),
        tasks={(kind, state): count for kind, state, count in session.execute(tasks)},
        workers=_counts(session, select(Worker.state, func.count()).group_by(Worker.state)),
        incidents=incidents.counts(session),
        present=list(session.scalars(present)),
        at_work=jobs.views(session, list(session.scalars(at_work))),
    )


def _counts(session: Session, query: Select[str, int]) -> dict[str, int]:
    return dict(session.execute(query).all())
