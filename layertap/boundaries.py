"""Boundaries: the one way Layertap numbers places in a model, and what other code bases call the same place.

Boundary k is the residual stream after the first k blocks, before any final norm: 0 is the embedding, L the last
block's output. Everything here is arithmetic on integers.
"""

from collections.abc import Sequence

from layertap.schemas.jobs import Preset
from layertap.schemas.shards import BoundaryNames


class BoundaryError(ValueError):
    """The asked boundaries do not fit the model; the message says which and what would."""


def resolve(layers: Sequence[int] | None, preset: Preset | None, num_layers: int) -> list[int]:
    """The ascending list of boundaries that `layers` or `preset` names on a model of `num_layers` blocks.

    Raises `BoundaryError` unless exactly one of the two is given and every boundary is unique and within 0 … L.
    """
    if (layers is None) == (preset is None):
        raise BoundaryError("give exactly one of layers and preset")
    if preset is not None:
        return _preset(preset, num_layers)
    assert layers is not None
    return check(layers, num_layers)


def check(layers: Sequence[int], num_layers: int | None) -> list[int]:
    """`layers` ascending, known to be non-empty, unique, and within 0 … `num_layers` where that is known."""
    if not layers:
        raise BoundaryError("layers is empty; name at least one boundary")
    repeated = sorted({k for k in layers if list(layers).count(k) > 1})
    if repeated:
        raise BoundaryError(f"boundary {repeated[0]} is named more than once; name each boundary once")
    for k in layers:
        if k < 0:
            raise BoundaryError(f"boundary {k} is negative; boundaries count from 0, the embedding")
        if num_layers is not None and k > num_layers:
            raise BoundaryError(f"boundary {k} is out of range; this model has boundaries 0 to {num_layers}")
    return sorted(layers)


def _preset(preset: Preset, num_layers: int) -> list[int]:
    eagle3 = [2, num_layers // 2, num_layers - 3]
    if not 2 < num_layers // 2 < num_layers - 3:
        raise BoundaryError(
            f"preset {preset} needs a model of at least 7 blocks, this one has {num_layers}; name layers instead"
        )
    return eagle3 if preset is Preset.EAGLE3 else [*eagle3, num_layers]


def names(boundary: int, num_layers: int | None) -> BoundaryNames:
    """What other code bases call `boundary`.

    - block output: 0-based index of the block whose output it is (SpecForge configs); the embedding has none.
    - Hugging Face: `output_hidden_states[k]`, except k = L, which has the final norm applied there.
    - SGLang `layers_to_capture` and vLLM count block entries: k for k < L, none for L.
    - SGLang `set_eagle3_layers_to_capture` of Llama and Qwen adds 1 to its ids.
    """
    entry = boundary if num_layers is None or boundary < num_layers else None
    return BoundaryNames(
        boundary=boundary,
        block_output=boundary - 1 if boundary else None,
        hf_output_hidden_states=entry,
        sglang_layers_to_capture=entry,
        sglang_eagle3_layer_id=entry - 1 if entry else None,
        vllm_aux_hidden_state_layer=entry,
    )
