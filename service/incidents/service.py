"""The rules of incidents: what is kept of a report, what a repeat may change, and how long incidents are kept."""

from collections.abc import Sequence
from datetime import UTC, datetime

from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from layertap.schemas.incidents import Blame, Evidence, IncidentKind, IncidentReport
from layertap.schemas.incidents import Incident as IncidentView
from service.context import Context
from service.db.clock import utc_now
from service.db.models import Incident
from service.ids import new_id
from service.incidents import repository
from service.incidents.fitting import fitted
from service.incidents.masking import masked, masked_evidence
from service.problems import ConflictError, NotFoundError
from service.workers import repository as workers

KEPT = 1000
_MAX_REASON, _MAX_TRIED = 4000, 1000


def report(context: Context, body: IncidentReport) -> tuple[IncidentView, bool]:
    """Keep an incident, or what a repeat adds to it; the incident, and whether it is new.

    A repeat may change blame, what was tried, what was left, and the tasks. Raises `NotFoundError` for an unknown
    worker, `ConflictError` where another worker reported the id.
    """
    clean = _clean(body, _known_secrets(context))
    try:
        with context.database.write() as session:
            return _save(session, clean)
    except IntegrityError:
        # The same report came at the same moment and was first; this one is a repeat now.
        with context.database.write() as session:
            return _save(session, clean)


def views(session: Session, rows: Sequence[Incident]) -> list[IncidentView]:
    """Incidents as the interface lists them, without evidence."""
    tasks = repository.tasks_of(session, [row.id for row in rows])
    return [_show(row, tasks[row.id], Evidence()) for row in rows]


def view(session: Session, incident: str) -> IncidentView:
    """One incident with its evidence. Raises `NotFoundError`."""
    row = repository.whole(session, incident)
    if row is None:
        raise NotFoundError("incident", incident)
    tasks = repository.tasks_of(session, [row.id])[row.id]
    return _show(row, tasks, Evidence.model_validate_json(row.evidence))


def _save(session: Session, body: IncidentReport) -> tuple[IncidentView, bool]:
    if workers.get(session, body.worker) is None:
        raise NotFoundError("worker", body.worker)
    row = repository.lock(session, body.id)
    new = row is None
    if row is None:
        row = _new(body)
        repository.add(session, row)
    elif row.worker_id != body.worker:
        detail = f"incident {body.id} was reported by worker {row.worker_id}"
        remedy = "give every incident an id of its own"
        raise ConflictError("incident_of_another_worker", detail, field="id", remedy=remedy)
    row.blame = body.blame.value
    row.tried = body.tried
    row.processes_left = body.processes_left
    row.gpu_bytes_left = body.gpu_bytes_left
    # The jobs of tasks that are gone by now were noted before.
    before = repository.tasks_of(session, [row.id])[row.id]
    jobs = repository.jobs_of(session, body.tasks)
    repository.replace_tasks(session, row.id, {task: jobs.get(task) or before.get(task) for task in body.tasks})
    session.flush()
    if new:
        repository.keep_newest(session, KEPT)
    return views(session, [row])[0], new


def _new(body: IncidentReport) -> Incident:
    return Incident(
        id=body.id,
        arrival=new_id("arrival"),
        worker_id=body.worker,
        model=body.model,
        kind=body.kind.value,
        phase=body.phase,
        blame=body.blame.value,
        reason=body.reason,
        tried=body.tried,
        processes_left=body.processes_left,
        gpu_bytes_left=body.gpu_bytes_left,
        happened_at=_utc(body.happened_at),
        reported_at=utc_now(),
        evidence=body.evidence.model_dump_json(),
    )


def _clean(body: IncidentReport, known: Sequence[str]) -> IncidentReport:
    """The report without secrets, cut to size, and with nothing that a database refuses to store."""
    return body.model_copy(
        update={
            "model": _storable(body.model),
            "phase": _storable(body.phase),
            "reason": _storable(masked(body.reason, known))[:_MAX_REASON],
            "tried": [_storable(masked(text, known))[:_MAX_TRIED] for text in body.tried],
            "tasks": [_storable(task) for task in body.tasks],
            "evidence": fitted(masked_evidence(body.evidence, known)),
        }
    )


def _storable(text: str) -> str:
    """Logs of a dying process may hold a NUL, which Postgres refuses; a report is worth more than that byte."""
    return text.replace("\0", "\N{REPLACEMENT CHARACTER}")


def _utc(moment: datetime) -> datetime:
    return moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)


def _known_secrets(context: Context) -> list[str]:
    token = context.settings.token
    return [] if token is None else [token.get_secret_value()]


def _show(row: Incident, tasks: dict[str, str | None], evidence: Evidence) -> IncidentView:
    return IncidentView(
        id=row.id,
        worker=row.worker_id,
        model=row.model,
        tasks=list(tasks),
        kind=IncidentKind(row.kind),
        phase=row.phase,
        reason=row.reason,
        blame=Blame(row.blame),
        tried=row.tried,
        processes_left=row.processes_left,
        gpu_bytes_left=row.gpu_bytes_left,
        evidence=evidence,
        happened_at=row.happened_at,
        jobs=sorted({job for job in tasks.values() if job is not None}),
        reported_at=row.reported_at,
    )
