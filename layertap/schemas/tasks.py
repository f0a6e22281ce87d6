"""The worker protocol: claim a lease, keep it, and end it by commit, failure or release.

Every message about a held task carries `generation` and `secret`. The service accepts it only while exactly that lease
is held; otherwise it answers 409 `lease_lost`, and the worker drops the task at once.
"""

from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import Field

from layertap.schemas.common import Schema
from layertap.schemas.figures import Rate, WorkerFigures
from layertap.schemas.jobs import Final, LossMask, Overflow
from layertap.schemas.shards import Pins

MAX_ROW_ERRORS_PER_CALL = 1000


class TaskKind(StrEnum):
    """`plan` tokenises a job's data set; `shard` extracts one range of its rows."""

    PLAN = "plan"
    SHARD = "shard"


class ClaimRequest(Schema):
    """Body of `POST /v1/tasks/claim`.

    `request_id` makes the claim repeatable: the same id returns the same lease while that is held. `loaded_model` is
    the name of the model in the engine, null before the first load. A worker asks for the kinds it has room for.
    """

    worker: str
    request_id: Annotated[str, Field(min_length=8, max_length=64)]
    kinds: Annotated[list[TaskKind], Field(min_length=1)]
    loaded_model: str | None = None


class PlanSpec(Schema):
    """What a plan task needs. `dataset_file` and `tokens_dir` are relative to the storage root.

    `tokens_dir` is this generation's own folder: an old generation can never write into it.
    """

    dataset_file: str
    tokens_dir: str
    max_tokens: int | None
    overflow: Overflow
    loss_mask: LossMask
    shard_bytes: int


class ShardSpec(Schema):
    """What a shard task needs: rows `[first_row, first_row + rows)` of the tokenised rows, and where the shard goes.

    `file` is relative to the storage root and names the generation; `tokens` and `bytes` are the plan's figures.
    """

    index: int
    tokens_dir: str
    first_row: int
    rows: int
    tokens: int
    bytes: int
    file: str
    pins: Pins
    dataset_sha256: str


class Lease(Schema):
    """A task held by one worker. `lease_seconds` counts from the moment the claim (or renewal) was sent."""

    task: str
    kind: TaskKind
    job: str
    generation: int
    secret: str
    lease_seconds: float
    model: str
    model_path: str
    layers: list[int]
    final: Final
    plan: PlanSpec | None = None
    shard: ShardSpec | None = None


class ClaimResponse(Schema):
    """Exactly one of: a lease; `load_model`, the model the worker should load before it claims again; or neither."""

    lease: Lease | None = None
    load_model: str | None = None
    retry_after_seconds: float = 1.0


class Held(Schema):
    """The proof that a worker holds a task; base of every message about it."""

    worker: str
    generation: int
    secret: str


class Heartbeat(Held):
    """Body of `POST /v1/tasks/{id}/heartbeat`: renews the lease, says how far the work is and how fast it goes."""

    rows_done: int = 0
    tokens_done: int = 0
    phase: str = ""
    tokens_per_second: Rate | None = None


class HeartbeatResponse(Schema):
    """The renewed lease's length, from the moment the heartbeat was sent."""

    lease_seconds: float


class PlannedShard(Schema):
    """One shard of a plan: `rows` tokenised rows from `first_row` on, `tokens` in all, `bytes` on disk."""

    first_row: int
    rows: Annotated[int, Field(ge=1)]
    tokens: Annotated[int, Field(ge=1)]
    bytes: Annotated[int, Field(ge=1)]


class PlanCommit(Held):
    """Body of `POST /v1/tasks/{id}/commit-plan`. The row errors were posted before, with the same lease."""

    shards: list[PlannedShard]
    rows: int
    tokens: int
    row_errors: int
    pins: Pins


class TaskRowProblem(Schema):
    """A row given up by a worker."""

    row_id: Annotated[int, Field(ge=0)]
    code: Annotated[str, Field(min_length=1, max_length=64)]
    reason: Annotated[str, Field(max_length=2000)]


class RowErrorsReport(Held):
    """Body of `POST /v1/tasks/{id}/row-errors`: may be repeated; counts only once the task commits."""

    errors: Annotated[list[TaskRowProblem], Field(max_length=MAX_ROW_ERRORS_PER_CALL)]


class ShardCommit(Held):
    """Body of `POST /v1/tasks/{id}/commit-shard`. Repeated with the same generation and sha256 it is answered 200.

    A shard all of whose rows failed commits with `rows` 0, `bytes` 0 and no file.
    """

    bytes: Annotated[int, Field(ge=0)]
    sha256: Annotated[str, Field(pattern=r"^([0-9a-f]{64})?$")]
    rows: Annotated[int, Field(ge=0)]
    tokens: Annotated[int, Field(ge=0)]
    row_errors: Annotated[int, Field(ge=0)] = 0
    engine: dict[str, Any] = Field(default_factory=dict)


class TaskFailure(Held):
    """Body of `POST /v1/tasks/{id}/fail`: the task caused it; `retryable` false spends every try at once."""

    code: Annotated[str, Field(min_length=1, max_length=64)]
    reason: Annotated[str, Field(max_length=8000)]
    retryable: bool = True


class Release(Held):
    """Body of `POST /v1/tasks/{id}/release`: hands the task back unharmed; costs no attempt."""

    reason: Annotated[str, Field(max_length=2000)] = ""


class TaskAck(Schema):
    """Answer to commit, row errors, failure and release: the state the task is in now."""

    task: str
    state: str


class HeldTask(Schema):
    """A lease named in a control poll."""

    task: str
    generation: int


class ControlRequest(Schema):
    """Body of `POST /v1/workers/{id}/control`, sent every 2 s or sooner; also tells the service the worker's state."""

    held: list[HeldTask] = []
    loaded_model: str | None = None
    status: str = ""
    draining: bool = False
    figures: WorkerFigures | None = None


class ControlResponse(Schema):
    """`drop` names held tasks that must be dropped at once (cancelled or lost)."""

    drop: list[str] = []
    drain: bool = False
    known: bool = True
    """False when the service does not know this worker (its database is new): register again."""


class Goodbye(Schema):
    """Body of `POST /v1/workers/{id}/goodbye`: the worker ends; leases it still holds are released."""

    reason: Literal["shutdown", "unhealthy"] = "shutdown"
