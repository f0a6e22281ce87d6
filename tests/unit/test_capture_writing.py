"""Writer and ledger: every token at its place, and nothing counted before the file has it."""

import errno
import os
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from fixtures_service_process import until

from worker.capture import written_file
from worker.capture.addressing import Piece
from worker.capture.counters import Counters, writer_of
from worker.capture.host_copy import Copier, rows_finite
from worker.capture.rid import Rid, mask
from worker.capture.session import Ledger, LedgerError, Session, publish, sessions_dir, withdraw
from worker.capture.writer import Writer
from worker.capture.written_file import WrittenFile

H = 4
BOUNDARIES = (1, 2)
NAME = "task_A.1"


def _piece(row: int, start: int, count: int, position: int) -> Piece:
    return Piece(Rid(mask(BOUNDARIES), True, "task_A", 1, row, 0), start, count, position)


class Bench:
    """A writer on a run directory with one session of two rows, of 3 and 5 tokens."""

    def __init__(self, run_dir: Path, file: Path | None = None) -> None:
        self.run_dir = run_dir
        sessions_dir(run_dir).mkdir(parents=True)
        self.file = file or run_dir / "shard"
        if file is None:
            self.file.write_bytes(bytes(8 * 3 * H * 2))
        self.ledger = Ledger.create(sessions_dir(run_dir) / f"{NAME}.ledger", [3, 5])
        publish(run_dir, NAME, Session(str(self.file), str(self.ledger.path), 0, 2 * H * 2, 8 * 2 * H * 2, H * 2))
        self.counters = Counters.create(run_dir)
        self.copier = Copier(torch.device("cpu"), 1 << 20, self.counters)
        self.writer = Writer(run_dir, self.copier, self.counters)
        self.writer.start()

    def submit(self, run: list[Piece], states: list[torch.Tensor], final: torch.Tensor) -> None:
        self.writer.submit(run, self.copier.copy(states, final, run[0].start, run[-1].start + run[-1].count))

    def written(self) -> tuple[torch.Tensor, torch.Tensor]:
        self.writer.stop()
        raw = torch.frombuffer(bytearray(self.file.read_bytes()), dtype=torch.bfloat16)
        return raw[: 8 * 2 * H].view(8, 2, H), raw[8 * 2 * H :].view(8, H)


