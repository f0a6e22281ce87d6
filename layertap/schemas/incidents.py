"""Incidents: what went wrong with an engine, the evidence kept before it was killed, and what was found out since.

A worker reports an incident once it is over with: evidence gathered, processes gone, patch taken out, blame found.
"""

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field

from layertap.schemas.common import Schema, Timestamp

MAX_EVIDENCE_BYTES = 1 << 20


class IncidentKind(StrEnum):
    """What the engine did."""

    DIED_LAUNCHING = "died_launching"
    HUNG_LAUNCHING = "hung_launching"
    UNPATCHED = "unpatched"
    FAILED_CHECK = "failed_check"
    DIED_SERVING = "died_serving"
    HUNG_SERVING = "hung_serving"
    DIED_IDLE = "died_idle"
    OUT_OF_MEMORY = "out_of_memory"


class Blame(StrEnum):
    """Whose fault it was, as far as an unpatched start of the same engine could tell."""

    PATCH = "patch"
    ENVIRONMENT = "environment"
    ROW = "row"
    NOBODY = "nobody"
    UNKNOWN = "unknown"


class ProcessEvidence(Schema):
    """One process of the engine as it was found: `stack` by py-spy, or why there is none."""

    pid: int
    command: str
    state: str
    threads: int
    rss_bytes: int
    cpu_seconds: float
    wait_channel: str
    stack: str


class Evidence(Schema):
    """What was gathered before the kill, secrets removed, capped in size."""

    log_tail: str = ""
    processes: list[ProcessEvidence] = []
    gpu: list[str] = []
    signals: dict[str, str] = {}
    engine: dict[str, str] = {}


class IncidentReport(Schema):
    """Body of `POST /v1/incidents`. `id` is made by the worker, so that a repeated report counts once."""

    id: Annotated[str, Field(pattern=r"^inc_[A-Za-z0-9]{8,60}$")]
    worker: str
    model: str
    tasks: list[str] = []
    kind: IncidentKind
    phase: str
    reason: Annotated[str, Field(max_length=4000)]
    blame: Blame = Blame.UNKNOWN
    tried: list[Annotated[str, Field(max_length=1000)]] = []
    processes_left: int = 0
    gpu_bytes_left: int | None = None
    evidence: Evidence = Evidence()
    happened_at: Timestamp


class Incident(IncidentReport):
    """An incident as the service lists it; `jobs` are those whose tasks it hit."""

    object: Literal["incident"] = "incident"
    jobs: list[str] = []
    reported_at: Timestamp
