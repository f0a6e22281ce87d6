"""When an engine counts as hung or dead: a pure function of what was observed.

CPU use alone proves nothing, since an idle SGLang scheduler spins at 100 %. What counts is movement: a launch is alive
while its log, its disk reads or its memory move, serving while captured tokens do. A port that takes no connections for
a while ends an engine that came up; GPU load and the age of requests are written down and decide nothing.
"""

from dataclasses import dataclass, field
from enum import StrEnum

from layertap.schemas.incidents import IncidentKind


class Phase(StrEnum):
    """Where an engine is in its life."""

    LAUNCHING = "launching"
    WARMING = "warming"
    SELF_CHECK = "self-check"
    IDLE = "idle"
    SERVING = "serving"


@dataclass(frozen=True)
class Limits:
    """Deadlines in seconds. A 1T model may load for an hour as long as something moves; kernels compile for minutes."""

    launch_quiet: float = 600.0
    launch_total: float = 7200.0
    check_total: float = 900.0
    serving_quiet: float = 300.0
    port_closed: float = 60.0


@dataclass(frozen=True)
class Observation:
    """One look at an engine. Counters only grow, except memory.

    `port_open`: its port takes a connection. `gpu_busy`: per cent that the busiest GPU is in use, None without one.
    `oldest_request_s`: age of the oldest request in flight, None without one.
    """

    server_alive: bool
    group: int
    log_bytes: int = 0
    cpu_seconds: float = 0.0
    read_bytes: int = 0
    memory_bytes: int = 0
    tokens_captured: int = 0
    in_flight: int = 0
    port_open: bool = True
    gpu_busy: int | None = None
    oldest_request_s: float | None = None


_MEMORY_STEP = 16 << 20
"""Bytes by which memory must change to count as movement: a spinning process drifts by less."""


@dataclass
class Trace:
    """What an engine has shown since it entered its phase. Times are monotonic seconds."""

    phase: Phase
    since: float
    seen: Observation | None = None
    moved_at: dict[str, float] = field(default_factory=dict)
    memory_base: int = 0
    closed_since: float | None = None

    def enter(self, phase: Phase, now: float) -> None:
        """A new phase starts with a clean slate."""
        if phase is not self.phase:
            self.phase, self.since, self.moved_at = phase, now, {}

    def record(self, observation: Observation, now: float) -> None:
        """Notes which signals moved since the last look, and since when an engine that came up is without its port."""
        before, self.seen = self.seen, observation
        if observation.port_open or self.phase not in _UP:
            self.closed_since = None
        elif self.closed_since is None:
            self.closed_since = now
        if before is None:
            return
        for name in ("log_bytes", "read_bytes", "tokens_captured", "cpu_seconds"):
            if getattr(observation, name) > getattr(before, name):
                self.moved_at[name] = now
        if abs(observation.memory_bytes - self.memory_base) >= _MEMORY_STEP:
            self.moved_at["memory_bytes"], self.memory_base = now, observation.memory_bytes
        if observation.in_flight and not before.in_flight:
            self.moved_at["tokens_captured"] = now

    def quiet_for(self, names: tuple[str, ...], now: float) -> float:
        """Seconds since any of the signals moved, or since the phase began."""
        return now - max([self.since, *(self.moved_at.get(name, self.since) for name in names)])

    def describe(self, now: float) -> dict[str, str]:
        """The signals in words, for an incident."""
        words = {"phase": self.phase.value, "phase_seconds": f"{now - self.since:.1f}"}
        for name in ("log_bytes", "read_bytes", "memory_bytes", "cpu_seconds", "tokens_captured"):
            moved = self.moved_at.get(name)
            value = getattr(self.seen, name, 0)
            ago = "not in this phase" if moved is None else f"{now - moved:.1f} s ago"
            words[name] = f"{value:g}, last moved {ago}"
        if self.seen is not None:
            words["in_flight"] = str(self.seen.in_flight)
            words["processes"] = str(self.seen.group)
            words["port_open"] = "yes" if self.seen.port_open else "no" + self._closed_for(now)
            words["gpu_busy"] = "unknown" if self.seen.gpu_busy is None else f"{self.seen.gpu_busy} %"
            age = self.seen.oldest_request_s
            words["oldest_request_s"] = "none in flight" if age is None else f"{age:.1f}"
        return words

    def _closed_for(self, now: float) -> str:
        return "" if self.closed_since is None else f", for {now - self.closed_since:.1f} s"


@dataclass(frozen=True)
class Verdict:
    """What the engine is found to be, and why."""

    kind: IncidentKind
    reason: str


_UP = (Phase.IDLE, Phase.SERVING)
_LAUNCH_SIGNALS = ("log_bytes", "read_bytes", "memory_bytes")
_DIED = {
    Phase.LAUNCHING: IncidentKind.DIED_LAUNCHING,
    Phase.WARMING: IncidentKind.DIED_SERVING,
    Phase.SELF_CHECK: IncidentKind.DIED_SERVING,
    Phase.IDLE: IncidentKind.DIED_IDLE,
    Phase.SERVING: IncidentKind.DIED_SERVING,
}


def decide(trace: Trace, limits: Limits, now: float) -> Verdict | None:
    """None while the engine counts as healthy."""
    seen = trace.seen
    if seen is None:
        return None
    if not seen.server_alive:
        return Verdict(_DIED[trace.phase], f"the server process ended while {trace.phase.value}")
    age = now - trace.since
    match trace.phase:
        case Phase.LAUNCHING:
            quiet = trace.quiet_for(_LAUNCH_SIGNALS, now)
            if quiet > limits.launch_quiet:
                return Verdict(
                    IncidentKind.HUNG_LAUNCHING,
                    f"no port, and neither log nor disk reads nor memory moved for {quiet:.0f} s",
                )
            if age > limits.launch_total:
                return Verdict(IncidentKind.HUNG_LAUNCHING, f"not serving after {age:.0f} s")
        case Phase.WARMING:
            if age > limits.check_total:
                reason = f"the first forwards, which compile kernels, did not end within {age:.0f} s"
                return Verdict(IncidentKind.HUNG_SERVING, reason)
        case Phase.SELF_CHECK:
            if age > limits.check_total:
                return Verdict(IncidentKind.HUNG_SERVING, f"the self-check did not end within {age:.0f} s")
        case Phase.SERVING:
            quiet = trace.quiet_for(("tokens_captured",), now)
            if quiet > limits.serving_quiet:
                return Verdict(
                    IncidentKind.HUNG_SERVING,
                    f"{seen.in_flight} tokens in flight, none captured for {quiet:.0f} s",
                )
        case Phase.IDLE:
            pass
    if trace.closed_since is not None and (closed := now - trace.closed_since) > limits.port_closed:
        return Verdict(IncidentKind.HUNG_SERVING, f"its port has taken no connection for {closed:.0f} s")
    return None
