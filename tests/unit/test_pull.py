"""Pulls against a real HTTP server that cuts, lies and falls silent."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from fixtures_client import JOB, FaultyServer, Folder, build, cut_after, flipped, silence, status, whole

import layertap
from layertap import transport
from layertap.client import Client
from layertap.errors import ApiError, FormatError, PullError
from layertap.pull import PullProgress


@pytest.fixture(autouse=True)
def quick_backoff(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pauses are as many as ever, but short."""
    monkeypatch.setattr(transport, "backoff", lambda attempt: 0.01)
    monkeypatch.setattr("layertap.download.backoff", lambda attempt: 0.01)


@pytest.fixture
def source(tmp_path: Path, faulty: FaultyServer) -> Folder:
    """A job of three shards, each some 300 kB, offered by the server."""
    folder = build(tmp_path / "source", [list(range(40)), list(range(40, 90)), [200]], hidden_size=256)
    faulty.offer(folder)
    return folder


@pytest.fixture
def client(faulty: FaultyServer) -> Iterator[Client]:
    with Client(faulty.url) as connected:
        yield connected


def _contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def _shard_requests(server: FaultyServer) -> list[dict[str, str]]:
    return [
        {k.lower(): v for k, v in headers.items()} for path, headers in server.requests if path.endswith("/content")
    ]


def test_a_pull_is_byte_for_byte_what_the_service_has(source: Folder, client: Client, tmp_path: Path) -> None:
    seen: list[PullProgress] = []
    report = client.pull(JOB, tmp_path / "out", on_progress=seen.append)
    assert _contents(tmp_path / "out") == _contents(source.path)
    assert (report.rows, report.shards, report.skipped_shards) == (91, 3, 0)
    assert report.received_bytes == report.bytes == seen[-1].bytes_done == seen[-1].bytes_total
    assert report.complete
    layertap.open(tmp_path / "out").verify()


def test_a_second_pull_downloads_no_shard_again(
    source: Folder, client: Client, faulty: FaultyServer, tmp_path: Path
) -> None:
    client.pull(JOB, tmp_path / "out")
    faulty.requests.clear()
    report = client.pull(JOB, tmp_path / "out")
    assert _shard_requests(faulty) == []
    assert (report.received_bytes, report.skipped_shards) == (0, 3)


def test_only_a_damaged_shard_is_fetched_again(
    source: Folder, client: Client, faulty: FaultyServer, tmp_path: Path
) -> None:
    client.pull(JOB, tmp_path / "out")
    target = tmp_path / "out" / source.manifest.shards[1].file
    data = bytearray(target.read_bytes())
    data[-1] ^= 1
    target.write_bytes(data)
    faulty.requests.clear()
    assert client.pull(JOB, tmp_path / "out").received_bytes == len(data)
    assert len(_shard_requests(faulty)) == 1
    assert _contents(tmp_path / "out") == _contents(source.path)


def test_a_cut_connection_is_continued_where_it_broke(
    source: Folder, client: Client, faulty: FaultyServer, tmp_path: Path
) -> None:
    faulty.faults = [None, cut_after(100_000), cut_after(70_000)]
    report = client.pull(JOB, tmp_path / "out", jobs=1)
    first, second, third = _shard_requests(faulty)[:3]
    etag = f'"{source.manifest.shards[0].sha256}"'
    assert "range" not in first
    assert (second["range"], second["if-range"]) == ("bytes=100000-", etag)
    assert third["range"] == "bytes=170000-"
    assert report.received_bytes == report.bytes
    assert _contents(tmp_path / "out") == _contents(source.path)


def test_a_part_left_by_an_earlier_pull_is_hashed_and_continued(
    source: Folder, client: Client, faulty: FaultyServer, tmp_path: Path
) -> None:
    shard = source.manifest.shards[0]
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / f"{shard.file}.part").write_bytes(source.shard_paths[0].read_bytes()[:123_456])
    report = client.pull(JOB, tmp_path / "out", jobs=1)
    assert _shard_requests(faulty)[0]["range"] == "bytes=123456-"
    assert report.received_bytes == report.bytes - 123_456
    assert _contents(tmp_path / "out") == _contents(source.path)


@pytest.mark.parametrize("part", [b"x" * 1000, b"x" * 10_000_000])
def test_a_part_of_other_bytes_costs_a_retry_and_never_a_wrong_file(
    source: Folder, client: Client, tmp_path: Path, part: bytes
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / f"{source.manifest.shards[0].file}.part").write_bytes(part)
    client.pull(JOB, tmp_path / "out")
    assert _contents(tmp_path / "out") == _contents(source.path)


