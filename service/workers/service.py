"""What workers tell of themselves: registration, the control poll, and goodbye."""

import hashlib

from layertap.schemas.shards import Pins
from layertap.schemas.tasks import ControlRequest, ControlResponse
from layertap.schemas.workers import Model as ModelView
from layertap.schemas.workers import Worker as WorkerView
from layertap.schemas.workers import WorkerRegister, WorkerState
from service.context import Context
from service.db.clock import utc_now
from service.db.models import Model, Worker, WorkerModel
from service.figures import standing
from service.problems import ConflictError, InvalidError, NotFoundError
from service.tasks import endings
from service.workers import repository


def pins_key(pins: Pins) -> str:
    """A digest of pins: equal keys mean equal pins."""
    return hashlib.sha256(pins.model_dump_json().encode()).hexdigest()


def register(context: Context, body: WorkerRegister) -> WorkerView:
    """Register a worker, or register it again. Raises `ConflictError` where it sees another storage."""
    if body.storage_nonce != context.storage.nonce:
        raise ConflictError(
            "storage_mismatch",
            "the worker does not see the storage directory of the service",
            field="storage_nonce",
            remedy="start both with the same LAYERTAP_STORAGE, on a file system that both share",
        )
    names = [facts.name for facts in body.models]
    if len(set(names)) != len(names):
        raise InvalidError(
            "duplicate_model", "two models have one name", field="models", remedy="give every model its own name"
        )
    now = utc_now()
    with context.database.write() as session:
        worker = Worker(
            id=body.id,
            host=body.host,
            version=body.version,
            state=WorkerState.ACTIVE.value,
            registered_at=now,
            seen_at=now,
            seen_deadline=0.0,
        )
        models = [
            WorkerModel(worker_id=body.id, name=m.name, path=m.path, pins_key=pins_key(m.pins)) for m in body.models
        ]
        catalogue = [
            Model(
                name=m.name,
                path=m.path,
                num_layers=m.num_layers,
                hidden_size=m.hidden_size,
                max_row_tokens=m.max_row_tokens,
            )
            for m in body.models
        ]
        repository.save(session, worker, models, catalogue)
        seconds = context.settings.lease_seconds
        repository.touch(session, context.database.clock, body.id, seconds, ControlRequest())
        session.flush()
        row = repository.get(session, body.id)
        assert row is not None
        session.refresh(row)
        return show(row, models)


def control(context: Context, worker: str, body: ControlRequest) -> ControlResponse:
    """Note the worker's state and answer which of its tasks it must drop."""
    seconds = context.settings.lease_seconds
    with context.database.write() as session:
        known = repository.touch(session, context.database.clock, worker, seconds, body)
        kept = repository.held_by(session, worker, body.held) if body.held else set()
    return ControlResponse(
        drop=[held.task for held in body.held if (held.task, held.generation) not in kept], known=known
    )


def goodbye(context: Context, worker: str) -> WorkerView:
    """The worker ends: its leases are released, at no cost to the tasks."""
    with context.database.write() as session:
        if not repository.mark_gone(session, worker):
            raise NotFoundError("worker", worker)
        row = repository.get(session, worker)
        assert row is not None
        view = show(row, repository.models_of(session, [worker])[worker])
    endings.release_all(context, worker)
    return view


def show(row: Worker, models: list[WorkerModel]) -> WorkerView:
    """The worker as the interface shows it."""
    return WorkerView(
        id=row.id,
        host=row.host,
        version=row.version,
        state=WorkerState(row.state),
        models=[model.name for model in models],
        loaded_model=row.loaded_model,
        status=row.status,
        figures=standing(row),
        registered_at=row.registered_at,
        seen_at=row.seen_at,
    )


def show_model(row: Model) -> ModelView:
    """The model as the interface shows it."""
    return ModelView(
        name=row.name,
        path=row.path,
        num_layers=row.num_layers,
        hidden_size=row.hidden_size,
        max_row_tokens=row.max_row_tokens,
    )
