"""What happens to data sets: an upload becomes one, it is deleted, and what dead uploads left is cleared away."""

from itertools import islice
from pathlib import Path

from layertap.schemas.common import FieldError
from layertap.schemas.datasets import Dataset as DatasetView
from layertap.schemas.datasets import RowProblem, Stage
from layertap.storage_paths import dataset_dir, dataset_file
from service.datasets import repository
from service.datasets.upload import Upload, part_file
from service.db.clock import utc_now
from service.db.engine import Database
from service.db.models import Dataset, DatasetError
from service.problems import ConflictError, InvalidError, NotFoundError, ProblemError
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
        upload.published()
    except BaseException:
        with database.write() as session:
            repository.remove(session, row.id)
        upload.withdraw()
        raise
    return show(row)


def delete(database: Database, storage: Storage, dataset: str) -> None:
    """Delete a data set and its file. Raises `ConflictError` while a job that is not over reads it."""
    try:
        with database.write() as session:
            if repository.lock(session, dataset) is None:
                raise NotFoundError("dataset", dataset)
            if (job := repository.used_by(session, dataset)) is not None:
                remedy = "cancel the job, or wait for its end"
                raise ConflictError("dataset_in_use", f"job {job} reads it", field="dataset", remedy=remedy)
            storage.mark_deletion(dataset_dir(dataset))
            repository.remove(session, dataset)
    except ProblemError:
        raise
    except BaseException:
        settle(database, storage, dataset)
        raise
    storage.remove_folder(dataset_dir(dataset))


def clear_dead_uploads(database: Database, storage: Storage) -> None:
    """Remove what uploads of dead processes left before they were published. A living one is known by its lock."""
    for part in (storage.root / UPLOADS).iterdir():
        if part.is_file() and not _locked(part):
            part.unlink(missing_ok=True)
    with database.read() as session:
        unpublished = repository.incomplete(session)
    for dataset in unpublished:
        if not storage.marked(dataset_dir(dataset)) and not _uploading(storage, dataset):
            _forget_incomplete(database, dataset)


def settle(database: Database, storage: Storage, dataset: str) -> None:
    """Bring a marked upload or deletion to its end: the folder goes where no complete data set is, else the marker."""
    folder = dataset_dir(dataset)
    if not storage.marked(folder) or _uploading(storage, dataset):
        return
    # Without a living upload, whether it completed is settled now; a deletion that is under way is waited for.
    with database.write() as session:
        if repository.lock(session, dataset) is not None:
            storage.unmark(folder)
            return
        repository.remove(session, dataset)
    storage.remove_folder(folder)


def _forget_incomplete(database: Database, dataset: str) -> None:
    with database.write() as session:
        if repository.lock(session, dataset) is None:
            repository.remove(session, dataset)


def _uploading(storage: Storage, dataset: str) -> bool:
    """Whether a living process uploads it. The order counts: the file moves from the first place to the second."""
    return _locked(storage.path(part_file(dataset))) or _locked(storage.path(dataset_file(dataset)))


def _locked(path: Path) -> bool:
    # Opened for writing, which NFS asks for, but never made.
    try:
        with path.open("r+b") as file:
            return not try_lock(file)
    except FileNotFoundError:
        return False


def _empty(upload: Upload) -> InvalidError:
    remedy = "send one JSON object a line, of one of the row shapes in the documentation"
    errors = [FieldError(field=f"line {n + 1}", reason=reason, remedy=remedy) for n, _, reason in upload.first_errors]
    detail = f"none of the {upload.bad_rows} lines is a usable row" if upload.bad_rows else "the body has no line"
    return InvalidError("empty_dataset", detail, field="body", remedy=remedy, errors=errors)
