"""The model's own collection: on for one forward, and never seen by anybody else."""

from typing import Any

import pytest
import torch
from torch import nn

from worker.capture.collection import Collection
from worker.capture.stack import find_stack

HIDDEN = 4


class Inner(nn.Module):
    """Collects block entries as SGLang's models do: a list beside the hidden states, one tensor, or marked blocks."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Identity() for _ in range(5)])
        self.norm = nn.Identity()
        self.layers_to_capture: list[int] = []
        self.kind = kind

    def forward(self, hidden: torch.Tensor) -> Any:
        collected = []
        for index, block in enumerate(self.layers):
            marked = getattr(block, "_is_layer_to_capture", False)
            if marked if self.kind == "marks" else index in self.layers_to_capture:
                collected.append(hidden + index)
            hidden = block(hidden)
        if not collected:
            return hidden
        return hidden, torch.cat(collected, dim=-1) if self.kind == "packed" else collected


@pytest.mark.parametrize("kind", ["list", "packed", "marks"])
def test_what_is_collected_is_taken_off_and_the_next_forward_collects_nothing(kind: str) -> None:
    inner = Inner(kind)
    collection = Collection(find_stack(inner))
    assert collection.offered
    hidden = torch.randn(3, HIDDEN)
    collection.switch_on([1, 4])
    plain, collected = collection.take(inner(hidden))
    assert torch.equal(plain, hidden)
    assert {k: torch.equal(state, hidden + k) for k, state in collected.items()} == {1: True, 4: True}
    again, nothing = collection.take(inner(hidden))
    assert torch.equal(again, hidden)
    assert nothing == {}
    assert not any(hasattr(block, "_is_layer_to_capture") for block in inner.layers)


def test_a_collection_of_another_size_is_no_collection() -> None:
    collection = Collection(find_stack(Inner("list")))
    collection.switch_on([1, 2])
    hidden = torch.randn(3, HIDDEN)
    plain, collected = collection.take((hidden, [hidden]))
    assert plain is hidden
    assert collected == {}


def test_a_model_that_offers_none_is_known() -> None:
    inner = Inner("list")
    del inner.layers_to_capture
    assert not Collection(find_stack(inner)).offered
