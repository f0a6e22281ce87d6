"""What a process that died left in the storage, brought to its end at a start.

Only what bears a marker of an upload or a deletion is removed. A folder that the database does not know may be the work
of another database, so it stays, and is named in the log.
"""

import logging

from layertap.storage_paths import dataset_dir, job_dir
from service.context import Context
from service.datasets import repository as datasets
from service.datasets import service as dataset_service
from service.jobs import repository as jobs
from service.jobs import service as job_service

_BATCH = 500
_NAMED = 20
_log = logging.getLogger(__name__)


def clear_leftovers(context: Context) -> None:
    """Finish cut-off uploads and deletions, and warn of folders that belong to no row of the database."""
    storage = context.storage
    dataset_service.clear_dead_uploads(context.database, storage)
    for name in storage.folders("datasets"):
        dataset_service.settle(context.database, storage, name)
    for name in storage.folders("jobs"):
        job_service.settle_deletion(context, name)
    # Rows are inserted before their folders are made, so folders are listed first.
    strangers = [folder for folder in _unknown(context) if not storage.remove_empty(folder)]
    if strangers:
        _warn(context, strangers)


def _unknown(context: Context) -> list[str]:
    """Folders, relative to the storage, without a row and without a marker."""
    unknown = []
    for parent, path, known_ids in (("datasets", dataset_dir, datasets.known), ("jobs", job_dir, jobs.known)):
        names = context.storage.folders(parent)
        for start in range(0, len(names), _BATCH):
            batch = names[start : start + _BATCH]
            with context.database.read() as session:
                known = known_ids(session, batch)
            unknown += [path(name) for name in batch if name not in known and not context.storage.marked(path(name))]
    return unknown


def _warn(context: Context, strangers: list[str]) -> None:
    named = ", ".join(strangers[:_NAMED])
    more = f" and {len(strangers) - _NAMED} more" if len(strangers) > _NAMED else ""
    _log.warning(
        "%s holds folders that this database does not know: %s%s. They are another database's data, and are left "
        "alone: point --database-url at that database, or name an empty folder with --storage",
        context.storage.root,
        named,
        more,
    )
