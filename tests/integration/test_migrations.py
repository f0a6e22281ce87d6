"""The revisions make exactly the tables that the code uses, from anywhere, and can be taken back."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
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


@pytest.mark.postgres
def test_replicas_that_start_at_once_migrate_once(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    server = request.getfixturevalue("postgres")
    url = server.create()
    replicas = [Database(settings_for(url, tmp_path)) for _ in range(6)]
    barrier = Barrier(len(replicas))

    def start(replica: Database) -> bool:
        barrier.wait(20)
        migrate(replica)
        with replica.read() as session:
            return at_head(session.connection())

    with ThreadPoolExecutor(len(replicas)) as threads:
        assert list(threads.map(start, replicas)) == [True] * len(replicas)
    for replica in replicas:
        replica.close()
    server.drop(url)
