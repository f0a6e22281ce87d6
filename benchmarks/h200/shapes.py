"""Model shapes and row mixes of the GPU benchmark. Weights are random: only shapes cost time."""

import json
from pathlib import Path

import numpy as np

VOCAB = 32000
MIXES = ["256", "2048", "16384", "131072", "sharegpt"]
"""Rows of that many tokens, or of many lengths."""
_LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": VOCAB, "hidden_act": "silu",
    "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "max_position_embeddings": 262144, "torch_dtype": "bfloat16",
    "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2, "head_dim": 128, "num_key_value_heads": 8,
}  # fmt: skip
SHAPES = {
    "llama-8b": _LLAMA | {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32}, "llama-1b": _LLAMA | {"hidden_size": 2048, "intermediate_size": 8192,
    "num_hidden_layers": 16, "num_attention_heads": 16}, "moe-30b-a3b": _LLAMA | {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 2048,
        "intermediate_size": 6144, "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4,
        "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True,
        "decoder_sparse_step": 1, "mlp_only_layers": [],
    },
}  # fmt: skip


def write(shape: str, folder: Path) -> Path:
    """A model folder that holds only `config.json`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(SHAPES[shape]))
    return folder


def lengths(mix: str, tokens: int) -> list[int]:
    """Row lengths that make up about `tokens` tokens: all of one length, or log-normal like ShareGPT."""
    if mix != "sharegpt":
        return [int(mix)] * max(1, tokens // int(mix))
    generator = np.random.default_rng(0)
    drawn: list[int] = []
    while sum(drawn) < tokens:
        drawn.append(int(np.clip(generator.lognormal(6.9, 0.9), 16, 16384)))
    return drawn


def rows(row_lengths: list[int]) -> list[np.ndarray]:
    """Random token ids of these lengths, int32."""
    generator = np.random.default_rng(1)
    return [generator.integers(3, VOCAB, n).astype(np.int32) for n in row_lengths]
