"""The capture's counters: what one process counts another reads, spans under way included."""

import os
import threading
from pathlib import Path

import pytest
import torch
from fixtures_service_process import until

from worker.capture import counters
from worker.capture.counters import Counters, counters_file
from worker.capture.host_copy import Copier, HostCopy
from worker.capture.pinned import PinnedRing


def reader(folder: Path) -> Counters:
    """The counters as another process maps them."""
    opened = Counters.open(folder)
    assert opened is not None
    return opened


def test_what_is_counted_is_read_through_another_mapping(tmp_path: Path) -> None:
    written, seen = Counters.create(tmp_path), reader(tmp_path)
    written.wrote(3, 300)
    written.wrote(4, 400)
    for writer in (0, 2, 2):
        written.given(writer)
    written.done(2)
    written.pinned(1 << 20, 1 << 30)
    counted = seen.read()
    assert (counted.tokens, counted.bytes) == (7, 700)
    assert (counted.queued_runs, counted.pinned_bytes, counted.pinned_limit) == (2, 1 << 20, 1 << 30)
    assert [seen.given_and_done(writer) for writer in (0, 1, 2)] == [(1, 0), (0, 0), (2, 1)]
    assert (counted.wait_seconds, counted.write_seconds) == (0, 0)


def test_a_wait_shows_while_it_lasts_and_stays_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written, seen = Counters.create(tmp_path), reader(tmp_path)
    clock = [50_000_000_000]
    monkeypatch.setattr(counters.time, "monotonic_ns", lambda: clock[0])
    for spent in (0.0, 4.0):
        with written.waiting():
            clock[0] += 3_000_000_000
            assert seen.read().wait_seconds == spent + 3.0
            clock[0] += 1_000_000_000
        clock[0] += 7_000_000_000
        assert seen.read().wait_seconds == spent + 4.0
    assert seen.read().write_seconds == 0


def test_a_span_that_ends_with_an_error_is_counted(tmp_path: Path) -> None:
    written = Counters.create(tmp_path)
    with pytest.raises(TimeoutError), written.waiting():
        raise TimeoutError
    assert 0 < written.read().wait_seconds < 60


def test_another_process_reads_what_this_one_counts(tmp_path: Path) -> None:
    written = Counters.create(tmp_path)
    child = os.fork()
    if child == 0:
        os._exit(0 if until(lambda: reader(tmp_path).read().tokens == 5) else 1)
    written.wrote(5, 1)
    assert os.waitpid(child, 0)[1] == 0


def test_pinned_memory_given_back_by_two_threads_at_once_shows_as_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = Counters.create(tmp_path)
    copier = Copier(torch.device("cpu"), 1 << 20, written)
    copier.ring = PinnedRing(torch.zeros(64, dtype=torch.uint8))
    nothing = torch.zeros(0)
    first, second = (HostCopy(nothing, None, nothing, slot=copier.ring.take(32, timeout=0)) for _ in range(2))
    other = threading.Thread(target=copier.release, args=(second,))
    tell = written.pinned

    def held_up(nbytes: int, limit: int) -> None:
        if not other.ident:
            other.start()
            other.join(0.2)
        tell(nbytes, limit)

    monkeypatch.setattr(written, "pinned", held_up)
    copier.release(first)
    other.join()
    assert written.read().pinned_bytes == 0


@pytest.mark.parametrize("content", [None, b"", b"short", bytes(64), bytes(72)])
def test_a_file_that_holds_no_counters_is_none(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        counters_file(tmp_path).write_bytes(content)
    assert Counters.open(tmp_path) is None
