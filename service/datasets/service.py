"""What happens to data sets: an upload becomes one, it is deleted, and what dead uploads left is cleared away."""

from itertools import islice

from layertap.schemas.common import FieldError
from layertap.schemas.datasets import Dataset as DatasetView
from layertap.schemas.datasets import RowProblem, Stage
from layertap.storage_paths import dataset_file
from service.datasets import repository
from service.datasets.upload import Upload
from service.db.clock import utc_now
from service.db.engine import Database
from service.db.models import Dataset, DatasetError
from service.problems import ConflictError, InvalidError, NotFoundError
from service.storage import UPLOADS, Storage, try_lock

_BATCH = 2000


def show(row: Dataset) -> DatasetView:
    """The data set as the interface shows it."""
    return DatasetView(
        id=row.id,
        name=row.name,
        bytes=row.bytes,
        sha256=row.sha256,
        rows=row.rows,
        bad_rows=row.bad_rows,
        created_at=row.created_at,
    )


def show_error(row: DatasetError) -> RowProblem:
    """A refused line as the interface shows it."""
    return RowProblem(row_id=row.row_id, line=row.row_id + 1, stage=Stage.UPLOAD, code=row.code, reason=row.reason)


def complete(database: Database, upload: Upload, name: str) -> DatasetView:
    """Turn a wholly received upload into a data set. Raises `InvalidError` where no line of it is good."""
    upload.finish()
    if upload.rows == 0:
        raise _empty(upload)
    row = Dataset(
        id=upload.dataset,
        name=name,
        bytes=upload.bytes,
        sha256=upload.sha256,
        rows=upload.rows,
        bad_rows=upload.bad_rows,
        complete=False,
        created_at=utc_now(),
    )
    with database.write() as session:
        session.add(row)
    try:
        upload.publish()
        errors = upload.errors()
        while batch := list(islice(errors, _BATCH)):
            rows = [{"dataset_id": row.id, "row_id": n, "code": code, "reason": reason} for n, code, reason in batch]
            with database.write() as session:
                repository.add_errors(session, rows)
        with database.write() as session:
            repository.mark_complete(session, row.id)
    except BaseException:
        with database.write() as session:
            repository.remove(session, row.id)
        raise
    return show(row)


def delete(database: Database, storage: Storage, dataset: str) -> None:
    """Delete a data set and its file. Raises `ConflictError` while a job that is not over reads it."""
    with database.write() as session:
        if repository.lock(session, dataset) is None:
            raise NotFoundError("dataset", dataset)
        if (job := repository.used_by(session, dataset)) is not None:
            raise ConflictError(
                "dataset_in_use", f"job {job} reads it", field="dataset", remedy="cancel the job, or wait for its end"
            )
        repository.remove(session, dataset)
    storage.remove(f"datasets/{dataset}")


def clear_dead_uploads(database: Database, storage: Storage) -> None:
    """Remove what uploads of dead processes left. A living upload is known by the lock on its file."""
    for part in (storage.root / UPLOADS).iterdir():
        if part.is_file():
            with part.open("ab") as file:
                if try_lock(file):
                    part.unlink(missing_ok=True)
    for folder in (storage.root / "datasets").iterdir():
        _clear_dataset(database, storage, folder.name)
    with database.read() as session:
        unpublished = repository.incomplete(session)
    for dataset in unpublished:
        _clear_dataset(database, storage, dataset)


def _clear_dataset(database: Database, storage: Storage, dataset: str) -> None:
    with database.read() as session:
        if repository.get(session, dataset) is not None:
            return
    path = storage.path(dataset_file(dataset))
    if path.exists():
        with path.open("ab") as file:
            if not try_lock(file):
                return
    # Under the lock the upload's process is dead, so whether it completed is settled now.
    with database.write() as session:
        if repository.get(session, dataset) is not None:
            return
        repository.remove(session, dataset)
    storage.remove(f"datasets/{dataset}")


def _empty(upload: Upload) -> InvalidError:
    remedy = "send one JSON object a line, of one of the row shapes in the documentation"
    errors = [FieldError(field=f"line {n + 1}", reason=reason, remedy=remedy) for n, _, reason in upload.first_errors]
    detail = f"none of the {upload.bad_rows} lines is a usable row" if upload.bad_rows else "the body has no line"
    return InvalidError("empty_dataset", detail, field="body", remedy=remedy, errors=errors)
