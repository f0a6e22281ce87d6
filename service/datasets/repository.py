"""Every query about data sets and their refused lines. Data sets that are not complete are never seen from outside."""

from collections.abc import Sequence
from typing import Any

from sqlalchemy import delete, insert, select, update
from sqlalchemy.orm import Session

from layertap.schemas.jobs import JobState
from service.db.models import Dataset, DatasetError, Job

_BATCH = 5000
_ACTIVE = [state.value for state in JobState if not state.terminal]


def get(session: Session, dataset: str) -> Dataset | None:
    """The complete data set of that id."""
    return session.scalar(select(Dataset).where(Dataset.id == dataset, Dataset.complete))


def share(session: Session, dataset: str) -> Dataset | None:
    """The data set, kept from being deleted until this transaction ends."""
    query = select(Dataset).where(Dataset.id == dataset, Dataset.complete)
    return session.scalar(query.with_for_update(read=True, key_share=True))


def lock(session: Session, dataset: str) -> Dataset | None:
    """The data set, locked for deletion."""
    return session.scalar(select(Dataset).where(Dataset.id == dataset, Dataset.complete).with_for_update())


def page(session: Session, limit: int, after: str | None) -> Sequence[Dataset]:
    """Newest first, one more than `limit`."""
    query = select(Dataset).where(Dataset.complete).order_by(Dataset.id.desc()).limit(limit + 1)
    return session.scalars(query.where(Dataset.id < after) if after is not None else query).all()


def incomplete(session: Session) -> Sequence[str]:
    """Ids of data sets whose upload has not come to its end."""
    return session.scalars(select(Dataset.id).where(~Dataset.complete)).all()


def known(session: Session, datasets: Sequence[str]) -> set[str]:
    """Those of `datasets` that exist, complete or not."""
    return set(session.scalars(select(Dataset.id).where(Dataset.id.in_(datasets))))


def add_errors(session: Session, rows: list[dict[str, Any]]) -> None:
    """Insert refused lines, as dicts of the columns."""
    for start in range(0, len(rows), _BATCH):
        session.execute(insert(DatasetError), rows[start : start + _BATCH])


def mark_complete(session: Session, dataset: str) -> None:
    """Let the data set be seen."""
    session.execute(update(Dataset).where(Dataset.id == dataset).values(complete=True))


def errors_page(session: Session, dataset: str, limit: int, after: int | None) -> Sequence[DatasetError]:
    """Refused lines, ascending, one more than `limit`."""
    query = select(DatasetError).where(DatasetError.dataset_id == dataset)
    if after is not None:
        query = query.where(DatasetError.row_id > after)
    return session.scalars(query.order_by(DatasetError.row_id).limit(limit + 1)).all()


def used_by(session: Session, dataset: str) -> str | None:
    """A job that is not over and reads the data set."""
    return session.scalar(select(Job.id).where(Job.dataset_id == dataset, Job.state.in_(_ACTIVE)).limit(1))


def remove(session: Session, dataset: str) -> None:
    """Delete the data set and its refused lines."""
    session.execute(delete(Dataset).where(Dataset.id == dataset))
