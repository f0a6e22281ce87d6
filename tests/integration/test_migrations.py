"""The revisions make exactly the tables that the code uses, from anywhere, and can be taken back."""

from pathlib import Path
from typing import Any

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from fixtures_service import settings_for
from sqlalchemy import inspect

from service.db.engine import Database
from service.db.migrate import at_head, config, migrate
from service.db.models import Base


def test_the_revisions_make_the_tables_of_the_models(
    database_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    database = Database(settings_for(database_url, tmp_path))
    with database.read() as session:
        assert not at_head(session.connection())
    migrate(database)
    migrate(database)

    def plain(name: str | None, kind: str, parents: Any) -> bool:
        return name != "alembic_version"

    with database.read() as session:
        assert at_head(session.connection())
        context = MigrationContext.configure(session.connection(), opts={"include_name": plain})
        assert compare_metadata(context, Base.metadata) == []
    database.close()


def test_the_revisions_can_be_taken_back(database_url: str, tmp_path: Path) -> None:
    database = Database(settings_for(database_url, tmp_path))
    migrate(database)
    with database.write() as session:
        command.downgrade(config(session.connection()), "base")
    with database.read() as session:
        assert set(inspect(session.connection()).get_table_names()) == {"alembic_version"}
    database.close()
