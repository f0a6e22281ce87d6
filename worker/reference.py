"""Hugging Face in float32, one row at a time: the values that extracted states are held against."""

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

States = npt.NDArray[np.float32]


class Reference(NamedTuple):
    """`boundaries[k]` [S, H] before any final norm, k = L included; `final` [S, H] after the final norm."""

    boundaries: dict[int, States]
    final: States


def states(model_dir: Path, input_ids: Sequence[int], layers: Sequence[int], dtype: str = "float32") -> Reference:
    """The row's states at the boundaries `layers`, and its final hidden state. S = len(input_ids).

    `dtype` is what Hugging Face computes in; another than float32 tells what rounding alone costs.
    """
    import torch

    model = _model(model_dir, dtype)
    before_norm: list[Any] = []
    # `output_hidden_states` has the norm applied to its last entry, so boundary L is read where the norm takes it in.
    hook = model.model.norm.register_forward_pre_hook(lambda module, inputs: before_norm.append(inputs[0]))
    try:
        with torch.inference_mode():
            ids = torch.tensor([list(map(int, input_ids))])
            out = model.model(input_ids=ids, output_hidden_states=True, use_cache=False)
    finally:
        hook.remove()
    (last,) = before_norm
    entries = [*out.hidden_states[:-1], last]
    return Reference({k: entries[k][0].float().numpy() for k in layers}, out.last_hidden_state[0].float().numpy())


def boundaries(model_dir: Path, input_ids: Sequence[int], layers: Sequence[int]) -> dict[int, States]:
    """The row's states at the boundaries `layers`, float32 [S, H] each; boundary L is before the final norm."""
    return states(model_dir, input_ids, layers).boundaries


def final_hidden_state(model_dir: Path, input_ids: Sequence[int]) -> States:
    """Boundary L after the final norm, float32 [S, H]."""
    return states(model_dir, input_ids, []).final


def relative_error(a: npt.ArrayLike, b: npt.ArrayLike) -> float:
    """‖a − b‖ / ‖b‖ over the whole row, in float64; b is the reference."""
    found, right = np.asarray(a, dtype=np.float64), np.asarray(b, dtype=np.float64)
    if found.shape != right.shape:
        raise ValueError(f"shapes {found.shape} and {right.shape} differ")
    return float(np.linalg.norm(found - right) / np.linalg.norm(right))


@lru_cache(maxsize=4)
def _model(model_dir: Path, dtype: str) -> Any:
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    return AutoModelForCausalLM.from_pretrained(model_dir, dtype=getattr(torch, dtype), local_files_only=True).eval()
