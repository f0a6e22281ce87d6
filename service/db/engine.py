"""Connections: how each database is opened, and the two kinds of transaction, `read` and `write`.

SQLite is opened once and shared: releases before 3.51.3 can corrupt the file when a write meets a checkpoint of another
connection. Its write transactions begin IMMEDIATE, so that none fails half-way for the lock.
"""

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from sqlalchemy import URL, Connection, Engine, create_engine, event, make_url
from sqlalchemy.orm import Session

from service.db.clock import Clock, DatabaseClock, ProcessClock
from service.settings import Settings
from service.storage import try_lock

_BEGIN = "layertap_begin"
_POSTGRES_SESSION = (
    "-c idle_in_transaction_session_timeout=30000 -c lock_timeout=10000 -c statement_timeout=60000 -c timezone=UTC"
)


class DatabaseInUseError(RuntimeError):
    """Another service process has this SQLite file open."""


class UnsupportedDatabaseError(ValueError):
    """The URL names neither an SQLite file nor a Postgres database."""


class Database:
    """An open database and its clock. `close` frees both the connections and, for SQLite, the lock on the file."""

    def __init__(self, settings: Settings, clock: Clock | None = None) -> None:
        """Raises `UnsupportedDatabaseError`, or `DatabaseInUseError` where another process has the SQLite file."""
        url = _driver_url(settings.database_url)
        self.postgres = url.get_backend_name() == "postgresql"
        self._lock: BinaryIO | None = None
        if self.postgres:
            self.engine = _postgres(url, settings)
        else:
            self._lock = _lock_file(url)
            self.engine = _sqlite(url, settings)
        self.clock: Clock = clock or (DatabaseClock() if self.postgres else ProcessClock())
        self._writer = self.engine.execution_options(**{_BEGIN: "BEGIN IMMEDIATE"})

    @contextmanager
    def read(self) -> Iterator[Session]:
        """A session that only reads."""
        with Session(self.engine, expire_on_commit=False, autoflush=False) as session:
            yield session

    @contextmanager
    def write(self) -> Iterator[Session]:
        """A session whose transaction is committed at the end, or rolled back on an error."""
        with Session(self._writer, expire_on_commit=False) as session, session.begin():
            yield session

    def close(self) -> None:
        """Close every connection and free the lock."""
        self.engine.dispose()
        if self._lock is not None:
            self._lock.close()


def _driver_url(text: str) -> URL:
    url = make_url(text)
    if url.drivername in ("postgresql", "postgres"):
        return url.set(drivername="postgresql+psycopg")
    if url.get_backend_name() == "sqlite" and url.database and url.database != ":memory:":
        return url
    if url.drivername == "postgresql+psycopg":
        return url
    raise UnsupportedDatabaseError(
        f"database URL {url.render_as_string()} is neither sqlite:///FILE nor postgresql://HOST/NAME"
    )


def _lock_file(url: URL) -> BinaryIO:
    path = Path(f"{url.database}.lock")
    path.parent.mkdir(parents=True, exist_ok=True)
    file = path.open("ab")
    if not try_lock(file):
        file.close()
        raise DatabaseInUseError(
            f"another service has {url.database} open; stop it, or use Postgres to run more than one service"
        )
    return file


def _sqlite(url: URL, settings: Settings) -> Engine:
    engine = create_engine(
        url,
        pool_size=1,
        max_overflow=0,
        pool_timeout=settings.database_wait_seconds,
        connect_args={"check_same_thread": False, "timeout": settings.database_wait_seconds},
    )

    @event.listens_for(engine, "connect")
    def _open(connection: sqlite3.Connection, record: Any) -> None:
        # The driver's own implicit BEGIN is off: `_begin` decides which kind of transaction starts.
        connection.isolation_level = None
        for pragma in ("journal_mode=WAL", "foreign_keys=ON", "synchronous=FULL"):
            connection.execute(f"PRAGMA {pragma}")

    @event.listens_for(engine, "begin")
    def _begin(connection: Connection) -> None:
        connection.exec_driver_sql(connection.get_execution_options().get(_BEGIN, "BEGIN"))

    return engine


def _postgres(url: URL, settings: Settings) -> Engine:
    return create_engine(
        url,
        pool_size=settings.database_connections,
        max_overflow=0,
        pool_timeout=settings.database_wait_seconds,
        pool_pre_ping=True,
        isolation_level="READ COMMITTED",
        connect_args={
            "options": _POSTGRES_SESSION,
            "connect_timeout": 10,
            "keepalives": 1,
            "keepalives_idle": 30,
            "keepalives_interval": 10,
            "keepalives_count": 3,
        },
    )
