"""The capture on a language model inside a multimodal wrapper, built as SGLang's Kimi-K2.5 is."""

import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from worker.capture.addressing import Piece
from worker.capture.head import Head
from worker.capture.model_capture import ModelCapture
from worker.capture.rid import Reading, Rid, mask
from worker.capture.stack import find_stack

VOCAB, HIDDEN, LAYERS = 11, 4, 3
LENGTHS = (2, 3, 4)
"""The second row is somebody else's."""


class Block(nn.Module):
    def forward(self, positions: Any, hidden_states: Any, forward_batch: Any, residual: Any) -> Any:
        residual = hidden_states if residual is None else hidden_states + residual
        return residual * 0.5 + 1, residual


class Norm(nn.Module):
    def forward(self, hidden: Any, residual: Any = None) -> Any:
        total = hidden if residual is None else hidden + residual
        return total * 2, total


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCAB, HIDDEN)
        self.layers = nn.ModuleList([Block() for _ in range(LAYERS)])
        self.norm = Norm()
        self.layers_to_capture: list[int] = []

    def forward(self, input_ids: Any, positions: Any, forward_batch: Any, input_embeds: Any = None) -> Any:
        hidden, residual, collected = input_embeds, None, []
        for index, block in enumerate(self.layers):
            if index in self.layers_to_capture:
                collected.append(hidden + residual)
            hidden, residual = block(positions, hidden, forward_batch, residual)
        hidden, _ = self.norm(hidden, residual)
        return (hidden, collected) if collected else hidden


class LanguageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = Inner()
        self.lm_head = nn.Linear(HIDDEN, VOCAB)
        self.logits_processor = SimpleNamespace(_get_logits=lambda hidden, head, metadata: head(hidden))

    def forward(self, input_ids: Any, positions: Any, forward_batch: Any, input_embeds: Any) -> Any:
        return self.model(input_ids, positions, forward_batch, input_embeds)


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(2 * LAYERS)])
        self.final_layernorm = Norm()


class Wrapper(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.vision_tower = Tower()
        self.language_model = LanguageModel()

    @property
    def lm_head(self) -> nn.Module:
        return self.language_model.lm_head

    def forward(self, input_ids: Any, positions: Any, forward_batch: Any) -> Any:
        embeds = self.language_model.model.embed_tokens(input_ids)
        return self.language_model(
            input_ids=None, positions=positions, forward_batch=forward_batch, input_embeds=embeds
        )


class Sink:
    def __init__(self) -> None:
        self.rows: dict[int, tuple[list[torch.Tensor], torch.Tensor]] = {}
        self.heads: dict[int, list[float] | None] = {}

    def states(self, piece_states: Any, found: list[Piece], final: Any) -> None:
        for piece in found:
            rows = slice(piece.start, piece.start + piece.count)
            last = final[rows] if piece.rid.final else torch.empty(0)
            self.rows[piece.rid.row] = [state[rows] for state in piece_states(piece)], last

    def log_probabilities(self, piece: Piece, found: list[float] | None) -> None:
        self.heads[piece.rid.row] = found


ASKED = Rid(mask(range(LAYERS + 1)), True, "task_A", 1, 0, 0)


def captured(wrapper: Wrapper, ids: torch.Tensor, asked: Rid) -> tuple[Sink, torch.Tensor]:
    """What one forward of three requests hands over, and what it returns."""
    batch = SimpleNamespace(
        forward_mode=SimpleNamespace(is_extend=lambda: True, name="EXTEND"),
        rids=[str(asked), "theirs", str(replace(asked, row=1))],
        extend_prefix_lens_cpu=[0, 0, 0],
        extend_seq_lens_cpu=list(LENGTHS),
        input_ids=ids,
    )
    sink = Sink()
    capture = ModelCapture(find_stack(wrapper), Head(wrapper), sink)
    capture.attach()
    returned = wrapper(ids, torch.arange(len(ids)), batch)
    capture.detach()
    return sink, returned


@pytest.fixture
def wrapper() -> Wrapper:
    torch.manual_seed(0)
    return Wrapper()


@pytest.fixture
def ids() -> torch.Tensor:
    return torch.arange(sum(LENGTHS)) % VOCAB


@pytest.mark.parametrize("reading", [Reading.HOOKS, Reading.COLLECT])
def test_rows_of_text_are_captured_below_the_wrapper(wrapper: Wrapper, ids: torch.Tensor, reading: Reading) -> None:
    with torch.inference_mode():
        sink, returned = captured(wrapper, ids, replace(ASKED, reading=reading))
        boundaries = [wrapper.language_model.model.embed_tokens(ids)]
        for _ in range(LAYERS):
            boundaries.append(boundaries[-1] * 1.5 + 1)
    assert torch.allclose(returned, boundaries[-1] * 2)
    for row, rows in ((0, slice(0, 2)), (1, slice(5, 9))):
        states, final = sink.rows[row]
        assert len(states) == LAYERS + 1
        for state, right in zip(states, boundaries, strict=True):
            assert torch.allclose(state, right[rows])
        assert torch.equal(final, returned[rows])
    assert set(sink.rows) == {0, 1}


class UnseenNorm(Norm):
    """One that is called past its hooks."""

    def __call__(self, *states: Any) -> Any:
        return self.forward(*states)


def test_a_row_whose_final_norm_was_not_seen_is_left_unwritten(wrapper: Wrapper, ids: torch.Tensor) -> None:
    wrapper.language_model.model.norm = UnseenNorm()
    without = replace(ASKED, boundaries=mask(range(LAYERS)))
    sink, _ = captured(wrapper, ids, without)
    assert sink.rows == {}
    sink, _ = captured(wrapper, ids, replace(without, final=False))
    assert set(sink.rows) == {0, 1}


def test_the_head_asked_is_the_language_models(
    wrapper: Wrapper, ids: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    metadata = SimpleNamespace(LogitsMetadata=SimpleNamespace(from_forward_batch=lambda batch: None))
    monkeypatch.setitem(sys.modules, "sglang.srt.layers.logits_processor", metadata)
    with torch.inference_mode():
        sink, returned = captured(wrapper, ids, replace(ASKED, reading=Reading.CHECK))
        distribution = torch.log_softmax(wrapper.lm_head(returned[5:9]), dim=-1)
    found = sink.heads[1]
    assert found is not None
    assert torch.allclose(torch.tensor(found), distribution[:-1].gather(1, ids[6:9, None]).squeeze(1))
