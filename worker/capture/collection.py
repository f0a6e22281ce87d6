"""The `collect` strategy: the model's own collection of block entries, switched on around one forward.

Models that SGLang serves as EAGLE-3 targets collect the entries of the blocks named in `layers_to_capture` and return
them beside the hidden states. Left on, that changes what the model returns, and whatever reads it has to know. Here it
is on for one forward, and what it adds is taken off again before anybody else sees it. A block's entry k is boundary k,
in every family; only the setters of the families count differently.
"""

from typing import Any

import torch

from worker.capture.stack import Stack

_NAMES = "layers_to_capture"
_FLAG = "_is_layer_to_capture"
"""Some families look at a mark on the block instead of the list."""


class Collection:
    """Switches a model's own collection on and off."""

    def __init__(self, stack: Stack) -> None:
        self._stack = stack
        self._on: list[int] = []

    @property
    def offered(self) -> bool:
        """Whether the model collects at all."""
        return isinstance(getattr(self._stack.inner, _NAMES, None), list | tuple | set)

    def switch_on(self, boundaries: list[int]) -> None:
        """The next forward collects these boundaries, ascending, each in 1 … L − 1."""
        self._mark(boundaries)
        self._on = boundaries

    def switch_off(self) -> None:
        """The next forward collects nothing."""
        if self._on:
            self._mark([])
            self._on = []

    def take(self, output: Any) -> tuple[Any, dict[int, torch.Tensor]]:
        """What the forward would have returned without the collection, and the boundaries [N, H] it collected.

        None of them, if it returned another number than it was asked for.
        """
        asked = self._on
        self.switch_off()
        if not asked or not isinstance(output, tuple) or len(output) != 2:
            return output, {}
        hidden, collected = output
        if isinstance(collected, torch.Tensor):
            collected = collected.chunk(len(asked), dim=-1)
        if len(collected) != len(asked):
            return hidden, {}
        return hidden, dict(zip(asked, collected, strict=True))

    def _mark(self, boundaries: list[int]) -> None:
        setattr(self._stack.inner, _NAMES, boundaries)
        for index, block in enumerate(self._stack.blocks):
            if index in boundaries:
                setattr(block, _FLAG, True)
            elif hasattr(block, _FLAG):
                delattr(block, _FLAG)
