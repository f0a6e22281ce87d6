"""What a start removes from the storage: the rest of a cut-off upload or deletion, and never what it does not know."""

import logging
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from fixtures_service import ROWS, Rig, open_rig, settings_for

from service.app import open_context
from service.datasets.upload import Upload
from service.leftovers import clear_leftovers
from service.settings import Settings
from service.storage import DELETING, UPLOADING

CUT_OFF = """
import os, shutil, signal, sys
from pathlib import Path
from service.app import open_context
from service.datasets import repository as datasets, service as dataset_service
from service.datasets.upload import Upload
from service.jobs import repository as jobs, service as job_service
from service.settings import Settings
from service.storage import Storage

def die(*given, **named):
    os.kill(os.getpid(), signal.SIGKILL)

def then_die(owner, name):
    step = getattr(owner, name)
    def last(*given, **named):
        step(*given, **named)
        die()
    setattr(owner, name, last)

url, storage, what, where, wanted = sys.argv[1:]
context = open_context(Settings(database_url=url, storage=Path(storage)))
match where:
    case "marked": then_die(Storage, "mark")
    case "rows removed, not committed": then_die(datasets if what == "dataset" else jobs, "remove")
    case "rows gone": Storage.remove_folder = die
    case "half removed": then_die(shutil if what == "job" else Path, "rmtree" if what == "job" else "unlink")
    case "received": Storage.move = die
    case "moved": then_die(Storage, "move")
    case "complete": Upload.published = die
match what:
    case "job": job_service.delete(context, wanted)
    case "dataset": dataset_service.delete(context.database, context.storage, wanted)
    case "upload":
        upload = Upload(context.storage, wanted)
        upload.feed(b'{"text": "one"}\\nbad\\n')
        dataset_service.complete(context.database, upload, "rows")
"""


def settings_of(folder: Path, database: str = "layertap") -> Settings:
    return settings_for(f"sqlite:///{folder}/{database}.sqlite3", folder)


def files_of(storage: Path) -> dict[str, bytes]:
    """Every file below data sets and jobs, with what is in it."""
    return {
        str(path.relative_to(storage)): path.read_bytes()
        for part in ("datasets", "jobs")
        for path in (storage / part).rglob("*")
        if path.is_file()
    }


def finished_job(rig: Rig) -> str:
    rig.register()
    job = rig.planned(2)
    for _ in range(2):
        rig.commit_shard(rig.lease())
    rig.upkeep()
    assert rig.state(job)["state"] == "succeeded"
    return job


