"""What the worker and its plan process say to each other: one JSON request on standard input, JSON lines back.

Lines are progress and row errors, then exactly one result or error. A process that ends without either has crashed.
"""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from layertap.schemas.common import Schema
from layertap.schemas.jobs import Final
from layertap.schemas.tasks import PlannedShard, PlanSpec, TaskRowProblem
from layertap.schemas.workers import ModelFacts

MAX_LINE = 64 * 1024 * 1024
"""Longest line: a plan of several hundred thousand shards, or 1,000 row errors with reasons of 2,000 characters."""


class PlanRequest(Schema):
    """What to plan. The storage-relative paths of `spec` count from `storage`."""

    storage: Path
    spec: PlanSpec
    layers: list[int]
    final: Final
    model: ModelFacts


class PlanProgressLine(Schema):
    """Sent every half second while lines are looked at; `phase` is `loading` before the first.

    Loading the tokenizer, which the first row that needs it does, may delay the next line, and so may a single row of
    many megabytes, which the tokenizer takes in one bite.
    """

    kind: Literal["progress"] = "progress"
    phase: Literal["loading", "planning"]
    lines: int = 0
    rows: int = 0
    tokens: int = 0
    row_errors: int = 0


class RowErrorsLine(Schema):
    """Row errors in order of their lines, at most as many as one report to the service may carry."""

    kind: Literal["row_errors"] = "row_errors"
    errors: list[TaskRowProblem]


class PlanResultLine(Schema):
    """The plan is made and its rows are on disk."""

    kind: Literal["result"] = "result"
    shards: list[PlannedShard]
    rows: int
    tokens: int
    row_errors: int


class PlanErrorLine(Schema):
    """No plan was made. `retryable` is false where another try would end the same."""

    kind: Literal["error"] = "error"
    code: str
    reason: str
    retryable: bool


PlanLine = Annotated[PlanProgressLine | RowErrorsLine | PlanResultLine | PlanErrorLine, Field(discriminator="kind")]
PLAN_LINE: TypeAdapter[PlanLine] = TypeAdapter(PlanLine)
