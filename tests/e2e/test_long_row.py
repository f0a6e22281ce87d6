"""One row of many chunks: right to its last token, and in no more memory than a short one."""

import json
from pathlib import Path

import numpy as np
import pytest
import reference
import tiny_models
from fixtures_stack import Stack
from memory_peaks import forget_peak, peak_memory

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(1800)]

TOKENS = 16_000
BOUNDARIES = [0, 1, 2, 3]
HIDDEN = 1024
STATE_BYTES = TOKENS * (len(BOUNDARIES) + 1) * HIDDEN * 2
"""164 MB: a capture that kept them grew by 198 MB, one that does not by about 40 MB."""


@pytest.fixture
def wide(tmp_path: Path, tiny_llama: Path) -> Path:
    """A random Llama that attends fast and whose states weigh something: 3 blocks, one head, hidden size 1,024."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    given = json.loads((tiny_llama / "config.json").read_text())
    config = LlamaConfig(
        vocab_size=given["vocab_size"], hidden_size=HIDDEN, intermediate_size=HIDDEN, num_hidden_layers=3,
        num_attention_heads=1, num_key_value_heads=1, head_dim=32, max_position_embeddings=32_768,
        initializer_range=0.03, tie_word_embeddings=True, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    folder = tmp_path / "wide"
    torch.manual_seed(3)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    tiny_models.copy_tokenizer(tiny_llama, folder)
    return folder


def row(length: int) -> dict[str, list[int]]:
    return {"input_ids": np.random.default_rng(length).integers(3, 49152, length).tolist()}


def test_a_row_of_sixteen_chunks_is_right_and_takes_no_more_memory_than_one_of_four(stack: Stack, wide: Path) -> None:
    worker = stack.start_worker("worker", wide)
    stack.extract([row(4096)], "wide", BOUNDARIES)
    pids = [worker.child.pid, *worker.engine_pids()]
    before = sum(map(forget_peak, pids))
    (found,) = stack.extract([row(TOKENS)], "wide", BOUNDARIES)
    assert sum(map(peak_memory, pids)) - before < STATE_BYTES * 2 / 3
    assert found.input_ids.tolist() == row(TOKENS)["input_ids"]
    right = reference.states(wide, found.input_ids.tolist(), BOUNDARIES)
    for part in (slice(0, 1024), slice(TOKENS - 1024, TOKENS)):
        assert found.final_hidden_state is not None
        assert reference.relative_error(found.final_hidden_state[part], right.final[part]) < 0.02
        for k in BOUNDARIES:
            assert reference.relative_error(found.boundary(k)[part], right.boundaries[k][part]) < 0.02
