"""The layout's promises, checked by reading its files with the safetensors library."""

import tempfile
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import safetensors
from fixtures_client import NUMPY_DTYPES, shard_bytes
from hypothesis import given, settings
from hypothesis import strategies as st

from layertap.layout import DTYPE_BYTES, PAGE, ShardLayout, shard_bytes_estimate, token_bytes

layouts = st.builds(
    ShardLayout.of,
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=12),
    boundaries=st.lists(st.integers(0, 80), min_size=1, max_size=5, unique=True).map(sorted),
    hidden_size=st.integers(1, 24),
    dtype=st.sampled_from(sorted(DTYPE_BYTES)),
    with_final=st.booleans(),
    metadata=st.dictionaries(st.text(min_size=1, max_size=12), st.text(max_size=40), max_size=4),
)


def _tensors(layout: ShardLayout) -> dict[str, np.ndarray]:
    dtypes = {**NUMPY_DTYPES, "I64": np.dtype("<i8"), "U8": np.dtype("u1")}
    random = np.random.default_rng(1)
    return {
        name: random.integers(0, 100, place.shape).astype(dtypes[place.dtype]) for name, place in layout.tensors.items()
    }


@settings(max_examples=60, deadline=None)
@given(layout=layouts)
def test_the_safetensors_library_reads_what_the_layout_places(layout: ShardLayout) -> None:
    wanted = _tensors(layout)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "shard.safetensors")
        path.write_bytes(shard_bytes(layout, wanted))
        with safetensors.safe_open(path, framework="numpy") as file:
            assert set(file.keys()) == set(wanted)
            assert (file.metadata() or {}) == dict(layout.metadata)
            for name, array in wanted.items():
                read = file.get_tensor(name)
                assert read.dtype == array.dtype
                np.testing.assert_array_equal(read, array)


@given(layout=layouts)
def test_the_data_starts_on_a_page_and_has_no_gap(layout: ShardLayout) -> None:
    places = list(layout.tensors.values())
    assert places[0].name == "hidden_states"
    assert places[0].start == layout.data_start == len(layout.header())
    assert layout.data_start % PAGE == 0
    for before, after in pairwise(places):
        assert before.start + before.nbytes == after.start
    assert layout.nbytes == places[-1].start + places[-1].nbytes


@given(layout=layouts, data=st.data())
def test_a_shard_that_loses_rows_keeps_its_header_size(layout: ShardLayout, data: st.DataObject) -> None:
    rows = range(len(layout.lengths))
    kept = data.draw(st.sets(st.sampled_from(rows), min_size=1))
    smaller = layout.without(set(rows) - kept)
    assert smaller.lengths == tuple(layout.lengths[i] for i in sorted(kept))
    assert smaller.data_start == layout.data_start
    assert len(smaller.header()) == len(layout.header())
    assert smaller.tensors["hidden_states"].start == layout.tensors["hidden_states"].start
    assert smaller.nbytes <= layout.nbytes


@given(layout=layouts)
def test_offsets_cut_the_tokens_into_the_rows(layout: ShardLayout) -> None:
    assert layout.offsets[0] == 0
    assert layout.offsets[-1] == layout.tokens == sum(layout.lengths)
    assert [b - a for a, b in pairwise(layout.offsets)] == list(layout.lengths)


@given(layout=layouts)
def test_the_estimate_is_an_upper_bound_of_the_size(layout: ShardLayout) -> None:
    per_token = token_bytes(len(layout.boundaries), layout.hidden_size, layout.dtype, layout.with_final)
    assert layout.nbytes <= shard_bytes_estimate(layout.lengths, per_token)


@pytest.mark.parametrize("lengths", [[], [0], [3, 0]])
def test_a_layout_needs_rows_and_every_row_a_token(lengths: list[int]) -> None:
    with pytest.raises(ValueError, match="at least one"):
        ShardLayout.of(lengths, [1], 8, "BF16", with_final=True)


def test_an_unknown_dtype_is_refused() -> None:
    with pytest.raises(ValueError, match="F8"):
        ShardLayout.of([1], [1], 8, "F8", with_final=True)


def test_a_header_that_outgrew_its_place_is_refused() -> None:
    layout = ShardLayout((1,), (1,), 8, "BF16", True, (("k", "v" * 9000),), header_bytes=PAGE)
    with pytest.raises(ValueError, match="does not fit"):
        layout.header()


def test_no_row_left_is_refused() -> None:
    layout = ShardLayout.of([1, 2], [1], 8, "BF16", with_final=True)
    with pytest.raises(ValueError, match="no row"):
        layout.without({0, 1})
