"""The folder of tokenised rows: what went in comes out, and a folder that is not whole is refused."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from worker.plan.tokens import INDEX, TokenRows, TokenRowsError, TokenRowsWriter


def write(folder: Path, rows: list[tuple[int, list[int]]]) -> TokenRows:
    with TokenRowsWriter(folder) as writer:
        for row_id, ids in rows:
            writer.add(row_id, np.array(ids, np.int32), np.array([i % 2 for i in ids], np.uint8))
        writer.finish()
    return TokenRows.open(folder)


@settings(max_examples=40, deadline=None)
@given(rows=st.lists(st.tuples(st.integers(0, 2**40), st.lists(st.integers(0, 2**31 - 1), min_size=1))))
def test_rows_come_back_as_they_went_in(
    rows: list[tuple[int, list[int]]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    found = write(tmp_path_factory.mktemp("tokens") / "g1", rows)
    found.verify()
    assert len(found) == len(rows)
    assert found.row_ids.tolist() == [row_id for row_id, _ in rows]
    assert found.lengths.tolist() == [len(ids) for _, ids in rows]
    for i, (_, ids) in enumerate(rows):
        assert found.input_ids(i).dtype == np.int32
        assert found.input_ids(i).tolist() == ids
        assert found.loss_mask(i).tolist() == [token % 2 for token in ids]


def test_the_files_are_flat_and_little_endian(tmp_path: Path) -> None:
    write(tmp_path / "g1", [(5, [1, 258]), (9, [3])])
    assert (tmp_path / "g1" / "input_ids.i32").read_bytes() == bytes([1, 0, 0, 0, 2, 1, 0, 0, 3, 0, 0, 0])
    assert (tmp_path / "g1" / "loss_mask.u8").read_bytes() == bytes([1, 0, 1])
    assert np.fromfile(tmp_path / "g1" / "offsets.i64", "<i8").tolist() == [0, 2, 3]
    assert np.fromfile(tmp_path / "g1" / "row_ids.i64", "<i8").tolist() == [5, 9]
    index = json.loads((tmp_path / "g1" / INDEX).read_bytes())
    assert (index["format_version"], index["rows"], index["tokens"]) == (1, 2, 3)


def test_rows_that_were_never_finished_cannot_be_read(tmp_path: Path) -> None:
    with TokenRowsWriter(tmp_path / "g1") as writer:
        writer.add(0, np.ones(3, np.int32), np.ones(3, np.uint8))
    with pytest.raises(TokenRowsError, match="no finished rows"):
        TokenRows.open(tmp_path / "g1")


def test_an_unfinished_folder_is_begun_anew_and_a_finished_one_is_left_alone(tmp_path: Path) -> None:
    with TokenRowsWriter(tmp_path / "g1") as writer:
        writer.add(0, np.ones(400_000, np.int32), np.ones(400_000, np.uint8))
    assert write(tmp_path / "g1", [(4, [7])]).input_ids(0).tolist() == [7]
    with pytest.raises(TokenRowsError, match="finished"):
        TokenRowsWriter(tmp_path / "g1")


def test_a_file_cut_short_is_found_on_opening(tmp_path: Path) -> None:
    write(tmp_path / "g1", [(0, [1, 2, 3])])
    with (tmp_path / "g1" / "input_ids.i32").open("r+b") as file:
        file.truncate(8)
    with pytest.raises(TokenRowsError, match=r"input_ids\.i32 has 8 bytes, 12 are right"):
        TokenRows.open(tmp_path / "g1")


def test_a_changed_byte_is_found_on_verifying(tmp_path: Path) -> None:
    rows = write(tmp_path / "g1", [(0, [1, 2, 3])])
    with (tmp_path / "g1" / "loss_mask.u8").open("r+b") as file:
        file.write(b"\x00")
    with pytest.raises(TokenRowsError, match=r"loss_mask\.u8 is damaged"):
        rows.verify()


def test_a_row_cannot_be_written_over_through_the_map(tmp_path: Path) -> None:
    rows = write(tmp_path / "g1", [(0, [1, 2, 3])])
    with pytest.raises(ValueError, match="read-only"):
        rows.input_ids(0)[0] = 5


def test_ids_and_mask_must_be_of_one_length(tmp_path: Path) -> None:
    with TokenRowsWriter(tmp_path / "g1") as writer, pytest.raises(ValueError, match="2 ids and 3 mask values"):
        writer.add(0, np.ones(2, np.int32), np.ones(3, np.uint8))
