"""Random models with real shapes of attention, made where the test runs: bf16 folders without a tokenizer."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

VOCAB = 4096
CONTEXT = 8192


def make(name: str, folder: Path) -> Path:
    """Makes the model `name` at `folder`: a few blocks, random weights drawn so that no two boundaries are alike."""
    import torch

    torch.manual_seed(sorted(MODELS).index(name))
    model, config_extras = MODELS[name]()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            parameter.normal_()
            if parameter.ndim == 1:
                parameter.mul_(0.2).add_(0.0 if "bias" in parameter_name else 1.0)
            else:
                parameter.mul_(_gain(parameter_name) / float(parameter.shape[-1]) ** 0.5)
    model.to(torch.bfloat16).save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | config_extras))
    return folder


def _gain(name: str) -> float:
    if "embed_tokens" in name:
        return 30.0
    # Rounding lets experts in or out; what a single one adds is kept small, so that this is not taken for an error.
    if ".experts." in name and "down_proj" in name:
        return 0.05
    return 0.4 if "o_proj" in name or "down_proj" in name else 1.0


def _llama() -> tuple[Any, dict[str, Any]]:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=1024, intermediate_size=2048, num_hidden_layers=10, num_attention_heads=8,
        num_key_value_heads=4, head_dim=128, max_position_embeddings=CONTEXT, tie_word_embeddings=False,
    )  # fmt: skip
    return LlamaForCausalLM(config), {}


def _qwen3_moe() -> tuple[Any, dict[str, Any]]:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        vocab_size=VOCAB, hidden_size=1024, intermediate_size=2048, num_hidden_layers=8, num_attention_heads=8,
        num_key_value_heads=4, head_dim=128, max_position_embeddings=CONTEXT, tie_word_embeddings=False,
        num_experts=16, num_experts_per_tok=4, moe_intermediate_size=512, norm_topk_prob=True,
    )  # fmt: skip
    return Qwen3MoeForCausalLM(config), {}


def _deepseek_v3() -> tuple[Any, dict[str, Any]]:
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    yarn = {
        "type": "yarn", "rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096,
        "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
    }  # fmt: skip
    config = DeepseekV3Config(
        vocab_size=VOCAB, hidden_size=1024, intermediate_size=2048, moe_intermediate_size=512, num_hidden_layers=6,
        num_attention_heads=16, num_key_value_heads=16, n_shared_experts=1, n_routed_experts=16, num_experts_per_tok=4,
        n_group=4, topk_group=2, first_k_dense_replace=2, kv_lora_rank=512, q_lora_rank=768, qk_rope_head_dim=64,
        qk_nope_head_dim=128, v_head_dim=128, max_position_embeddings=163840, tie_word_embeddings=False,
        rope_scaling=yarn | {"rope_theta": 10000.0},
    )  # fmt: skip
    extras = {"topk_method": "noaux_tc", "moe_layer_freq": 1, "scoring_func": "sigmoid", "rope_theta": 10000.0}
    return DeepseekV3ForCausalLM(config), {**extras, "rope_scaling": yarn}


def _gpt_oss() -> tuple[Any, dict[str, Any]]:
    from transformers import GptOssConfig, GptOssForCausalLM

    config = GptOssConfig(
        vocab_size=VOCAB, hidden_size=1024, intermediate_size=512, num_hidden_layers=6, num_attention_heads=16,
        num_key_value_heads=4, head_dim=64, max_position_embeddings=CONTEXT, tie_word_embeddings=False,
        num_local_experts=16, num_experts_per_tok=4, sliding_window=128,
        layer_types=["sliding_attention", "full_attention"] * 3,
    )  # fmt: skip
    return GptOssForCausalLM(config), {"swiglu_limit": 7.0}


def _glm4_moe() -> tuple[Any, dict[str, Any]]:
    from transformers import Glm4MoeConfig, Glm4MoeForCausalLM

    config = Glm4MoeConfig(
        vocab_size=VOCAB, hidden_size=1024, intermediate_size=2048, moe_intermediate_size=512, num_hidden_layers=6,
        num_attention_heads=8, num_key_value_heads=4, head_dim=128, partial_rotary_factor=0.5, use_qk_norm=True,
        n_shared_experts=1, n_routed_experts=16, num_experts_per_tok=4, n_group=1, topk_group=1,
        first_k_dense_replace=1, max_position_embeddings=CONTEXT, tie_word_embeddings=False,
    )  # fmt: skip
    return Glm4MoeForCausalLM(config), {}


MODELS: dict[str, Callable[[], tuple[Any, dict[str, Any]]]] = {
    "llama": _llama,
    "qwen3-moe": _qwen3_moe,
    "deepseek-v3": _deepseek_v3,
    "gpt-oss": _gpt_oss,
    "glm4-moe": _glm4_moe,
}
