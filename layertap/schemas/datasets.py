"""Data sets: an uploaded JSONL file, every line checked on arrival."""

from enum import StrEnum
from typing import Literal

from layertap.schemas.common import Schema, Timestamp


class Dataset(Schema):
    """An uploaded data set. `rows` counts the good lines; `bad_rows` are listed at `/v1/datasets/{id}/errors`."""

    object: Literal["dataset"] = "dataset"
    id: str
    name: str
    bytes: int
    sha256: str
    rows: int
    bad_rows: int
    created_at: Timestamp


class Stage(StrEnum):
    """Where a row was given up."""

    UPLOAD = "upload"
    PLAN = "plan"
    EXTRACT = "extract"


class RowProblem(Schema):
    """A row that will have no hidden states, and why.

    `row_id` is the 0-based line of the data set; `line` is the same line as editors count it (row_id + 1).
    `code` is stable and meant for programs, `reason` is meant for people.
    """

    row_id: int
    line: int
    stage: Stage
    code: str
    reason: str
