"""The capture's pure rules: request ids, addressing, and which rows of a batch go where."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.capture import sources
from worker.capture.addressing import cut, pieces, runs
from worker.capture.rid import Reading, Rid, mask, parse, unmask
from worker.capture.sources import Source

rids = st.builds(
    Rid,
    boundaries=st.lists(st.integers(0, 127), min_size=1, max_size=8).map(mask),
    final=st.booleans(),
    task=st.from_regex(r"task_[A-Z0-9]{4,26}", fullmatch=True),
    generation=st.integers(0, 10**6),
    row=st.integers(0, 10**7),
    attempt=st.integers(0, 9),
    reading=st.sampled_from(Reading),
)


@given(rids)
def test_a_request_id_is_read_back_as_written(rid: Rid) -> None:
    assert parse(str(rid)) == rid


@given(rids, rids)
def test_no_request_id_is_a_prefix_of_another(first: Rid, second: Rid) -> None:
    if first != second:
        assert not str(second).startswith(str(first))


@given(rids, rids)
def test_an_abort_of_a_lease_reaches_its_own_rows_only(first: Rid, second: Rid) -> None:
    same = _lease(first) == _lease(second)
    assert str(second).startswith(first.lease_prefix) == same


def _lease(rid: Rid) -> tuple[object, ...]:
    return rid.reading, rid.boundaries, rid.final, rid.session


@pytest.mark.parametrize(
    "foreign", ["", "abc123", "HEALTH_CHECK_1", "lt1.h.3.1.task_A.1.2", "lt1.z.3.1.t.1.2.0.", None, 7, ["lt1"]]
)
def test_a_request_that_is_not_ours_is_left_alone(foreign: object) -> None:
    assert parse(foreign) is None


@given(st.sets(st.integers(0, 200), min_size=1))
def test_a_mask_names_exactly_its_boundaries(boundaries: set[int]) -> None:
    assert unmask(mask(sorted(boundaries))) == tuple(sorted(boundaries))


def _rid(row: int, boundaries: tuple[int, ...] = (0, 3), final: bool = True) -> str:
    return str(Rid(mask(boundaries), final, "task_A", 1, row, 0))


def test_a_chunk_lies_where_its_prefix_ends() -> None:
    found = pieces([_rid(0), "other", _rid(5)], [100, 0, 0], [20, 7, 3])
    assert [(p.rid.row, p.start, p.count, p.position) for p in found] == [(0, 0, 20, 100), (5, 27, 3, 0)]


def test_a_request_without_rows_in_the_batch_has_no_piece() -> None:
    assert [p.rid.row for p in pieces([_rid(0), _rid(1)], [0, 0], [0, 4])] == [1]


def test_lengths_that_disagree_are_refused() -> None:
    with pytest.raises(ValueError, match="zip"):
        pieces([_rid(0)], [0], [4, 4])


def test_what_is_read_depends_on_the_ids_alone() -> None:
    found = pieces([_rid(0, (1,), False), _rid(1, (4, 7), True)], [0, 9], [2, 2])
    assert sources.wanted(found, 9, True, True) == {(Source.HOOKS, 1), (Source.HOOKS, 4), (Source.HOOKS, 7)}
    assert sources.wanted([], 9, True, True) == frozenset()


def test_a_row_is_read_by_the_strategy_that_its_id_names() -> None:
    rid = str(Rid(mask([0, 3]), True, "task_A", 1, 0, 0, Reading.COLLECT))
    found = pieces([rid, _rid(1)], [0, 0], [2, 2])
    assert sources.of(found[0], 4, True, True) == ((Source.COLLECT, 0), (Source.COLLECT, 3))
    assert sources.of(found[1], 4, True, True) == ((Source.HOOKS, 0), (Source.HOOKS, 3))
    assert len(runs(found)) == 2


@pytest.mark.parametrize(
    ("hooks", "collects", "expected"),
    [
        (True, True, "hooks 0-3, exits 1-3, collect 1-2, bare 1-2, normed 3"),
        (True, False, "hooks 0-3, exits 1-3, normed 3"),
        (False, True, "collect 0-3, normed 3"),
    ],
)
def test_a_check_reads_every_boundary_at_every_place_there_is(hooks: bool, collects: bool, expected: str) -> None:
    order = sources.of_check(3, hooks, collects)
    found = []
    for source in dict.fromkeys(source for source, _ in order):
        ks = [k for other, k in order if other is source]
        assert ks == list(range(ks[0], ks[-1] + 1))
        found.append(f"{source} {ks[0]}" + (f"-{ks[-1]}" if len(ks) > 1 else ""))
    assert ", ".join(found) == expected


def test_neighbours_that_ask_the_same_share_a_copy() -> None:
    found = pieces([_rid(0), _rid(1), "other", _rid(2), _rid(3, (9,))], [0] * 5, [2, 2, 2, 2, 2])
    assert [[p.rid.row for p in run] for run in runs(found)] == [[0, 1], [2], [3]]


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(1, 12))
def test_a_run_that_is_cut_covers_the_same_tokens_in_order(counts: list[int], most_rows: int) -> None:
    names = [str(Rid(mask((1,)), True, "task_A", 1, row, 0)) for row in range(len(counts))]
    (run,) = runs(pieces(names, [5] * len(counts), counts))
    parts = cut(run, most_rows)
    places = [
        [(piece.rid.row, piece.start + i, piece.position + i) for piece in part for i in range(piece.count)]
        for part in parts
    ]
    whole = [(piece.rid.row, piece.start + i, piece.position + i) for piece in run for i in range(piece.count)]
    assert [place for part in places for place in part] == whole
    assert all(len(part) == most_rows for part in places[:-1])
    assert 0 < len(places[-1]) <= most_rows
