"""Downloads: whole, by range, conditional, and the manifest."""

import base64
import hashlib
import os

import pytest
from fixtures_service import Rig
from hypothesis import given
from hypothesis import strategies as st

from service.shards import ranges

DATA = os.urandom(3_000_000)
SHA = hashlib.sha256(DATA).hexdigest()
ETAG = f'"{SHA}"'


@pytest.fixture
def content(sqlite_rig: Rig) -> str:
    """The URL of a committed shard."""
    sqlite_rig.register()
    job = sqlite_rig.planned(2)
    sqlite_rig.commit_shard(sqlite_rig.lease(), DATA)
    return f"/v1/jobs/{job}/shards/0/content"


def test_a_shard_is_sent_whole_with_its_digest(sqlite_rig: Rig, content: str) -> None:
    answer = sqlite_rig.client.get(content)
    assert (answer.status_code, answer.content) == (200, DATA)
    assert answer.headers["etag"] == ETAG
    assert answer.headers["accept-ranges"] == "bytes"
    assert answer.headers["content-length"] == str(len(DATA))
    digest = base64.b64encode(hashlib.sha256(DATA).digest()).decode()
    assert answer.headers["repr-digest"] == f"sha-256=:{digest}:"
    head = sqlite_rig.client.head(content)
    assert (head.status_code, head.content) == (200, b"")
    for name in ("etag", "content-length", "repr-digest", "accept-ranges", "content-type"):
        assert head.headers[name] == answer.headers[name]


@pytest.mark.parametrize(
    ("asked", "start", "stop"),
    [
        ("bytes=0-0", 0, 1),
        ("bytes=10-19", 10, 20),
        ("bytes=2999990-", 2_999_990, 3_000_000),
        ("bytes=1500000-9999999", 1_500_000, 3_000_000),
        ("bytes=-5", 2_999_995, 3_000_000),
        ("bytes=-9999999", 0, 3_000_000),
        ("Bytes = 0-1048576", 0, 1_048_577),
    ],
)
def test_a_range_is_sent_as_206(sqlite_rig: Rig, content: str, asked: str, start: int, stop: int) -> None:
    answer = sqlite_rig.client.get(content, headers={"Range": asked})
    assert (answer.status_code, answer.content) == (206, DATA[start:stop])
    assert answer.headers["content-range"] == f"bytes {start}-{stop - 1}/{len(DATA)}"
    assert answer.headers["content-length"] == str(stop - start)
    assert answer.headers["etag"] == ETAG


@pytest.mark.parametrize("asked", ["bytes=3000000-", "bytes=3000000-3000001", "bytes=-0"])
def test_a_range_without_a_byte_is_416(sqlite_rig: Rig, content: str, asked: str) -> None:
    answer = sqlite_rig.client.get(content, headers={"Range": asked})
    assert (answer.status_code, answer.json()["code"]) == (416, "range_not_satisfiable")
    assert answer.headers["content-range"] == f"bytes */{len(DATA)}"


@pytest.mark.parametrize(
    "asked", ["bytes=5-1", "bytes=-", "bytes=a-b", "items=0-1", "bytes=0-1,3-4", "bytes=" + "9" * 30 + "-"]
)
def test_a_range_that_is_malformed_or_many_is_answered_whole(sqlite_rig: Rig, content: str, asked: str) -> None:
    answer = sqlite_rig.client.get(content, headers={"Range": asked})
    assert (answer.status_code, len(answer.content)) == (200, len(DATA))


def test_a_resumed_download_is_whole_where_the_file_is_another(sqlite_rig: Rig, content: str) -> None:
    resumed = sqlite_rig.client.get(content, headers={"Range": "bytes=5-", "If-Range": ETAG})
    assert (resumed.status_code, resumed.content) == (206, DATA[5:])
    for other in ('"other"', f"W/{ETAG}", "Mon, 30 Nov 2026 00:00:00 GMT"):
        answer = sqlite_rig.client.get(content, headers={"Range": "bytes=5-", "If-Range": other})
        assert (answer.status_code, len(answer.content)) == (200, len(DATA))


def test_a_known_version_is_not_sent_again(sqlite_rig: Rig, content: str) -> None:
    for tag in (ETAG, f"W/{ETAG}", "*", f'"x", {ETAG}'):
        answer = sqlite_rig.client.get(content, headers={"If-None-Match": tag, "Range": "bytes=0-1"})
        assert (answer.status_code, answer.content, answer.headers["etag"]) == (304, b"", ETAG)
    assert sqlite_rig.client.get(content, headers={"If-None-Match": '"x"'}).status_code == 200


def test_shards_are_listed_and_shown(sqlite_rig: Rig, content: str) -> None:
    shards = content.removesuffix("/0/content")
    sqlite_rig.commit_shard(sqlite_rig.lease())
    page = sqlite_rig.client.get(shards, params={"limit": 1}).json()
    assert ([shard["index"] for shard in page["data"]], page["has_more"]) == ([0], True)
    page = sqlite_rig.client.get(shards, params={"after": page["last_id"]}).json()
    assert ([shard["index"] for shard in page["data"]], page["has_more"]) == ([1], False)
    shard = sqlite_rig.client.get(f"{shards}/0").json()
    assert (shard["sha256"], shard["bytes"], shard["file"]) == (SHA, len(DATA), "shard-00000.g1.safetensors")
    assert sqlite_rig.client.get(f"{shards}/7").json()["code"] == "shard_not_found"
    assert sqlite_rig.client.get(f"{shards}/7/content").status_code == 404
    assert sqlite_rig.client.get(f"{shards}/x").status_code == 422


def test_a_shard_that_the_storage_lost_is_a_clear_error(sqlite_rig: Rig, content: str) -> None:
    next(sqlite_rig.storage.glob("jobs/*/shards/*")).unlink()
    answer = sqlite_rig.client.get(content)
    assert (answer.status_code, answer.json()["code"]) == (500, "file_missing")


def test_the_manifest_is_there_once_the_job_is_over(sqlite_rig: Rig, content: str) -> None:
    manifest = content.split("/shards")[0] + "/manifest"
    early = sqlite_rig.client.get(manifest)
    assert (early.status_code, early.json()["code"]) == (404, "manifest_not_ready")
    sqlite_rig.commit_shard(sqlite_rig.lease())
    sqlite_rig.upkeep()
    answer = sqlite_rig.client.get(manifest)
    assert answer.headers["etag"] == f'"{hashlib.sha256(answer.content).hexdigest()}"'
    assert answer.headers["content-type"] == "application/json"
    head = sqlite_rig.client.head(manifest)
    assert (head.headers["etag"], head.content) == (answer.headers["etag"], b"")
    assert answer.json()["shards"][0]["sha256"] == SHA
    unchanged = sqlite_rig.client.get(manifest, headers={"If-None-Match": answer.headers["etag"]})
    assert unchanged.status_code == 304


@given(st.text(max_size=30) | st.from_regex(r"bytes=\d{0,3}-\d{0,3}", fullmatch=True), st.integers(0, 50))
def test_whatever_is_asked_the_span_lies_within_the_file(header: str, size: int) -> None:
    span = ranges.span(header, None, ETAG, size)
    if span is None:
        return
    assert 0 <= span.start <= span.stop <= size
    assert not span.partial or span.start < span.stop
