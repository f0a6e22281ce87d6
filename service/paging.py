"""Pages of lists: how many, after which id."""

from collections.abc import Callable, Sequence
from typing import Annotated, TypeVar

from fastapi import Query

from layertap.schemas.common import Page, T

R = TypeVar("R")

Limit = Annotated[int, Query(ge=1, le=1000, description="At most so many items.")]
After = Annotated[str | None, Query(max_length=512, description="Only items behind the one with this id (`last_id`).")]
AfterNumber = Annotated[
    int | None, Query(ge=-1, le=2**62, description="Only items behind the one with this number (`last_id`).")
]


def page(rows: Sequence[R], limit: int, show: Callable[[R], T], key: Callable[[T], str]) -> Page[T]:
    """A page from `rows`, of which there is one more than `limit` where more follow."""
    data = [show(row) for row in rows[:limit]]
    return Page(
        data=data,
        first_id=key(data[0]) if data else None,
        last_id=key(data[-1]) if data else None,
        has_more=len(rows) > limit,
    )
