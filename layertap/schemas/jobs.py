"""Jobs: which hidden states of which model over which data set, and how far along they are."""

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field

from layertap.schemas.common import Metadata, Schema, Timestamp
from layertap.schemas.figures import Figures

MIB = 1024 * 1024


class JobState(StrEnum):
    """The states of a job; `succeeded`, `failed` and `cancelled` are terminal."""

    QUEUED = "queued"
    PLANNING = "planning"
    RUNNING = "running"
    FINALIZING = "finalizing"
    CANCELLING = "cancelling"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def terminal(self) -> bool:
        """Whether the job will change no more by itself."""
        return self in (JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED)


class Preset(StrEnum):
    """Named choices of boundaries; see `layertap.boundaries`."""

    EAGLE3 = "eagle3"
    SPECULATORS = "speculators"


class Final(StrEnum):
    """Which final hidden state a shard carries besides the boundaries."""

    POST_NORM = "post_norm"
    NONE = "none"


class Overflow(StrEnum):
    """What happens to a row longer than `max_tokens`."""

    TRUNCATE = "truncate"
    SKIP = "skip"
    ERROR = "error"


class LossMask(StrEnum):
    """Which tokens of a conversation are supervised."""

    ASSISTANT = "assistant"
    ALL = "all"


class JobCreate(Schema):
    """Body of `POST /v1/jobs`. Exactly one of `layers` and `preset`.

    `layers` are boundaries: boundary k is the residual stream after the first k blocks (0 the embedding, L the last
    block's output), before any final norm.
    """

    dataset: str
    model: Annotated[str, Field(min_length=1, max_length=4096)]
    layers: Annotated[list[int], Field(min_length=1, max_length=1024)] | None = None
    preset: Preset | None = None
    final: Final = Final.POST_NORM
    max_tokens: Annotated[int, Field(ge=2, le=16_777_216)] | None = None
    overflow: Overflow = Overflow.TRUNCATE
    loss_mask: LossMask = LossMask.ASSISTANT
    shard_bytes: Annotated[int, Field(ge=64 * 1024, le=1024 * 1024 * MIB)] = 1024 * MIB
    metadata: Metadata = {}


class Progress(Schema):
    """How far a job is. Totals are null until the plan is in; tokens count rows that have a place in a shard.

    `tokens_per_second` is the mean since the job began to run. `now` is what its shards in hand report, with pool,
    writer and GPU as the mean over the workers that hold them; null while none is at work.
    """

    rows_total: int | None = None
    rows_done: int = 0
    row_errors: int = 0
    tokens_total: int | None = None
    tokens_done: int = 0
    bytes_total: int | None = None
    shards_total: int | None = None
    shards_done: int = 0
    tokens_per_second: float | None = None
    now: Figures | None = None
    eta_seconds: float | None = None


class JobFailure(Schema):
    """Why a job failed."""

    code: str
    reason: str


class Job(Schema):
    """A job as the service reports it. `layers` is the resolved, ascending list of boundaries."""

    object: Literal["job"] = "job"
    id: str
    state: JobState
    dataset: str
    model: str
    layers: list[int]
    preset: Preset | None
    final: Final
    max_tokens: int | None
    overflow: Overflow
    loss_mask: LossMask
    shard_bytes: int
    metadata: Metadata
    progress: Progress
    failure: JobFailure | None = None
    created_at: Timestamp
    planning_at: Timestamp | None = None
    running_at: Timestamp | None = None
    finalizing_at: Timestamp | None = None
    cancelling_at: Timestamp | None = None
    succeeded_at: Timestamp | None = None
    failed_at: Timestamp | None = None
    cancelled_at: Timestamp | None = None
