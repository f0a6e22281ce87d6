"""Bring the database to the newest revision, under a lock, from any working directory."""

from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, text

import migrations
from service.db.engine import Database

_LOCK_KEY = 0x6C61796572746170
"""Advisory lock of the migrations on Postgres: "layertap" in ASCII."""


def config(connection: Connection | None = None) -> Config:
    """Alembic's configuration: the packaged revisions, on `connection`."""
    alembic = Config()
    alembic.set_main_option("script_location", str(Path(migrations.__file__).parent).replace("%", "%%"))
    alembic.attributes["connection"] = connection
    return alembic


def migrate(database: Database) -> None:
    """Apply every revision that is missing.

    On Postgres an advisory lock lets one replica migrate while others wait. On SQLite the process holds the lock on the
    file already, and the transaction begins IMMEDIATE.
    """
    with database.write() as session:
        connection = session.connection()
        if database.postgres:
            connection.execute(text("SET LOCAL lock_timeout = '120s'"))
            connection.execute(text("SET LOCAL statement_timeout = '600s'"))
            connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _LOCK_KEY})
        command.upgrade(config(connection), "head")


def at_head(connection: Connection) -> bool:
    """Whether the database is at the newest revision this package knows."""
    head = ScriptDirectory.from_config(config()).get_current_head()
    return MigrationContext.configure(connection).get_current_revision() == head