def test_a_part_that_is_whole_already_needs_no_request(
    source: Folder, client: Client, faulty: FaultyServer, tmp_path: Path
) -> None:
    (tmp_path / "out").mkdir()
    for path in source.shard_paths:
        shutil.copy(path, tmp_path / "out" / f"{path.name}.part")
    client.pull(JOB, tmp_path / "out")
    assert _shard_requests(faulty) == []
    assert _contents(tmp_path / "out") == _contents(source.path)


def test_a_server_that_ignores_range_is_taken_from_the_start(
    source: Folder, client: Client, faulty: FaultyServer, tmp_path: Path
) -> None:
    faulty.faults = [None, cut_after(100_000), whole]
    client.pull(JOB, tmp_path / "out", jobs=1)
    assert _contents(tmp_path / "out") == _contents(source.path)


def test_one_wrong_bit_is_downloaded_again(
    source: Folder, client: Client, faulty: FaultyServer, tmp_path: Path
) -> None:
    faulty.faults = [None, flipped]
    report = client.pull(JOB, tmp_path / "out", jobs=1)
    assert report.received_bytes == report.bytes
    assert _contents(tmp_path / "out") == _contents(source.path)


def test_a_shard_that_is_always_wrong_is_given_up_and_never_gets_its_name(
    source: Folder, client: Client, faulty: FaultyServer, tmp_path: Path
) -> None:
    faulty.faults = [None, *[flipped] * 50]
    with pytest.raises(PullError, match="wrong bytes 3 times"):
        client.pull(JOB, tmp_path / "out", jobs=1)
    assert len(_shard_requests(faulty)) == 3
    assert not [path for path in (tmp_path / "out").iterdir() if path.suffix == ".safetensors"]
    assert not (tmp_path / "out" / "manifest.json").exists()


def test_too_many_bytes_are_not_taken(source: Folder, client: Client, faulty: FaultyServer, tmp_path: Path) -> None:
    path = f"/v1/jobs/{JOB}/shards/0/content"
    faulty.bodies[path] += b"more"
    with pytest.raises(PullError, match="wrong bytes"):
        client.pull(JOB, tmp_path / "out", jobs=1)


def test_a_connection_that_brings_nothing_is_given_up_after_bounded_tries(
    source: Folder, client: Client, faulty: FaultyServer, tmp_path: Path
) -> None:
    faulty.faults = [None, cut_after(90_000), *[cut_after(0)] * 50]
    with pytest.raises(PullError, match="6 times in a row"):
        client.pull(JOB, tmp_path / "out", jobs=1)
    assert len(_shard_requests(faulty)) == 7
    part = tmp_path / "out" / f"{source.manifest.shards[0].file}.part"
    assert part.read_bytes() == source.shard_paths[0].read_bytes()[:90_000]
    faulty.faults = []
    assert client.pull(JOB, tmp_path / "out").complete


def test_a_busy_service_is_waited_for(source: Folder, client: Client, faulty: FaultyServer, tmp_path: Path) -> None:
    faulty.faults = [None, status(503, **{"retry-after": "0"}), status(429)]
    client.pull(JOB, tmp_path / "out", jobs=1)
    assert _contents(tmp_path / "out") == _contents(source.path)


def test_a_shard_that_the_service_no_longer_has_is_a_problem(
    source: Folder, client: Client, faulty: FaultyServer, tmp_path: Path
) -> None:
    del faulty.bodies[f"/v1/jobs/{JOB}/shards/1/content"]
    with pytest.raises(ApiError, match="gone"):
        client.pull(JOB, tmp_path / "out")
    assert not (tmp_path / "out" / "manifest.json").exists()


