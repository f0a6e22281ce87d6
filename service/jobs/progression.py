"""How a job moves on: the steps that change its row, each under the row's lock that the caller holds."""

from layertap.schemas.jobs import JobState
from service.db.clock import utc_now
from service.db.models import Job


def enter(job: Job, state: JobState) -> None:
    """Put the job into `state` and note the time."""
    job.state = state.value
    setattr(job, f"{state}_at", utc_now())


def cancelling(job: Job) -> bool:
    """Whether the job is being cancelled, so that a task that is handed back is not given out again."""
    return job.state == JobState.CANCELLING


def fail(job: Job, code: str, reason: str) -> None:
    """Note why the job can't succeed; the first reason stays."""
    if job.failure_code is None:
        job.failure_code, job.failure_reason = code, reason


def tasks_ended(job: Job, count: int) -> None:
    """`count` of the job's tasks have ended; after the last one the job waits for its manifest."""
    job.tasks_open -= count
    if job.tasks_open == 0 and job.state != JobState.CANCELLING:
        enter(job, JobState.FINALIZING)
