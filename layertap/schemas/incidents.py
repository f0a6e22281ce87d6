"""Incidents: what went wrong with an engine, the evidence kept before it was killed, and what was found out since.

A worker reports an incident once it is over with: evidence gathered, processes gone, patch taken out, blame found.
"""

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field

from layertap.schemas.common import Schema, Timestamp

MAX_EVIDENCE_BYTES = 1 << 20
"""Evidence as JSON in UTF-8: what the service keeps of one incident. It cuts what is longer."""
MAX_REPORT_BYTES = 4 << 20
"""Longest body of a report that the service reads."""


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
    NOT_CLEANED_UP = "not_cleaned_up"


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
    cpu_seconds: Annotated[float, Field(allow_inf_nan=False)]
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
    worker: Annotated[str, Field(max_length=64)]
    model: Annotated[str, Field(max_length=512)]
    tasks: Annotated[list[Annotated[str, Field(max_length=64)]], Field(max_length=1000)] = []
    kind: IncidentKind
    phase: Annotated[str, Field(max_length=200)]
    reason: Annotated[str, Field(max_length=4000)]
    blame: Blame = Blame.UNKNOWN
    tried: Annotated[list[Annotated[str, Field(max_length=1000)]], Field(max_length=1000)] = []
    processes_left: Annotated[int, Field(ge=0, le=2**31)] = 0
    gpu_bytes_left: Annotated[int | None, Field(ge=-(2**62), le=2**62)] = None
    evidence: Evidence = Evidence()
    happened_at: Timestamp


class Incident(IncidentReport):
    """An incident as the service knows it; `jobs` are those whose tasks it hit, also where they are deleted since.

    `evidence` is whole where one incident is asked for, and empty in lists and in the answer to a report.
    """

    object: Literal["incident"] = "incident"
    jobs: list[str] = []
    reported_at: Timestamp
