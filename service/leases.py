"""The lease rules as functions over plain data: what a task may become, and what its job becomes with it.

Nothing here touches a database. `tasks.repository` carries out each transition as one guarded statement.
"""

from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum

from layertap.schemas.jobs import JobState


class TaskState(StrEnum):
    """A task is `ready` or `leased` while it is open; `done`, `failed` and `cancelled` end it."""

    READY = "ready"
    LEASED = "leased"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def open(self) -> bool:
        """Whether the task's job still waits for it."""
        return self in (TaskState.READY, TaskState.LEASED)


@dataclass(frozen=True)
class Bounds:
    """How many failures a task may cause, and how many of its leases may expire, before it is given up."""

    attempts: int = 3
    expiries: int = 10


@dataclass(frozen=True)
class Task:
    """The part of a task that the rules look at. `deadline` is on the clock of leases, in seconds."""

    state: TaskState
    generation: int = 0
    secret: str = ""
    attempts: int = 0
    expiries: int = 0
    deadline: float = 0.0
    sha256: str | None = None


@dataclass(frozen=True)
class Next:
    """What a lease that ended without a commit leaves behind."""

    state: TaskState
    attempts: int
    expiries: int


def held(task: Task, generation: int, secret: str) -> bool:
    """Whether `generation` and `secret` name the lease that holds the task now."""
    return task.state is TaskState.LEASED and task.generation == generation and task.secret == secret


def expired(task: Task, now: float) -> bool:
    """Whether the task's lease ran out. Until the expiry is applied the lease still holds."""
    return task.state is TaskState.LEASED and task.deadline <= now


def claimable(task: Task, now: float, bounds: Bounds) -> bool:
    """Whether a worker may be given the task: ready, or its lease expired with tries left."""
    return task.state is TaskState.READY or (expired(task, now) and task.expiries + 1 < bounds.expiries)


def repeats_commit(task: Task, generation: int, secret: str, sha256: str | None) -> bool:
    """Whether a commit says again what the task already recorded, so that it is answered and not counted."""
    same_lease = task.generation == generation and task.secret == secret
    return task.state is TaskState.DONE and same_lease and task.sha256 == sha256


def after_failure(task: Task, retryable: bool, cancelling: bool, bounds: Bounds) -> Next:
    """A failure that the task caused costs an attempt; not retryable costs them all."""
    attempts = task.attempts + 1 if retryable else max(bounds.attempts, task.attempts + 1)
    return Next(_reopened(attempts >= bounds.attempts, cancelling), attempts, task.expiries)


def after_expiry(task: Task, cancelling: bool, bounds: Bounds) -> Next:
    """An expired lease costs an expiry, whose bound is higher: the worker died, not necessarily by the task."""
    expiries = task.expiries + 1
    return Next(_reopened(expiries >= bounds.expiries, cancelling), task.attempts, expiries)


def after_release(task: Task, cancelling: bool) -> Next:
    """A released lease costs nothing."""
    return Next(_reopened(False, cancelling), task.attempts, task.expiries)


def _reopened(spent: bool, cancelling: bool) -> TaskState:
    if cancelling:
        return TaskState.CANCELLED
    return TaskState.FAILED if spent else TaskState.READY


def job_outcome(cancelling: bool, states: Collection[TaskState], job_failed: bool) -> JobState | None:
    """The terminal state of a job whose tasks are in `states`; None while one of them is open.

    A job that was being cancelled ends cancelled even if its last shard was committed meanwhile.
    """
    if any(state.open for state in states):
        return None
    if cancelling:
        return JobState.CANCELLED
    if job_failed or any(state is not TaskState.DONE for state in states):
        return JobState.FAILED
    return JobState.SUCCEEDED


def cancellable(state: JobState) -> bool:
    """Whether a cancel changes a job in `state`; one in `cancelling` is being cancelled already."""
    return state in (JobState.QUEUED, JobState.PLANNING, JobState.RUNNING)


def retryable(state: JobState) -> bool:
    """Whether a job in `state` may be queued again for what it has not committed."""
    return state in (JobState.FAILED, JobState.CANCELLED)
