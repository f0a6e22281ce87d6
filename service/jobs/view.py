"""A job as the interface shows it, progress and rate included. Pure."""

from datetime import datetime

from layertap.schemas.jobs import Job as JobView
from layertap.schemas.jobs import JobFailure, JobState, Progress
from service.db.models import Job
from service.figures import of_job
from service.jobs.repository import Running


def show(job: Job, running: Running, now: datetime) -> JobView:
    """`job` with what its leased shards report counted into the progress; `now` is wall-clock time in UTC."""
    failure = None
    if job.failure_code is not None:
        failure = JobFailure(code=job.failure_code, reason=job.failure_reason or "")
    return JobView.model_validate(
        {
            "id": job.id,
            "state": job.state,
            "dataset": job.dataset_id,
            "model": job.model,
            "layers": job.layers,
            "preset": job.preset,
            "final": job.final,
            "max_tokens": job.max_tokens,
            "overflow": job.overflow,
            "loss_mask": job.loss_mask,
            "shard_bytes": job.shard_bytes,
            "metadata": job.labels,
            "progress": _progress(job, running, now),
            "failure": failure,
            "created_at": job.created_at,
            **{f"{state}_at": getattr(job, f"{state}_at") for state in JobState if state is not JobState.QUEUED},
        }
    )


def _progress(job: Job, running: Running, now: datetime) -> Progress:
    tokens = _bounded(job.tokens_done + running.tokens, job.tokens_total)
    rate = _rate(job, tokens, now)
    left = None if job.tokens_total is None else job.tokens_total - tokens
    token_bytes = (job.bytes_total or 0) / (job.tokens_total or 1)
    return Progress(
        rows_total=job.rows_total,
        rows_done=_bounded(job.rows_done + running.rows, job.rows_total),
        row_errors=job.row_errors,
        tokens_total=job.tokens_total,
        tokens_done=tokens,
        bytes_total=job.bytes_total,
        shards_total=job.shards_total,
        shards_done=job.shards_done,
        tokens_per_second=rate,
        now=of_job(running.speeds, token_bytes, list(running.workers.values())),
        eta_seconds=left / rate if rate and left is not None and job.state == JobState.RUNNING else None,
    )


def _bounded(done: int, total: int | None) -> int:
    return done if total is None else min(done, total)


def _rate(job: Job, tokens: int, now: datetime) -> float | None:
    """Tokens a second since the job last began to run."""
    if job.running_at is None:
        return None
    end = job.finalizing_at or job.cancelling_at or now
    seconds = (end - job.running_at).total_seconds()
    return max(0, tokens - job.tokens_before) / seconds if seconds > 0 else None
