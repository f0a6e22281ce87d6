"""The model's head as a witness: log-probabilities from a captured final hidden state, to be held against the engine's.

The head is the model's own, with its scale, soft cap and gather over ranks, so every rank must call it alike.
"""

from typing import Any

import torch
from torch import nn


class Head:
    """The head of a model, if it has one where SGLang's models have it."""

    def __init__(self, model: nn.Module) -> None:
        self._owner = next(
            (m for m in model.modules() if hasattr(m, "lm_head") and hasattr(m, "logits_processor")), None
        )

    def log_probabilities(self, final: torch.Tensor, ids: torch.Tensor, batch: Any) -> list[float] | None:
        """Of a piece's tokens [n] each but the first, given those before it; `final` is [n, H]. None without a head."""
        compute = getattr(getattr(self._owner, "logits_processor", None), "_get_logits", None)
        if compute is None or self._owner is None:
            return None
        from sglang.srt.layers.logits_processor import LogitsMetadata

        metadata = LogitsMetadata.from_forward_batch(batch)
        logits = compute(final, self._owner.lm_head, metadata)
        distribution = torch.log_softmax(logits.float(), dim=-1)
        following = ids[1:].to(device=distribution.device, dtype=torch.int64).unsqueeze(1)
        found: list[float] = distribution[:-1].gather(1, following).squeeze(1).tolist()
        return found