@pytest.mark.parametrize("name", ["../escape.safetensors", "/abs", "a/b"])
def test_a_name_that_leaves_the_folder_is_refused_before_anything_is_written(
    source: Folder, client: Client, faulty: FaultyServer, tmp_path: Path, name: str
) -> None:
    path = f"/v1/jobs/{JOB}/manifest"
    manifest = json.loads(faulty.bodies[path])
    manifest["shards"][0]["file"] = name
    faulty.bodies[path] = json.dumps(manifest).encode()
    with pytest.raises(FormatError, match="not a plain shard name"):
        client.pull(JOB, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_partial_job_says_that_it_is_partial(faulty: FaultyServer, client: Client, tmp_path: Path) -> None:
    faulty.offer(build(tmp_path / "source", [[0, 1]], complete=False))
    report = client.pull(JOB, tmp_path / "out")
    assert not report.complete
    assert len(layertap.open(tmp_path / "out")) == 2


def test_a_shard_whose_rows_all_failed_has_no_file_to_pull(
    faulty: FaultyServer, client: Client, tmp_path: Path
) -> None:
    folder = build(tmp_path / "source", [[0, 1]])
    empty = folder.manifest.shards[0].model_dump() | {"index": 1, "file": "shard-00001.g1.safetensors"}
    empty |= {"bytes": 0, "sha256": "", "rows": 0, "tokens": 0}
    folder.rewrite_manifest(shards=[folder.manifest.shards[0].model_dump(), empty])
    faulty.offer(Folder(folder.path, folder.manifest))
    assert client.pull(JOB, tmp_path / "out").shards == 1
    layertap.open(tmp_path / "out").verify()


def test_another_jobs_folder_is_refused(source: Folder, client: Client, tmp_path: Path) -> None:
    build(tmp_path / "out", [[0]], job="job_other")
    with pytest.raises(PullError, match="holds job_other"):
        client.pull(JOB, tmp_path / "out")


def test_two_pulls_into_one_folder_do_not_mix(
    source: Folder, client: Client, faulty: FaultyServer, tmp_path: Path
) -> None:
    faulty.faults = [None, silence]
    first = threading.Thread(target=client.pull, args=(JOB, tmp_path / "out", 1))
    first.start()
    _until(lambda: len(_shard_requests(faulty)) == 1)
    with pytest.raises(PullError, match="another pull"):
        client.pull(JOB, tmp_path / "out")
    faulty.release.set()
    first.join(30)
    assert _contents(tmp_path / "out") == _contents(source.path)


def test_a_file_where_the_folder_should_be_is_a_clear_error(source: Folder, client: Client, tmp_path: Path) -> None:
    (tmp_path / "out").write_text("")
    with pytest.raises(PullError, match="can't be used as a folder"):
        client.pull(JOB, tmp_path / "out")


def test_ctrl_c_ends_a_pull_promptly_and_keeps_the_part(source: Folder, faulty: FaultyServer, tmp_path: Path) -> None:
    faulty.faults = [None, cut_after(80_000), silence, silence, silence]
    command = [sys.executable, "-m", "layertap.cli", "--url", faulty.url, "pull", JOB, str(tmp_path / "out")]
    # Tests that run in the background were told to ignore it, and would hand that on.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    process = subprocess.Popen([*command, "--jobs", "1"], stderr=subprocess.PIPE, text=True)
    signal.signal(signal.SIGINT, before)
    try:
        _until(lambda: len(_shard_requests(faulty)) == 2)
        started = time.monotonic()
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=10)
    finally:
        process.kill()
        process.wait()
    assert time.monotonic() - started < 5
    assert process.returncode == 130
    assert "go on with: layertap pull" in said
    part = tmp_path / "out" / f"{source.manifest.shards[0].file}.part"
    assert part.stat().st_size >= 80_000


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 512 kB."""
    mount = tmp_path / "small"
    mount.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", str(mount)], capture_output=True)
    if made.returncode:
        pytest.skip("mounting a tmpfs needs root")
    yield mount
    subprocess.run(["umount", str(mount)], check=True)


def test_a_disk_that_is_too_small_is_told_before_downloading(
    source: Folder, client: Client, faulty: FaultyServer, small_disk: Path
) -> None:
    with pytest.raises(PullError, match="bytes free and needs"):
        client.pull(JOB, small_disk / "out")
    assert _shard_requests(faulty) == []


def test_a_disk_that_fills_up_meanwhile_keeps_the_part(
    source: Folder, client: Client, small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=10**12))
    with pytest.raises(PullError, match=r"No space left.*stays.*pull again"):
        client.pull(JOB, small_disk / "out")
    assert [path for path in (small_disk / "out").iterdir() if path.name.endswith(".part")]
    assert not (small_disk / "out" / "manifest.json").exists()


def _until(condition: object, seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_the_manifest_is_written_after_every_shard(source: Folder, client: Client, tmp_path: Path) -> None:
    client.pull(JOB, tmp_path / "out")
    times = {path.name: os.stat(path).st_mtime_ns for path in (tmp_path / "out").iterdir()}
    assert max(times.values()) == times["manifest.json"]
