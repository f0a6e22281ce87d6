"""Workers and the models they know: registration is how the service learns what it can offer."""

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field

from layertap.schemas.common import Schema, Timestamp
from layertap.schemas.figures import WorkerFigures
from layertap.schemas.shards import Pins


class ModelFacts(Schema):
    """What a worker knows of one model before loading it.

    `name` is how jobs may call it, `path` where it lies for the worker. L = `num_layers` blocks, H = `hidden_size`.
    `max_row_tokens` is the longest row the engine accepts.
    """

    name: str
    path: str
    num_layers: Annotated[int, Field(ge=1)]
    hidden_size: Annotated[int, Field(ge=1)]
    vocab_size: Annotated[int, Field(ge=1)]
    max_row_tokens: Annotated[int, Field(ge=1)]
    pins: Pins


class WorkerRegister(Schema):
    """Body of `POST /v1/workers`.

    `storage_nonce` is what the worker read from the file `.layertap-storage` at the root of its storage; the service
    compares it with its own, so that both are known to see the same storage.
    """

    id: Annotated[str, Field(min_length=8, max_length=64, pattern=r"^wrk_[A-Za-z0-9]+$")]
    host: str
    version: str
    storage_nonce: str
    models: list[ModelFacts]


class WorkerState(StrEnum):
    """`lost` means that it has not been heard of for longer than a lease."""

    ACTIVE = "active"
    DRAINING = "draining"
    GONE = "gone"
    LOST = "lost"

    @property
    def present(self) -> bool:
        """Whether it is there, as far as is known."""
        return self in (WorkerState.ACTIVE, WorkerState.DRAINING)


class Worker(Schema):
    """A worker as the service knows it; `figures` are the latest it reported, null unless it is present."""

    object: Literal["worker"] = "worker"
    id: str
    host: str
    version: str
    state: WorkerState
    models: list[str]
    loaded_model: str | None
    status: str | None
    figures: WorkerFigures | None = None
    registered_at: Timestamp
    seen_at: Timestamp


class Model(Schema):
    """A model that jobs may name."""

    object: Literal["model"] = "model"
    name: str
    path: str
    num_layers: int
    hidden_size: int
    max_row_tokens: int