def _states(n: int, seed: int = 0) -> tuple[list[torch.Tensor], torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    made = [torch.randn(n, H, generator=generator).to(torch.bfloat16) for _ in range(3)]
    return made[:2], made[2]


def test_rows_and_chunks_land_at_their_places(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    states, final = _states(9)
    # Row 1's first chunk shares a forward with row 0; a stranger's row lies between them.
    bench.submit([_piece(0, 0, 3, 0)], states, final)
    bench.submit([_piece(1, 4, 2, 0)], states, final)
    more, more_final = _states(3, seed=1)
    bench.submit([_piece(1, 0, 3, 2)], more, more_final)
    hidden, finals = bench.written()
    expected = torch.cat([torch.stack(states, 1)[:3], torch.stack(states, 1)[4:6], torch.stack(more, 1)])
    assert torch.equal(hidden, expected)
    assert torch.equal(finals, torch.cat([final[:3], final[4:6], more_final]))
    assert bench.ledger.progress() == (2, 8)
    counted = bench.counters.read()
    assert (counted.tokens, counted.bytes) == (8, bench.file.stat().st_size)
    assert bench.counters.given_and_done(writer_of(NAME)) == (3, 3)
    assert counted.write_seconds > 0
    assert (counted.queued_runs, counted.pinned_bytes, counted.pinned_limit) == (0, 0, 0)


def test_rows_that_are_adjacent_in_batch_and_file_are_one_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writes: list[int] = []
    write = written_file.pwrite_all
    monkeypatch.setattr(
        written_file, "pwrite_all", lambda fd, data, offset: (writes.append(len(data)), write(fd, data, offset))
    )
    bench = Bench(tmp_path)
    states, final = _states(8)
    bench.submit([_piece(0, 0, 3, 0), _piece(1, 3, 5, 0)], states, final)
    hidden, finals = bench.written()
    assert writes == [8 * 2 * H * 2, 8 * H * 2]
    assert torch.equal(hidden, torch.stack(states, 1))
    assert torch.equal(finals, final)
    assert bench.ledger.progress() == (2, 8)


def test_rows_in_another_order_than_in_the_file_land_at_their_places(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    states, final = _states(8)
    bench.submit([_piece(1, 0, 5, 0), _piece(0, 5, 3, 0)], states, final)
    hidden, finals = bench.written()
    order = [5, 6, 7, 0, 1, 2, 3, 4]
    assert torch.equal(hidden, torch.stack(states, 1)[order])
    assert torch.equal(finals, final[order])
    assert bench.ledger.progress() == (2, 8)


def test_one_run_fills_the_files_of_several_sessions(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    other = tmp_path / "other"
    other.write_bytes(bytes(4 * 3 * H * 2))
    ledger = Ledger.create(sessions_dir(tmp_path) / "task_B.1.ledger", [4])
    publish(tmp_path, "task_B.1", Session(str(other), str(ledger.path), 0, 2 * H * 2, 4 * 2 * H * 2, H * 2))
    states, final = _states(7)
    bench.submit([_piece(0, 0, 3, 0), Piece(Rid(mask(BOUNDARIES), True, "task_B", 1, 0, 0), 3, 4, 0)], states, final)
    hidden, _ = bench.written()
    raw = torch.frombuffer(bytearray(other.read_bytes()), dtype=torch.bfloat16)
    assert torch.equal(hidden[:3], torch.stack(states, 1)[:3])
    assert torch.equal(raw[: 4 * 2 * H].view(4, 2, H), torch.stack(states, 1)[3:])
    assert torch.equal(raw[4 * 2 * H :].view(4, H), final[3:])
    assert ledger.progress() == (1, 4)


def test_a_gap_is_not_counted(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.submit([_piece(1, 0, 3, 2)], *_states(3))
    bench.writer.stop()
    assert bench.ledger.written.tolist() == [0, 0]
    assert bench.counters.read().tokens == 0


def test_a_row_sent_again_starts_over(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    states, final = _states(5)
    states[0][3, 0] = float("nan")
    bench.submit([_piece(1, 0, 4, 0)], states, final)
    bench.submit([_piece(1, 0, 5, 0)], *_states(5))
    bench.writer.stop()
    assert bench.ledger.written.tolist() == [0, 5]
    assert bench.ledger.nonfinite.tolist() == [0, 0]


def test_a_row_that_counts_as_done_is_written_no_more(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    states, final = _states(5)
    bench.submit([_piece(1, 0, 5, 0)], states, final)
    bench.submit([_piece(1, 0, 5, 0), _piece(0, 5, 3, 0)], *_states(8, seed=1))
    hidden, finals = bench.written()
    assert torch.equal(hidden[3:], torch.stack(states, 1))
    assert torch.equal(finals[3:], final)
    assert bench.ledger.progress() == (2, 8)


def test_a_write_under_way_is_seen_after_the_session_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go_on = threading.Event(), threading.Event()
    write = written_file.pwrite_all

    def slow(fd: int, data: memoryview, offset: int) -> None:
        begun.set()
        assert go_on.wait(60)
        write(fd, data, offset)

    monkeypatch.setattr(written_file, "pwrite_all", slow)
    bench = Bench(tmp_path)
    assert not bench.ledger.in_writing
    bench.submit([_piece(0, 0, 3, 0)], *_states(3))
    assert begun.wait(60)
    bench.ledger.close_session()
    assert bench.ledger.in_writing
    go_on.set()
    bench.submit([_piece(1, 0, 5, 0)], *_states(5))
    bench.writer.stop()
    assert not bench.ledger.in_writing
    assert bench.ledger.written.tolist() == [3, 0]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_tokens_that_are_not_finite_are_counted_by_row(tmp_path: Path, bad: float) -> None:
    bench = Bench(tmp_path)
    states, final = _states(8)
    states[1][3, 1] = bad
    final[7, 0] = bad
    bench.submit([_piece(0, 0, 3, 0), _piece(1, 3, 5, 0)], states, final)
    bench.writer.stop()
    assert bench.ledger.nonfinite.tolist() == [0, 2]


def test_a_closed_session_is_written_no_more(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.ledger.close_session()
    bench.submit([_piece(0, 0, 3, 0)], *_states(3))
    bench.writer.stop()
    assert bench.ledger.written.tolist() == [0, 0]
    assert not any(bench.file.read_bytes())


def test_a_withdrawn_session_is_written_no_more(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    withdraw(tmp_path, NAME)
    bench.submit([_piece(0, 0, 3, 0)], *_states(3))
    bench.writer.stop()
    assert not any(bench.file.read_bytes())


def test_a_session_that_is_opened_anew_under_its_name_is_written(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.submit([_piece(0, 0, 3, 0)], *_states(3))
    until(lambda: bench.ledger.written[0] == 3)
    bench.ledger.close_session()
    withdraw(tmp_path, NAME)
    again = Ledger.create(sessions_dir(tmp_path) / f"{NAME}.ledger", [3, 5])
    publish(tmp_path, NAME, Session(str(bench.file), str(again.path), 0, 2 * H * 2, 8 * 2 * H * 2, H * 2))
    bench.submit([_piece(1, 0, 5, 0)], *_states(5))
    bench.writer.stop()
    assert again.written.tolist() == [0, 5]


def test_a_file_whose_closing_fails_ends_no_writer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(file: WrittenFile) -> None:
        raise OSError(errno.EIO, "as of a network file system that could not write what it had taken")

    bench = Bench(tmp_path)
    monkeypatch.setattr(WrittenFile, "close", failing)
    bench.submit([_piece(0, 0, 3, 0)], *_states(3))
    until(lambda: bench.ledger.written[0] == 3)
    bench.ledger.close_session()
    bench.submit([_piece(1, 0, 5, 0)], *_states(5))
    until(lambda: bench.counters.read().queued_runs == 0)
    again = Ledger.create(sessions_dir(tmp_path) / f"{NAME}.ledger", [3, 5])
    publish(tmp_path, NAME, Session(str(bench.file), str(again.path), 0, 2 * H * 2, 8 * 2 * H * 2, H * 2))
    bench.submit([_piece(1, 0, 5, 0)], *_states(5))
    bench.writer.stop()
    assert again.written.tolist() == [0, 5]


def test_a_full_disk_is_reported_and_ends_nothing(tmp_path: Path) -> None:
    bench = Bench(tmp_path, file=Path("/dev/full"))
    bench.submit([_piece(0, 0, 3, 0)], *_states(3))
    bench.submit([_piece(1, 0, 5, 0)], *_states(5))
    bench.writer.stop()
    assert bench.ledger.errno == errno.ENOSPC
    assert bench.ledger.written.tolist() == [0, 0]


def test_a_file_that_cannot_be_opened_is_reported_too(tmp_path: Path) -> None:
    bench = Bench(tmp_path, file=tmp_path / "unmounted" / "shard")
    bench.submit([_piece(0, 0, 3, 0)], *_states(3))
    bench.writer.stop()
    assert bench.ledger.errno == errno.ENOENT


def test_a_file_that_is_no_ledger_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.ledger"
    path.write_bytes(os.urandom(256))
    with pytest.raises(LedgerError):
        Ledger.open(path)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_finite_check_sees_every_kind_of_bad_value(dtype: torch.dtype) -> None:
    rows = torch.randn(5, 64).to(dtype)
    rows[1, 3], rows[2, 63], rows[4, 0] = float("nan"), float("inf"), float("-inf")
    assert rows_finite(rows).tolist() == [True, False, False, True, False]


def test_ledger_progress_counts_whole_rows(tmp_path: Path) -> None:
    ledger = Ledger.create(tmp_path / "l", [2, 4])
    ledger.written[:] = [2, 3]
    assert Ledger.open(tmp_path / "l").progress() == (1, 5)
    assert np.array_equal(ledger.lengths, [2, 4])
