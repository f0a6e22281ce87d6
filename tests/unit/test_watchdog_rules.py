"""The watchdog's judgement, case by case."""

from dataclasses import replace

import pytest

from layertap.schemas.incidents import Blame, IncidentKind
from worker.watchdog.attribution import Attempt, Settled, Try, next_step
from worker.watchdog.rules import Limits, Observation, Phase, Trace, decide

LIMITS = Limits(launch_quiet=100, launch_total=1000, check_total=200, serving_quiet=50)
START = Observation(server_alive=True, group=3, log_bytes=10, cpu_seconds=1, read_bytes=5, memory_bytes=1 << 30)


def _trace(phase: Phase, *looks: tuple[float, Observation]) -> Trace:
    trace = Trace(phase, 0.0)
    for now, observation in looks:
        trace.record(observation, now)
    return trace


def _kind(trace: Trace, now: float) -> IncidentKind | None:
    verdict = decide(trace, LIMITS, now)
    return None if verdict is None else verdict.kind


@pytest.mark.parametrize(
    ("moves", "healthy"),
    [
        ({"log_bytes": 11}, True),
        ({"read_bytes": 6}, True),
        ({"memory_bytes": (1 << 30) + (64 << 20)}, True),
        ({"memory_bytes": (1 << 30) + 4096}, False),
        ({"cpu_seconds": 500.0}, False),
        ({}, False),
    ],
)
def test_a_launch_lives_by_log_reads_and_memory_and_never_by_cpu(moves: dict[str, float], healthy: bool) -> None:
    trace = _trace(Phase.LAUNCHING, (0, START), (1, START), (80, replace(START, **moves)))
    assert _kind(trace, 99) is None
    assert (_kind(trace, 120) is None) is healthy


def test_memory_that_creeps_counts_once_it_has_gone_far_enough() -> None:
    trace = _trace(Phase.LAUNCHING, (0, START))
    for second in range(1, 90):
        trace.record(replace(START, memory_bytes=(1 << 30) + second * (1 << 20)), float(second))
    assert _kind(trace, 120) is None


def test_a_launch_has_an_end_however_lively() -> None:
    trace = _trace(Phase.LAUNCHING, (0, START), (999, replace(START, log_bytes=99)))
    assert _kind(trace, 999.5) is None
    assert _kind(trace, 1001) is IncidentKind.HUNG_LAUNCHING


@pytest.mark.parametrize(
    ("phase", "kind"),
    [
        (Phase.LAUNCHING, IncidentKind.DIED_LAUNCHING),
        (Phase.SELF_CHECK, IncidentKind.DIED_SERVING),
        (Phase.IDLE, IncidentKind.DIED_IDLE),
        (Phase.SERVING, IncidentKind.DIED_SERVING),
    ],
)
def test_a_server_that_has_ended_is_dead_at_once(phase: Phase, kind: IncidentKind) -> None:
    trace = _trace(phase, (0, START), (1, replace(START, server_alive=False)))
    assert _kind(trace, 1) is kind


def test_an_idle_engine_may_spin_for_ever() -> None:
    trace = _trace(Phase.IDLE, (0, START), (9000, replace(START, cpu_seconds=9000.0)))
    assert _kind(trace, 9001) is None


def test_serving_lives_by_captured_tokens_alone() -> None:
    busy = replace(START, in_flight=100, tokens_captured=7)
    trace = _trace(Phase.SERVING, (0, busy), (40, replace(busy, tokens_captured=8)))
    trace.record(replace(busy, tokens_captured=8, log_bytes=999, cpu_seconds=99.0, read_bytes=99), 80)
    assert _kind(trace, 89) is None
    assert _kind(trace, 91) is IncidentKind.HUNG_SERVING


def test_a_new_phase_starts_with_a_clean_slate() -> None:
    trace = _trace(Phase.IDLE, (0, START))
    trace.record(replace(START, in_flight=5), 5000)
    trace.enter(Phase.SERVING, 5000)
    assert _kind(trace, 5049) is None
    assert _kind(trace, 5051) is IncidentKind.HUNG_SERVING


def test_the_self_check_has_a_deadline() -> None:
    trace = _trace(Phase.SELF_CHECK, (0, START), (1, replace(START, tokens_captured=3)))
    assert _kind(trace, 199) is None
    assert _kind(trace, 201) is IncidentKind.HUNG_SERVING


GOOD, BAD = True, False


@pytest.mark.parametrize(
    ("attempts", "step"),
    [
        ([], Try("plugin")),
        ([("plugin", GOOD)], Settled(Blame.NOBODY, serving=True)),
        ([("plugin", BAD)], Try(None)),
        ([("plugin", BAD), (None, BAD)], Settled(Blame.ENVIRONMENT, serving=False)),
        ([("plugin", BAD), (None, GOOD)], Try("plugin")),
        ([("plugin", BAD), (None, GOOD), ("plugin", GOOD)], Settled(Blame.NOBODY, serving=True)),
        ([("plugin", BAD), (None, GOOD), ("plugin", BAD)], Try("forward_hooks")),
        (
            [("plugin", BAD), (None, GOOD), ("plugin", BAD), ("forward_hooks", GOOD)],
            Settled(Blame.PATCH, serving=True),
        ),
        ([("plugin", BAD), (None, GOOD), ("plugin", BAD), ("forward_hooks", BAD)], Try("source")),
        (
            [("plugin", BAD), (None, GOOD), ("plugin", BAD), ("forward_hooks", BAD), ("source", BAD)],
            Settled(Blame.PATCH, serving=False),
        ),
    ],
)
def test_blame_follows_from_what_was_tried(attempts: list[tuple[str | None, bool]], step: Try | Settled) -> None:
    made = [Attempt(installer, healthy) for installer, healthy in attempts]
    assert next_step(made, ["plugin", "forward_hooks", "source"]) == step


def test_attribution_always_ends() -> None:
    def explore(attempts: list[Attempt]) -> int:
        step = next_step(attempts, ["plugin", "forward_hooks", "source"])
        if isinstance(step, Settled):
            return len(attempts)
        return max(explore([*attempts, Attempt(step.installer, healthy)]) for healthy in (True, False))

    assert explore([]) == 5
