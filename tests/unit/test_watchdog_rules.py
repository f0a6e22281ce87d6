"""The watchdog's judgement, case by case."""

from dataclasses import replace

import pytest

from layertap.schemas.incidents import Blame, IncidentKind
from worker.watchdog.attribution import Attempt, Settled, Try, Way, next_step, ways
from worker.watchdog.rules import Limits, Observation, Phase, Trace, decide

LIMITS = Limits(launch_quiet=100, launch_total=1000, check_total=200, serving_quiet=50, port_closed=30)
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
        (Phase.WARMING, IncidentKind.DIED_SERVING),
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


@pytest.mark.parametrize(("phase", "words"), [(Phase.WARMING, "compile kernels"), (Phase.SELF_CHECK, "the self-check")])
def test_warming_up_and_the_self_check_have_a_deadline_each(phase: Phase, words: str) -> None:
    trace = _trace(phase, (0, START), (1, replace(START, tokens_captured=3)))
    assert _kind(trace, 199) is None
    verdict = decide(trace, LIMITS, 201)
    assert verdict is not None
    assert verdict.kind is IncidentKind.HUNG_SERVING
    assert words in verdict.reason


def test_the_self_check_is_given_its_full_time_however_long_warming_up_took() -> None:
    trace = _trace(Phase.WARMING, (0, START))
    trace.enter(Phase.SELF_CHECK, 190)
    trace.record(START, 191)
    assert _kind(trace, 389) is None
    assert _kind(trace, 391) is IncidentKind.HUNG_SERVING


CLOSED = replace(START, port_open=False)


@pytest.mark.parametrize(
    ("phase", "sick"),
    [
        (Phase.LAUNCHING, False),
        (Phase.WARMING, False),
        (Phase.SELF_CHECK, False),
        (Phase.IDLE, True),
        (Phase.SERVING, True),
    ],
)
def test_a_closed_port_ends_only_an_engine_that_came_up_and_only_after_a_while(phase: Phase, sick: bool) -> None:
    trace = _trace(phase, (0, START), (10, CLOSED), (39, CLOSED))
    assert _kind(trace, 39) is None
    verdict = decide(trace, LIMITS, 41)
    assert (verdict is not None) is sick
    if verdict is not None:
        assert verdict.kind is IncidentKind.HUNG_SERVING
        assert verdict.reason == "its port has taken no connection for 31 s"


def test_a_port_that_opens_again_is_forgiven() -> None:
    trace = _trace(Phase.IDLE, (0, START), (10, CLOSED), (39, START), (40, CLOSED))
    assert _kind(trace, 69) is None
    assert _kind(trace, 71) is IncidentKind.HUNG_SERVING


def test_a_closed_port_is_not_forgiven_because_work_comes_or_goes() -> None:
    trace = _trace(Phase.IDLE, (0, START), (10, CLOSED))
    for now, phase in ((20, Phase.SERVING), (30, Phase.IDLE)):
        trace.enter(phase, now)
        trace.record(CLOSED, now)
    assert _kind(trace, 41) is IncidentKind.HUNG_SERVING


def test_a_port_that_was_closed_while_it_launched_does_not_count() -> None:
    trace = _trace(Phase.LAUNCHING, (0, CLOSED), (90, CLOSED))
    trace.enter(Phase.IDLE, 95)
    assert _kind(trace, 95) is None
    trace.record(CLOSED, 96)
    assert _kind(trace, 125) is None
    assert _kind(trace, 127) is IncidentKind.HUNG_SERVING


@pytest.mark.parametrize("phase", list(Phase))
def test_load_and_the_age_of_requests_decide_nothing(phase: Phase) -> None:
    noisy = replace(START, gpu_busy=100, oldest_request_s=1e6)
    assert _kind(_trace(phase, (0, START), (1, noisy)), 40) is None


def test_an_incident_is_told_every_signal() -> None:
    busy = replace(START, in_flight=100, gpu_busy=97, oldest_request_s=12.34)
    trace = _trace(Phase.SERVING, (0, busy), (7, replace(busy, tokens_captured=5)))
    assert trace.describe(10) == {
        "phase": "serving",
        "phase_seconds": "10.0",
        "log_bytes": "10, last moved not in this phase",
        "read_bytes": "5, last moved not in this phase",
        "memory_bytes": "1.07374e+09, last moved 3.0 s ago",
        "cpu_seconds": "1, last moved not in this phase",
        "tokens_captured": "5, last moved 3.0 s ago",
        "in_flight": "100",
        "processes": "3",
        "port_open": "yes",
        "gpu_busy": "97 %",
        "oldest_request_s": "12.3",
    }
    trace.record(CLOSED, 10)
    words = trace.describe(25)
    assert words["port_open"] == "no, for 15.0 s"
    assert words["gpu_busy"] == "unknown"
    assert words["oldest_request_s"] == "none in flight"


GOOD, BAD = True, False
PLUGIN, COLLECT, HOOK_FACTORY, SOURCE = ways(["plugin", "forward_hooks", "source"], ["hooks", "collect"])
TWICE = [(PLUGIN, BAD), (None, GOOD), (PLUGIN, BAD)]


def test_the_other_strategy_is_tried_before_the_other_installers() -> None:
    assert [str(way) for way in (PLUGIN, COLLECT, HOOK_FACTORY, SOURCE)] == [
        "plugin, hooks",
        "plugin, collect",
        "forward_hooks, hooks",
        "source, hooks",
    ]
    assert ways(["source"], ["collect"]) == [Way("source", "collect")]


@pytest.mark.parametrize(
    ("attempts", "step"),
    [
        ([], Try(PLUGIN)),
        ([(PLUGIN, GOOD)], Settled(Blame.NOBODY, serving=True)),
        ([(PLUGIN, BAD)], Try(None)),
        ([(PLUGIN, BAD), (None, BAD)], Settled(Blame.ENVIRONMENT, serving=False)),
        ([(PLUGIN, BAD), (None, GOOD)], Try(PLUGIN)),
        ([(PLUGIN, BAD), (None, GOOD), (PLUGIN, GOOD)], Settled(Blame.NOBODY, serving=True)),
        (TWICE, Try(COLLECT)),
        ([*TWICE, (COLLECT, GOOD)], Settled(Blame.PATCH, serving=True)),
        ([*TWICE, (COLLECT, BAD)], Try(HOOK_FACTORY)),
        ([*TWICE, (COLLECT, BAD), (HOOK_FACTORY, GOOD)], Settled(Blame.PATCH, serving=True)),
        ([*TWICE, (COLLECT, BAD), (HOOK_FACTORY, BAD)], Try(SOURCE)),
        ([*TWICE, (COLLECT, BAD), (HOOK_FACTORY, BAD), (SOURCE, BAD)], Settled(Blame.PATCH, serving=False)),
    ],
)
def test_blame_follows_from_what_was_tried(attempts: list[tuple[Way | None, bool]], step: Try | Settled) -> None:
    made = [Attempt(way, healthy) for way, healthy in attempts]
    assert next_step(made, [PLUGIN, COLLECT, HOOK_FACTORY, SOURCE]) == step


def test_attribution_always_ends() -> None:
    def explore(attempts: list[Attempt]) -> int:
        step = next_step(attempts, [PLUGIN, COLLECT, HOOK_FACTORY, SOURCE])
        if isinstance(step, Settled):
            return len(attempts)
        return max(explore([*attempts, Attempt(step.way, healthy)]) for healthy in (True, False))

    assert explore([]) == 6
