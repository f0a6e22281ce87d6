"""Every query about workers and the models they know."""

from collections.abc import Sequence
from datetime import datetime

from sqlalchemy import case, delete, or_, select, update
from sqlalchemy.orm import Session

from layertap.schemas.tasks import ControlRequest, HeldTask
from layertap.schemas.workers import WorkerState
from service.db.clock import Clock, utc_now
from service.db.models import Incident, Job, Model, Task, Worker, WorkerModel
from service.leases import TaskState

_MAX_TEXT = 200
_NOT_GONE = [state.value for state in WorkerState if state is not WorkerState.GONE]


def get(session: Session, worker: str) -> Worker | None:
    """The worker of that id."""
    return session.get(Worker, worker)


def page(session: Session, limit: int, after: str | None) -> Sequence[Worker]:
    """By id, one more than `limit`."""
    query = select(Worker).order_by(Worker.id).limit(limit + 1)
    return session.scalars(query.where(Worker.id > after) if after is not None else query).all()


def models_of(session: Session, workers: Sequence[str]) -> dict[str, list[WorkerModel]]:
    """The models of each of `workers`, by name."""
    query = select(WorkerModel).where(WorkerModel.worker_id.in_(workers)).order_by(WorkerModel.name)
    found: dict[str, list[WorkerModel]] = {worker: [] for worker in workers}
    for row in session.scalars(query):
        found[row.worker_id].append(row)
    return found


def save(session: Session, worker: Worker, models: list[WorkerModel], catalogue: list[Model]) -> None:
    """Register or register again: the worker's row and models are replaced, the catalogue is brought up to date."""
    session.merge(worker)
    session.flush()
    session.execute(delete(WorkerModel).where(WorkerModel.worker_id == worker.id))
    session.add_all(models)
    # In one order everywhere, so that two workers that register at once can't deadlock.
    for model in sorted(catalogue, key=lambda entry: entry.name):
        session.merge(model)
        session.flush()


def touch(session: Session, clock: Clock, worker: str, seconds: float, said: ControlRequest) -> bool:
    """Note that the worker spoke, and what: it counts as present for `seconds`. False where it is unknown or gone."""
    statement = (
        update(Worker)
        .where(Worker.id == worker, Worker.state.in_(_NOT_GONE))
        .values(
            state=(WorkerState.DRAINING if said.draining else WorkerState.ACTIVE).value,
            loaded_model=said.loaded_model,
            status=said.status[:_MAX_TEXT],
            figures=None if said.figures is None else said.figures.model_dump(),
            seen_at=utc_now(),
            seen_deadline=clock.now() + seconds,
        )
        .returning(Worker.id)
    )
    return session.execute(statement).first() is not None


def held_by(session: Session, worker: str, held: Sequence[HeldTask]) -> set[tuple[str, int]]:
    """Those of `held` that the worker holds and should go on with, as (task, generation)."""
    query = (
        select(Task.id, Task.generation)
        .join(Job, Job.id == Task.job_id)
        .where(
            Task.id.in_([task.task for task in held]),
            Task.worker_id == worker,
            Task.state == TaskState.LEASED,
            Job.state != "cancelling",
        )
    )
    return {(task, generation) for task, generation in session.execute(query)}


def mark_gone(session: Session, worker: str) -> bool:
    """Note that the worker said goodbye; False where it is unknown."""
    statement = update(Worker).where(Worker.id == worker).values(state=WorkerState.GONE.value).returning(Worker.id)
    return session.execute(statement).first() is not None


def mark_lost(session: Session, clock: Clock) -> None:
    """Mark the workers that have been silent for too long."""
    present = [state.value for state in WorkerState if state.present]
    statement = update(Worker).where(Worker.state.in_(present), Worker.seen_deadline <= clock.now())
    session.execute(statement.values(state=WorkerState.LOST.value))


def forget(session: Session, before: datetime) -> None:
    """Delete the workers that are gone or lost, were last seen before that, and that nothing refers to any more.

    The wall clock is right enough: one that jumps can't end a worker that is present, and one that is lost and comes
    back registers anew.
    """
    leased = select(Task.id).where(Task.worker_id == Worker.id, Task.state == TaskState.LEASED)
    incident = select(Incident.id).where(Incident.worker_id == Worker.id)
    statement = delete(Worker).where(
        Worker.state.in_([WorkerState.GONE.value, WorkerState.LOST.value]),
        Worker.seen_at < before,
        ~leased.exists(),
        ~incident.exists(),
    )
    # The models that they knew go with them, by the foreign key; the catalogue stays.
    session.execute(statement.execution_options(synchronize_session=False))


def grant_full_terms(session: Session, clock: Clock, seconds: float) -> None:
    """Count every worker's silence from now on: the clock has started anew."""
    session.execute(update(Worker).values(seen_deadline=clock.now() + seconds))


def model(session: Session, asked: str) -> Model | None:
    """The model that a worker registered under this name, or else at this path."""
    first = case((Model.name == asked, 0), else_=1)
    return session.scalar(
        select(Model).where(or_(Model.name == asked, Model.path == asked)).order_by(first, Model.name).limit(1)
    )


def model_names(session: Session) -> Sequence[str]:
    """Names of the models that jobs may name, the first 100."""
    return session.scalars(select(Model.name).order_by(Model.name).limit(100)).all()


def models_page(session: Session, limit: int, after: str | None) -> Sequence[Model]:
    """By name, one more than `limit`."""
    query = select(Model).order_by(Model.name).limit(limit + 1)
    return session.scalars(query.where(Model.name > after) if after is not None else query).all()