def cut_off(settings: Settings, what: str, where: str, wanted: str) -> None:
    """Deletes or uploads in a process that kills itself at a step."""
    words = [settings.database_url, str(settings.storage), what, where, wanted]
    done = subprocess.run([sys.executable, "-c", CUT_OFF, *words], timeout=60, capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr


@pytest.mark.parametrize("database", ["new", "older"])
def test_a_start_on_another_database_leaves_every_byte(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, database: str
) -> None:
    if database == "older":
        with open_rig(settings_of(tmp_path, "older"), None) as rig:
            rig.upload()
    with open_rig(settings_of(tmp_path), None) as rig:
        job = finished_job(rig)
        dataset = rig.state(job)["dataset"]
        before = files_of(rig.storage)
    assert len(before) >= 4
    caplog.clear()
    with open_rig(settings_of(tmp_path, database), None) as rig:
        assert files_of(rig.storage) == before
        assert rig.client.get("/v1/jobs").json()["data"] == []
    (warning,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert f"datasets/{dataset}, jobs/{job}" in warning
    assert "--database-url" in warning
    assert "--storage" in warning
    with open_rig(settings_of(tmp_path), None) as rig:
        assert rig.client.get(f"/v1/jobs/{job}/shards/1/content").status_code == 200


def test_a_start_on_its_own_database_warns_of_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with open_rig(settings_of(tmp_path), None) as rig:
        finished_job(rig)
        before = files_of(rig.storage)
    with open_rig(settings_of(tmp_path), None) as rig:
        assert files_of(rig.storage) == before
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_backup_from_the_middle_of_an_upload_does_not_cost_the_data_set(tmp_path: Path) -> None:
    with open_rig(settings_of(tmp_path), None):
        pass
    cut_off(settings_of(tmp_path), "upload", "received", "ds_one")  # leaves the row of an incomplete data set
    folder = tmp_path / "storage" / "datasets" / "ds_one"
    folder.mkdir(exist_ok=True)
    (folder / UPLOADING).unlink(missing_ok=True)
    (folder / "rows.jsonl").write_bytes(ROWS)  # as it was once the upload had ended, after the backup
    with open_rig(settings_of(tmp_path), None) as rig:
        assert (folder / "rows.jsonl").read_bytes() == ROWS
        assert rig.client.get("/v1/datasets").json()["data"] == []


@pytest.mark.parametrize("where", ["rows gone", "half removed"])
@pytest.mark.parametrize("what", ["job", "dataset"])
def test_a_deletion_that_is_killed_is_completed_by_the_next_start(tmp_path: Path, what: str, where: str) -> None:
    settings = settings_of(tmp_path)
    with open_rig(settings, None) as rig:
        job = finished_job(rig)
        wanted = job if what == "job" else rig.upload()["id"]
        kept = {name for name in files_of(rig.storage) if wanted not in name}
    cut_off(settings, what, where, wanted)
    assert (settings.storage / f"{what}s" / wanted / DELETING).is_file()
    with open_rig(settings, None) as rig:
        assert not (rig.storage / f"{what}s" / wanted).exists()
        assert set(files_of(rig.storage)) == kept


@pytest.mark.parametrize("where", ["marked", "rows removed, not committed"])
@pytest.mark.parametrize("what", ["job", "dataset"])
def test_a_deletion_that_is_killed_before_its_rows_are_gone_never_was(tmp_path: Path, what: str, where: str) -> None:
    settings = settings_of(tmp_path)
    with open_rig(settings, None) as rig:
        job = finished_job(rig)
        wanted = job if what == "job" else rig.upload()["id"]
        before = files_of(rig.storage)
    cut_off(settings, what, where, wanted)
    with open_rig(settings, None) as rig:
        assert files_of(rig.storage) == before
        assert rig.client.get(f"/v1/{what}s/{wanted}").status_code == 200
        assert rig.client.delete(f"/v1/{what}s/{wanted}").status_code == 204
        assert not (rig.storage / f"{what}s" / wanted).exists()


@pytest.mark.parametrize("where", ["received", "marked", "moved"])
def test_an_upload_that_is_killed_is_cleared_by_the_next_start(tmp_path: Path, where: str) -> None:
    settings = settings_of(tmp_path)
    cut_off(settings, "upload", where, "ds_one")
    with open_rig(settings, None) as rig:
        assert list((rig.storage / "datasets").iterdir()) == []
        assert list((rig.storage / "uploads").iterdir()) == []
        assert rig.client.get("/v1/datasets").json()["data"] == []


def test_an_upload_that_is_killed_once_it_is_complete_stays(tmp_path: Path) -> None:
    settings = settings_of(tmp_path)
    cut_off(settings, "upload", "complete", "ds_one")
    with open_rig(settings, None) as rig:
        assert [row["id"] for row in rig.client.get("/v1/datasets").json()["data"]] == ["ds_one"]
        assert list(files_of(rig.storage)) == ["datasets/ds_one/rows.jsonl"]


@pytest.mark.parametrize("published", [False, True])
def test_a_living_upload_is_spared(database_url: str, tmp_path: Path, published: bool) -> None:
    context = open_context(settings_for(database_url, tmp_path))
    try:
        with Upload(context.storage, "ds_living") as upload:
            upload.feed(ROWS)
            upload.finish()
            if published:
                upload.publish()
            before = sorted(path for path in context.storage.root.rglob("*") if path.is_file())
            clear_leftovers(context)
            assert sorted(path for path in context.storage.root.rglob("*") if path.is_file()) == before
    finally:
        context.database.close()


def test_a_deletion_on_a_full_disk_needs_no_marker(sqlite_rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    job = finished_job(sqlite_rig)

    def full(folder: str, marker: str) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(sqlite_rig.context.storage, "mark", full)
    assert sqlite_rig.client.delete(f"/v1/jobs/{job}").status_code == 204
    assert not (sqlite_rig.storage / "jobs" / job).exists()


def test_a_deletion_that_the_database_refuses_leaves_no_marker(
    sqlite_rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = finished_job(sqlite_rig)
    before = files_of(sqlite_rig.storage)

    def broken(session: object, job: str) -> None:
        raise RuntimeError("the disk of the database is gone")

    monkeypatch.setattr("service.jobs.repository.remove", broken)
    assert sqlite_rig.client.delete(f"/v1/jobs/{job}").status_code == 500
    assert files_of(sqlite_rig.storage) == before
