"""Every query about incidents. They come in the order in which they arrived, the newest first."""

from collections.abc import Mapping, Sequence

from sqlalchemy import delete, insert, select
from sqlalchemy.dialects.postgresql import insert as insert_postgres
from sqlalchemy.dialects.sqlite import insert as insert_sqlite
from sqlalchemy.orm import Session, undefer

from service.db.models import Incident, IncidentCount, IncidentTask, Task

_BATCH = 500


def whole(session: Session, incident: str) -> Incident | None:
    """The incident of that id, its evidence read along with it."""
    return session.scalar(select(Incident).where(Incident.id == incident).options(undefer(Incident.evidence)))


def lock(session: Session, incident: str) -> Incident | None:
    """The incident of that id, its row locked until the transaction ends."""
    return session.scalar(select(Incident).where(Incident.id == incident).with_for_update())


def page(
    session: Session, limit: int, after: str | None, job: str | None = None, worker: str | None = None
) -> Sequence[Incident]:
    """Newest first, one more than `limit`.

    Nothing is behind an id that is not there: only the oldest are ever removed.
    """
    query = select(Incident).order_by(Incident.arrival.desc()).limit(limit + 1)
    if after is not None:
        query = query.where(Incident.arrival < select(Incident.arrival).where(Incident.id == after).scalar_subquery())
    if worker is not None:
        query = query.where(Incident.worker_id == worker)
    if job is not None:
        query = query.where(Incident.id.in_(select(IncidentTask.incident_id).where(IncidentTask.job_id == job)))
    return session.scalars(query).all()


def add(session: Session, incident: Incident) -> None:
    """Insert it and count its kind. Raises `IntegrityError` where one of that id is there."""
    session.add(incident)
    session.flush()
    postgres = session.get_bind().dialect.name == "postgresql"
    statement = (insert_postgres if postgres else insert_sqlite)(IncidentCount).values(kind=incident.kind, count=1)
    session.execute(
        statement.on_conflict_do_update(
            index_elements=[IncidentCount.kind], set_={"count": IncidentCount.count + 1}
        ).execution_options(synchronize_session=False)
    )


def counts(session: Session) -> dict[str, int]:
    """How many of each kind were ever reported; kinds that never were are absent."""
    return {row.kind: row.count for row in session.scalars(select(IncidentCount))}


def tasks_of(session: Session, incidents: Sequence[str]) -> dict[str, dict[str, str | None]]:
    """What each of `incidents` hit: tasks by id, with their jobs."""
    found: dict[str, dict[str, str | None]] = {incident: {} for incident in incidents}
    query = select(IncidentTask).where(IncidentTask.incident_id.in_(incidents)).order_by(IncidentTask.task_id)
    for row in session.scalars(query):
        found[row.incident_id][row.task_id] = row.job_id
    return found


def jobs_of(session: Session, tasks: Sequence[str]) -> dict[str, str]:
    """The jobs of those of `tasks` that exist, by task."""
    found: dict[str, str] = {}
    for start in range(0, len(tasks), _BATCH):
        query = select(Task.id, Task.job_id).where(Task.id.in_(tasks[start : start + _BATCH]))
        found.update(session.execute(query).all())
    return found


def replace_tasks(session: Session, incident: str, jobs: Mapping[str, str | None]) -> None:
    """Set which tasks the incident hit, and their jobs."""
    session.execute(delete(IncidentTask).where(IncidentTask.incident_id == incident))
    rows = [{"incident_id": incident, "task_id": task, "job_id": job} for task, job in sorted(jobs.items())]
    if rows:
        session.execute(insert(IncidentTask), rows)


def keep_newest(session: Session, most: int) -> None:
    """Remove all but the newest `most`."""
    first_removed = select(Incident.arrival).order_by(Incident.arrival.desc()).offset(most).limit(1).scalar_subquery()
    statement = delete(Incident).where(Incident.arrival <= first_removed)
    session.execute(statement.execution_options(synchronize_session=False))
