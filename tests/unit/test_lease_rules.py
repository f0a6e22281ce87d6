"""The lease rules, as plain functions: each bound and each outcome, and any history hypothesis can think of."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from layertap.schemas.jobs import JobState
from service import leases
from service.leases import Bounds, Task, TaskState

BOUNDS = Bounds(attempts=3, expiries=10)
LEASED = Task(TaskState.LEASED, generation=2, secret="s", deadline=100.0)


def test_a_lease_is_held_by_its_own_generation_and_secret_only() -> None:
    assert leases.held(LEASED, 2, "s")
    assert not leases.held(LEASED, 1, "s")
    assert not leases.held(LEASED, 3, "s")
    assert not leases.held(LEASED, 2, "other")
    for state in set(TaskState) - {TaskState.LEASED}:
        assert not leases.held(Task(state, 2, "s"), 2, "s")


def test_a_lease_expires_at_its_deadline_and_not_before() -> None:
    assert not leases.expired(LEASED, 99.9)
    assert leases.expired(LEASED, 100.0)
    assert not leases.expired(Task(TaskState.DONE, deadline=1.0), 100.0)


def test_ready_tasks_and_expired_ones_with_tries_left_are_claimable() -> None:
    assert leases.claimable(Task(TaskState.READY), 0.0, BOUNDS)
    assert leases.claimable(LEASED, 100.0, BOUNDS)
    assert not leases.claimable(LEASED, 99.0, BOUNDS)
    assert not leases.claimable(Task(TaskState.LEASED, expiries=9, deadline=1.0), 100.0, BOUNDS)
    assert not leases.claimable(Task(TaskState.DONE), 0.0, BOUNDS)


def test_the_third_failure_ends_a_task() -> None:
    task = LEASED
    for attempts, state in ((1, TaskState.READY), (2, TaskState.READY), (3, TaskState.FAILED)):
        after = leases.after_failure(task, True, False, BOUNDS)
        assert (after.attempts, after.state) == (attempts, state)
        task = Task(TaskState.LEASED, attempts=after.attempts)


def test_a_failure_that_is_not_retryable_spends_every_attempt() -> None:
    after = leases.after_failure(LEASED, False, False, BOUNDS)
    assert (after.state, after.attempts) == (TaskState.FAILED, 3)


def test_the_tenth_expiry_ends_a_task_and_costs_no_attempt() -> None:
    assert leases.after_expiry(Task(TaskState.LEASED, expiries=8), False, BOUNDS).state is TaskState.READY
    after = leases.after_expiry(Task(TaskState.LEASED, attempts=1, expiries=9), False, BOUNDS)
    assert (after.state, after.attempts, after.expiries) == (TaskState.FAILED, 1, 10)


def test_a_release_costs_nothing() -> None:
    after = leases.after_release(Task(TaskState.LEASED, attempts=2, expiries=9), False)
    assert (after.state, after.attempts, after.expiries) == (TaskState.READY, 2, 9)


def test_a_task_of_a_job_that_is_being_cancelled_is_not_given_out_again() -> None:
    assert leases.after_release(LEASED, True).state is TaskState.CANCELLED
    assert leases.after_expiry(LEASED, True, BOUNDS).state is TaskState.CANCELLED
    assert leases.after_failure(LEASED, True, True, BOUNDS).state is TaskState.CANCELLED


def test_a_commit_repeats_only_what_the_same_lease_recorded() -> None:
    done = Task(TaskState.DONE, generation=2, secret="s", sha256="a")
    assert leases.repeats_commit(done, 2, "s", "a")
    assert not leases.repeats_commit(done, 1, "s", "a")
    assert not leases.repeats_commit(done, 2, "x", "a")
    assert not leases.repeats_commit(done, 2, "s", "b")
    assert not leases.repeats_commit(LEASED, 2, "s", None)


@pytest.mark.parametrize(
    ("cancelling", "states", "failed", "outcome"),
    [
        (False, {TaskState.DONE}, False, JobState.SUCCEEDED),
        (False, {TaskState.DONE}, True, JobState.FAILED),
        (False, {TaskState.DONE, TaskState.FAILED}, False, JobState.FAILED),
        (False, {TaskState.DONE, TaskState.READY}, False, None),
        (False, {TaskState.FAILED, TaskState.LEASED}, False, None),
        (True, {TaskState.DONE, TaskState.CANCELLED}, False, JobState.CANCELLED),
        (True, {TaskState.DONE}, False, JobState.CANCELLED),
        (True, {TaskState.LEASED}, False, None),
    ],
)
def test_a_job_ends_as_its_tasks_did(
    cancelling: bool, states: set[TaskState], failed: bool, outcome: JobState | None
) -> None:
    assert leases.job_outcome(cancelling, states, failed) is outcome


@given(st.lists(st.sampled_from(["fail", "expire", "release"]), max_size=200))
def test_whatever_happens_a_task_ends_within_its_bounds_and_only_by_them(history: list[str]) -> None:
    task = Task(TaskState.LEASED)
    for event in history:
        if event == "fail":
            after = leases.after_failure(task, True, False, BOUNDS)
        elif event == "expire":
            after = leases.after_expiry(task, False, BOUNDS)
        else:
            after = leases.after_release(task, False)
        spent = after.attempts >= BOUNDS.attempts or after.expiries >= BOUNDS.expiries
        assert (after.state is TaskState.FAILED) == spent
        if spent:
            return
        task = Task(TaskState.LEASED, attempts=after.attempts, expiries=after.expiries)
    assert history.count("fail") < BOUNDS.attempts
    assert history.count("expire") < BOUNDS.expiries
