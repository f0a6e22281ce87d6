"""Boundaries: what is accepted, and what other code bases call them."""

import pytest

from layertap.boundaries import BoundaryError, check, names, resolve
from layertap.schemas.jobs import Preset


def test_boundaries_come_back_ascending() -> None:
    assert resolve([59, 3, 31], None, 61) == [3, 31, 59]


def test_the_embedding_and_the_last_block_are_boundaries() -> None:
    assert resolve([0, 61], None, 61) == [0, 61]


@pytest.mark.parametrize(
    ("layers", "told"),
    [([], "empty"), ([3, 3], "boundary 3 is named more than once"), ([-1], "-1 is negative"), ([62], "0 to 61")],
)
def test_bad_boundaries_are_refused_with_what_would_fit(layers: list[int], told: str) -> None:
    with pytest.raises(BoundaryError, match=told):
        resolve(layers, None, 61)


def test_the_range_is_not_judged_before_the_model_is_known() -> None:
    assert check([1000], None) == [1000]


@pytest.mark.parametrize(("layers", "preset"), [(None, None), ([1], Preset.EAGLE3)])
def test_exactly_one_of_layers_and_preset_is_needed(layers: list[int] | None, preset: Preset | None) -> None:
    with pytest.raises(BoundaryError, match="exactly one"):
        resolve(layers, preset, 61)


@pytest.mark.parametrize(("blocks", "wanted"), [(30, [2, 15, 27]), (61, [2, 30, 58]), (7, [2, 3, 4])])
def test_the_eagle3_preset_is_low_middle_and_high(blocks: int, wanted: list[int]) -> None:
    assert resolve(None, Preset.EAGLE3, blocks) == wanted
    assert resolve(None, Preset.SPECULATORS, blocks) == [*wanted, blocks]


@pytest.mark.parametrize("blocks", range(1, 7))
def test_a_preset_on_a_model_too_small_for_it_is_refused(blocks: int) -> None:
    with pytest.raises(BoundaryError, match=f"this one has {blocks}"):
        resolve(None, Preset.EAGLE3, blocks)


def test_names_of_a_boundary_in_the_middle() -> None:
    found = names(31, 61)
    assert (found.block_output, found.hf_output_hidden_states) == (30, 31)
    assert (found.sglang_layers_to_capture, found.sglang_eagle3_layer_id) == (31, 30)
    assert found.vllm_aux_hidden_state_layer == 31


def test_the_embedding_is_no_block_output_and_no_eagle3_layer() -> None:
    found = names(0, 61)
    assert found.block_output is None
    assert found.sglang_eagle3_layer_id is None
    assert found.hf_output_hidden_states == 0


def test_the_last_block_has_no_name_where_others_apply_the_norm() -> None:
    found = names(61, 61)
    assert found.block_output == 60
    assert found.hf_output_hidden_states is None
    assert found.sglang_layers_to_capture is None
    assert found.vllm_aux_hidden_state_layer is None
