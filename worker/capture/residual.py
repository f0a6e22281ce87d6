"""Reading the residual stream: how this release and this model carry it between blocks.

SGLang up to 0.5.16 hands `(hidden_states, residual)` from block to block; 0.5.22 and later keep the residual in
`forward_batch.residual_stream`, where what a block returns may still owe an all-reduce. Each reader returns a tensor of
its own, [N, H]: later kernels overwrite their inputs.
"""

from collections.abc import Mapping
from typing import Any

import torch


def stream_at_entry(arguments: Mapping[str, Any]) -> torch.Tensor:
    """The residual stream at a block's entry, from the block's own arguments by name.

    With tensor parallelism this may run a collective: every rank must call it.
    """
    return _stream(arguments["hidden_states"], arguments.get("residual"), arguments["forward_batch"])


def stream_at_exit(output: Any, batch: Any) -> torch.Tensor:
    """The residual stream after a block, from what the block returned. May run a collective, as above."""
    hidden, residual = _parts(output)
    return _stream(hidden, residual, batch)


def bare_at_exit(output: Any, like: torch.Tensor) -> torch.Tensor:
    """What the block returned, with its residual left out; zeros where that is no tensor yet."""
    hidden, _ = _parts(output)
    return hidden.clone() if isinstance(hidden, torch.Tensor) else torch.zeros_like(like)


def _parts(output: Any) -> tuple[Any, torch.Tensor | None]:
    if not isinstance(output, tuple):
        return output, None
    hidden, second = output[0], output[1] if len(output) > 1 else None
    is_residual = isinstance(second, torch.Tensor) and isinstance(hidden, torch.Tensor) and second.shape == hidden.shape
    return hidden, second if is_residual else None


def _stream(hidden: Any, residual: torch.Tensor | None, batch: Any) -> torch.Tensor:
    if getattr(batch, "residual_stream", None) is not None:
        from sglang.srt.layers.layer_boundary.residual import batch as residual_batch

        snapshot: torch.Tensor = residual_batch.snapshot(hidden, batch)
        return snapshot.clone() if snapshot is hidden else snapshot
    stream: torch.Tensor = hidden.clone() if residual is None else hidden + residual
    return stream


def stream_at_norm(inputs: tuple[Any, ...], output: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Boundary L and the final hidden state, from the final norm's inputs and output.

    A fused norm returns `(normed, residual)`, the residual being the sum it normalised; a plain one is given the sum.
    """
    if isinstance(output, tuple):
        normed, residual = output[0], output[1]
    else:
        normed, residual = output, inputs[0]
    return residual, normed
