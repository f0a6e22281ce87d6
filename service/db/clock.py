"""The clock that lease deadlines are on, as an SQL expression in seconds.

Postgres: the database's clock, so every replica agrees. SQLite: the service process's monotonic clock, which no jump of
the wall clock moves; it starts anew with the process, so a start grants running leases a full term.
"""

import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Protocol

from sqlalchemy import ColumnElement, Double, literal, literal_column


class Clock(Protocol):
    """Where deadlines come from. `restarts` says that a new process makes old deadlines meaningless."""

    restarts: bool

    def now(self) -> ColumnElement[float]:
        """The present as an SQL expression."""
        ...


class DatabaseClock:
    """Postgres' own clock. In a sub-select, since the bare volatile call keeps an index from being used."""

    restarts = False

    def now(self) -> ColumnElement[float]:
        """Seconds since the epoch, by the database."""
        return literal_column("(SELECT CAST(extract(epoch from clock_timestamp()) AS float8))", Double())


class ProcessClock:
    """The monotonic clock of this process, or any other that `seconds` reads."""

    restarts = True

    def __init__(self, seconds: Callable[[], float] = time.monotonic) -> None:
        self._seconds = seconds

    def now(self) -> ColumnElement[float]:
        """The present reading, as a bound value."""
        return literal(self._seconds(), Double())


def utc_now() -> datetime:
    """Wall-clock time in UTC, for people only."""
    return datetime.now(UTC)
