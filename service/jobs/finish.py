"""The end of a job: the manifest, written from the database and atomically, and then the terminal state.

Any replica may do it and may be killed doing it: until the state is terminal, the next one does all of it again.
"""

import logging

from layertap import boundaries
from layertap.schemas.jobs import JobState
from layertap.schemas.shards import Manifest, ManifestShard
from layertap.storage_paths import job_dir, manifest_file, shard_name
from service import leases
from service.context import Context
from service.db.models import Job, Task
from service.jobs import progression, repository
from service.tasks import repository as tasks

_PER_ROUND = 100
_log = logging.getLogger(__name__)


def finish_jobs(context: Context) -> int:
    """Finish the jobs that wait for it, a bounded number of them; how many were looked at."""
    with context.database.read() as session:
        waiting = repository.finishable(session, _PER_ROUND)
    for job in waiting:
        try:
            finish(context, job)
        except Exception:  # noqa: BLE001 (one job that can't be finished must not keep others from it)
            _log.exception("job %s could not be finished; the next round tries again", job)
    return len(waiting)


def finish(context: Context, job: str) -> None:
    """Write the job's manifest and end it. Nothing happens where another process is at it, or it is over already."""
    # The lock keeps a replica that stalled here from writing its manifest over that of a later retry.
    with context.storage.exclusive(f"{job_dir(job)}/.finish.lock") as alone:
        if not alone:
            return
        with context.database.read() as session:
            row = repository.get(session, job)
            if row is None or not _waits(row):
                return
            shards = tasks.committed_shards(session, job)
            outcome = leases.job_outcome(
                progression.cancelling(row), tasks.states(session, job), row.failure_code is not None
            )
            failure = tasks.first_failure(session, job)
        if outcome is None:
            return
        manifest = _manifest(row, shards, outcome is JobState.SUCCEEDED)
        context.storage.write(manifest_file(job), manifest.model_dump_json(indent=2).encode() + b"\n")
        context.storage.keep_only(f"{job_dir(job)}/shards", {shard.file for shard in manifest.shards})
        with context.database.write() as session:
            locked = repository.lock(session, job)
            if locked is None or not _waits(locked):
                return
            if outcome is JobState.FAILED and failure is not None:
                progression.fail(locked, *_reason(failure))
            progression.enter(locked, outcome)


def _waits(job: Job) -> bool:
    return job.state in (JobState.FINALIZING, JobState.CANCELLING) and job.tasks_open == 0


def _reason(task: Task) -> tuple[str, str]:
    code, reason = task.failure_code or "lease_expired", task.failure_reason or ""
    if task.kind == "plan":
        return code, reason
    return "shards_failed", f"shard {task.index} could not be extracted: {code}: {reason}"


def _manifest(job: Job, shards: list[Task], complete: bool) -> Manifest:
    listed = [
        ManifestShard(
            index=task.index,
            file=shard_name(task.index, task.generation),
            bytes=task.committed_bytes or 0,
            sha256=task.sha256 or "",
            rows=task.committed_rows or 0,
            tokens=task.committed_tokens or 0,
        )
        for task in shards
    ]
    return Manifest.model_validate(
        {
            "job": job.id,
            "complete": complete,
            "dataset": job.dataset_id,
            "dataset_sha256": job.dataset_sha256,
            "model": job.model,
            "num_layers": job.num_layers,
            "hidden_size": job.hidden_size,
            "layers": job.layers,
            "boundaries": [boundaries.names(k, job.num_layers) for k in job.layers],
            "final": job.final,
            "pins": job.pins,
            "rows": sum(shard.rows for shard in listed),
            "tokens": sum(shard.tokens for shard in listed),
            "row_errors": job.row_errors,
            "shards": listed,
            "engine": job.engine,
        }
    )
