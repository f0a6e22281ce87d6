"""What every request and response shares: strict models, identifiers, pages of a list, and problem responses.

Unknown fields are refused, so a misspelt setting is an error and never a silent default.
"""

from datetime import datetime
from typing import Annotated, Generic, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field

T = TypeVar("T")

Metadata = Annotated[dict[str, str], Field(max_length=64)]
Timestamp = datetime
"""Wall-clock time in UTC, for people. No rule depends on it."""


class Schema(BaseModel):
    """Base of every message: unknown fields are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


class Page(Schema, Generic[T]):
    """One page of a list, newest or lowest first as the endpoint says; `after=last_id` asks for the next."""

    data: list[T]
    first_id: str | None
    last_id: str | None
    has_more: bool


class FieldError(Schema):
    """One thing wrong with a request: which field, why, and what to do about it."""

    field: str
    reason: str
    remedy: str | None = None


class Problem(BaseModel):
    """RFC 9457 problem details, the only shape of an error response (`application/problem+json`)."""

    model_config = ConfigDict(extra="allow")

    type: str
    title: str
    status: int
    detail: str
    code: str
    instance: str | None = None
    errors: list[FieldError] = []


class Health(Schema):
    """Answer of `/healthz` and `/readyz`."""

    status: Literal["ok", "unavailable"]
    version: str
    checks: dict[str, str] = {}
