"""Shards and the manifest: what a finished job hands over."""

from typing import Any, Literal

from pydantic import Field

from layertap.schemas.common import Schema, Timestamp
from layertap.schemas.jobs import Final

FORMAT_VERSION = 1


class Shard(Schema):
    """One committed shard file. `index` is its place in the job; file names carry index and generation."""

    object: Literal["shard"] = "shard"
    job: str
    index: int
    generation: int
    file: str
    bytes: int
    sha256: str
    rows: int
    tokens: int
    committed_at: Timestamp


class ManifestShard(Schema):
    """A shard as the manifest lists it."""

    index: int
    file: str
    bytes: int
    sha256: str
    rows: int
    tokens: int


class BoundaryNames(Schema):
    """The same place in the model in the conventions of other code bases; see `layertap.boundaries`.

    A null means that convention has no name for the place.
    """

    boundary: int
    block_output: int | None
    hf_output_hidden_states: int | None
    sglang_layers_to_capture: int | None
    sglang_eagle3_layer_id: int | None
    vllm_aux_hidden_state_layer: int | None


class Pins(Schema):
    """What a job was planned with; a worker that differs is given none of its tasks."""

    model_hash: str
    tokenizer_hash: str
    chat_template_hash: str | None
    engine_version: str
    dtype: str


class Manifest(Schema):
    """`manifest.json`: written last, atomically; `complete` is false for failed and cancelled jobs."""

    format_version: int = FORMAT_VERSION
    job: str
    complete: bool
    dataset: str
    dataset_sha256: str
    model: str
    num_layers: int | None
    hidden_size: int | None
    layers: list[int]
    boundaries: list[BoundaryNames]
    final: Final
    pins: Pins | None
    rows: int
    tokens: int
    row_errors: int
    shards: list[ManifestShard]
    engine: dict[str, Any] = Field(default_factory=dict)
    """What the worker reported of the engine: version, patch, strategy, self-check, server arguments."""
