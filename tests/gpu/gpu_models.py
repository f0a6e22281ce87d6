"""Random models with real shapes of attention, made where the test runs: bf16 folders without a tokenizer."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

VOCAB = 4096
CONTEXT = 8192


def make(name: str, folder: Path) -> Path:
    """Makes the model `name` at `folder`: a few blocks, random weights drawn so that no two boundaries are alike.

    Hugging Face reads the same language model at `plain(folder)`.
    """
    import torch

    if name in WRAPPERS:
        return WRAPPERS[name](folder)
    torch.manual_seed(sorted(MODELS).index(name))
    return _save(*MODELS[name](), folder)


def plain(folder: Path) -> Path:
    """The folder of the language model alone: of a wrapper's, one inside its own."""
    inner = folder / "language_model"
    return inner if inner.is_dir() else folder


def _save(model: Any, config_extras: dict[str, Any], folder: Path) -> Path:
    import torch

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


def _deepseek_v3(groups: int = 4, top_groups: int = 2, dense: int = 2) -> tuple[Any, dict[str, Any]]:
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    yarn = {
        "type": "yarn", "rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096,
        "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
    }  # fmt: skip
    config = DeepseekV3Config(
        vocab_size=VOCAB, hidden_size=1024, intermediate_size=2048, moe_intermediate_size=512, num_hidden_layers=6,
        num_attention_heads=16, num_key_value_heads=16, n_shared_experts=1, n_routed_experts=16, num_experts_per_tok=4,
        n_group=groups, topk_group=top_groups, first_k_dense_replace=dense, kv_lora_rank=512, q_lora_rank=768,
        qk_rope_head_dim=64, qk_nope_head_dim=128, v_head_dim=128, max_position_embeddings=163840,
        tie_word_embeddings=False, rope_scaling=yarn | {"rope_theta": 10000.0},
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


_VISION_SHAPES = {
    "vision_tower.patch_embed.proj": (64, 3, 14, 14),
    "vision_tower.encoder.blocks.0.norm0": (64,),
    "vision_tower.encoder.blocks.0.norm1": (64,),
    "vision_tower.encoder.blocks.0.wqkv": (192, 64),
    "vision_tower.encoder.blocks.0.wo": (64, 64),
    "vision_tower.encoder.blocks.0.mlp.fc0": (128, 64),
    "vision_tower.encoder.blocks.0.mlp.fc1": (64, 128),
    "vision_tower.encoder.final_layernorm": (64,),
    "mm_projector.pre_norm": (64,),
    "mm_projector.proj.0": (256, 256),
    "mm_projector.proj.2": (1024, 256),
}
"""Kimi's vision tower of one block, and its projector: the weights by name, each with a bias."""


def _kimi_k25(folder: Path) -> Path:
    import torch
    from safetensors.torch import load_file, save_file

    # With this seed no router of a row of one token is near a tie, where rounding would let another expert in.
    torch.manual_seed(7)
    inner = _save(*_deepseek_v3(groups=1, top_groups=1, dense=1), folder / "language_model")
    weights = {f"language_model.{name}": weight for name, weight in load_file(inner / "model.safetensors").items()}
    shapes = {"vision_tower.patch_embed.pos_emb.weight": (4, 4, 64)}
    for name, shape in _VISION_SHAPES.items():
        shapes |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
    weights |= {name: 0.02 * torch.randn(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    vision = {
        "patch_size": 14, "init_pos_emb_height": 4, "init_pos_emb_width": 4, "init_pos_emb_time": 4,
        "num_attention_heads": 4, "num_hidden_layers": 1, "hidden_size": 64, "vt_hidden_size": 64,
        "intermediate_size": 128, "mm_hidden_size": 64, "text_hidden_size": 1024,
    }  # fmt: skip
    config = {
        "architectures": ["KimiK25ForConditionalGeneration"], "model_type": "kimi_k25", "dtype": "bfloat16",
        "media_placeholder_token_id": VOCAB - 1, "tie_word_embeddings": False, "vision_config": vision,
        "text_config": json.loads((inner / "config.json").read_text()),
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    # The class wants a processor at its start, and that is code in the model folder: `--trust-remote-code`.
    shutil.copy(Path(__file__).with_name("kimi_processor.py"), folder)
    processor = {"auto_map": {"AutoProcessor": "kimi_processor.KimiProcessor"}}
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    return folder


WRAPPERS: dict[str, Callable[[Path], Path]] = {"kimi-k2.5": _kimi_k25}
"""Models around a language model, which their makers put at `plain(folder)` as well."""

NAMES = sorted([*MODELS, *WRAPPERS])
