"""Uploads and data sets: what is checked, what is kept, and that nothing half-done is left behind."""

import hashlib
import socket
from collections.abc import Callable
from pathlib import Path

import httpx
import psutil
import pytest
from fixtures_service import ROWS, Process, Rig, wait_until

from service.datasets import upload as upload_module
from service.datasets.upload import Upload
from service.ids import new_id


def test_an_upload_is_kept_as_it_came_and_its_bad_lines_are_listed(rig: Rig) -> None:
    dataset = rig.upload()
    assert (dataset["rows"], dataset["bad_rows"], dataset["bytes"]) == (3, 1, len(ROWS))
    assert dataset["sha256"] == hashlib.sha256(ROWS).hexdigest()
    assert (rig.storage / "datasets" / dataset["id"] / "rows.jsonl").read_bytes() == ROWS
    errors = rig.client.get(f"/v1/datasets/{dataset['id']}/errors").json()
    assert [(e["row_id"], e["line"], e["stage"], e["code"]) for e in errors["data"]] == [
        (2, 3, "upload", "invalid_json")
    ]
    assert rig.client.get(f"/v1/datasets/{dataset['id']}").json() == dataset
    assert list((rig.storage / "uploads").iterdir()) == []


def test_created_data_sets_say_where_they_are(rig: Rig) -> None:
    answer = rig.client.post("/v1/datasets", content=ROWS)
    assert answer.headers["location"] == f"/v1/datasets/{answer.json()['id']}"


def test_an_upload_without_a_good_line_is_refused_and_leaves_nothing(sqlite_rig: Rig) -> None:
    for content in (b"", b"\n\n", b"nope\n\n{}\n"):
        answer = sqlite_rig.client.post("/v1/datasets", content=content)
        assert (answer.status_code, answer.json()["code"]) == (422, "empty_dataset")
    assert [error["field"] for error in answer.json()["errors"]] == ["line 1", "line 3"]
    assert all(error["remedy"] for error in answer.json()["errors"])
    assert sqlite_rig.client.get("/v1/datasets").json()["data"] == []
    assert list((sqlite_rig.storage / "datasets").iterdir()) == []
    assert list((sqlite_rig.storage / "uploads").iterdir()) == []


def test_a_compressed_upload_is_refused_with_the_remedy(sqlite_rig: Rig) -> None:
    answer = sqlite_rig.client.post("/v1/datasets", content=b"x", headers={"Content-Encoding": "gzip"})
    assert (answer.status_code, answer.json()["code"]) == (415, "unsupported_content_encoding")


def test_lines_come_out_the_same_however_the_body_is_cut(sqlite_rig: Rig) -> None:
    def judged(size: int) -> tuple[int, list[tuple[int, str, str]], str]:
        with Upload(sqlite_rig.context.storage, new_id("ds")) as upload:
            for start in range(0, len(ROWS), size):
                upload.feed(ROWS[start : start + size])
            upload.finish()
            return upload.rows, list(upload.errors()), upload.sha256

    assert {str(judged(size)) for size in (1, 2, 7, 1000)} == {str(judged(13))}


def test_a_line_that_is_too_long_is_a_bad_line_and_is_not_held(
    sqlite_rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upload_module, "MAX_LINE_BYTES", 100)
    dataset = sqlite_rig.upload(b'{"text": "' + b"x" * 5000 + b'"}\n{"text": "short"}\n')
    errors = sqlite_rig.client.get(f"/v1/datasets/{dataset['id']}/errors").json()["data"]
    assert [(error["line"], error["code"]) for error in errors] == [(1, "line_too_long")]
    assert dataset["rows"] == 1


def test_bad_lines_beyond_the_bound_are_counted_but_not_stored(
    sqlite_rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upload_module, "MAX_STORED_ERRORS", 3)
    dataset = sqlite_rig.upload(b"bad\n" * 10 + b'{"text": "x"}')
    assert dataset["bad_rows"] == 10
    assert len(sqlite_rig.client.get(f"/v1/datasets/{dataset['id']}/errors").json()["data"]) == 3


def test_data_sets_are_listed_newest_first_in_pages(rig: Rig) -> None:
    ids = [rig.upload()["id"] for _ in range(3)]
    page = rig.client.get("/v1/datasets", params={"limit": 2}).json()
    assert ([row["id"] for row in page["data"]], page["has_more"]) == ([ids[2], ids[1]], True)
    page = rig.client.get("/v1/datasets", params={"limit": 2, "after": page["last_id"]}).json()
    assert ([row["id"] for row in page["data"]], page["has_more"]) == ([ids[0]], False)


def test_a_data_set_is_not_deleted_under_a_job_that_reads_it(rig: Rig) -> None:
    rig.register()
    dataset = rig.upload()["id"]
    job = rig.job(dataset=dataset)
    assert rig.client.delete(f"/v1/datasets/{dataset}").json()["code"] == "dataset_in_use"
    rig.client.post(f"/v1/jobs/{job}/cancel")
    rig.upkeep()
    assert rig.client.delete(f"/v1/datasets/{dataset}").status_code == 204
    assert rig.client.get(f"/v1/datasets/{dataset}").status_code == 404
    assert not (rig.storage / "datasets" / dataset).exists()
    assert rig.client.post(f"/v1/jobs/{job}/retry").json()["code"] == "dataset_deleted"


def test_an_upload_that_breaks_off_leaves_nothing(tmp_path: Path, start_service: Callable[..., Process]) -> None:
    service = start_service(f"sqlite:///{tmp_path}/layertap.sqlite3")
    uploads = service.storage / "uploads"
    with socket.create_connection(("127.0.0.1", int(service.url.rsplit(":", 1)[1])), 10) as connection:
        head = "POST /v1/datasets HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000\r\n\r\n"
        connection.sendall(head.encode() + b'{"text": "x"}\n')
        wait_until(lambda: list(uploads.glob("*.part")))
    wait_until(lambda: not list(uploads.iterdir()))
    assert httpx.get(f"{service.url}/v1/datasets").json()["data"] == []


def test_a_200_mb_upload_grows_the_service_by_less_than_100_mb(
    tmp_path: Path, start_service: Callable[..., Process]
) -> None:
    service = start_service(f"sqlite:///{tmp_path}/layertap.sqlite3")
    process = psutil.Process(service.process.pid)
    httpx.post(f"{service.url}/v1/datasets", content=ROWS).raise_for_status()
    before = process.memory_info().rss
    line = b'{"text": "' + b"word " * 2000 + b'"}\n'
    block = line * 100
    count = 200_000_000 // len(block) + 1
    peak = before

    def body() -> object:
        nonlocal peak
        for _ in range(count):
            yield block
            peak = max(peak, process.memory_info().rss)

    answer = httpx.post(f"{service.url}/v1/datasets", content=body(), timeout=120)  # type: ignore[arg-type]
    assert answer.status_code == 201, answer.text
    assert answer.json()["bytes"] >= 200_000_000
    peak = max(peak, process.memory_info().rss)
    assert peak - before < 100_000_000, f"grew by {(peak - before) / 1e6:.0f} MB"
