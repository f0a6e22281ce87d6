"""Room in the storage: what a job is about to write must fit beside what running jobs have still to write."""

from sqlalchemy.orm import Session

from service.context import Context
from service.jobs import repository


def shortage(context: Context, session: Session, needed: int, free: int) -> str | None:
    """Why `needed` bytes do not fit, of the `free` ones that the storage had a moment ago; None where they do.

    On Postgres other jobs are not judged from here on until the transaction ends, so none is promised the same bytes.
    """
    available = free - repository.reserved_bytes(session, context.database.postgres)
    if needed <= available:
        return None
    return f"the shards need {needed} bytes, {max(0, available)} are free and not reserved in the storage"
