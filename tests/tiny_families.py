"""Random tiny models of further families: bf16 safetensors folders without a tokenizer, a few blocks each.

Shapes are small, structure is real: grouped queries, sliding windows far shorter than the rows, norms of queries and
keys, multipliers other than one. Weights are drawn around what transformers starts from, so that no norm is all ones,
and so that every block changes the residual stream by far more than rounding does.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tiny_models

from worker import demo_model

CACHE = tiny_models.CACHE.parent / "families-v1"
"""Made once for a checkout. To be renamed when anything about the models changes."""
VOCAB = 4096
CONTEXT = 2048
WINDOW = 64
"""Tokens of a sliding window, where a family has one."""


@dataclass(frozen=True)
class Family:
    """How a family's tiny model is made.

    `embedding` is the standard deviation of the embedding, `output` the gain of what attention and MLP add to the
    stream, `expert` that of a single expert among several. `marks` are values of the configuration without which the
    family would be another; `ignored` are values that SGLang serves the model with, whatever its configuration says.
    """

    architecture: str
    config: Mapping[str, Any]
    embedding: float = 1.0
    output: float = 0.4
    expert: float = 0.4
    marks: Mapping[str, Any] = field(default_factory=dict)
    ignored: Mapping[str, Any] = field(default_factory=dict)

    @property
    def blocks(self) -> int:
        """The number of blocks, L."""
        return int(self.config["num_hidden_layers"])


def make(name: str) -> Path:
    """The folder of the tiny model of the family `name`, one of `FAMILIES` or `UNSUPPORTED`."""
    return demo_model.make_once(CACHE / f"tiny-{name}", lambda folder: _make((FAMILIES | UNSUPPORTED)[name], folder))


def variant(name: str, change: Mapping[str, Any]) -> Path:
    """The same weights as `make(name)` under a configuration with the values `change`."""
    label = "-".join(change)
    return demo_model.make_once(CACHE / f"tiny-{name}-{label}", lambda folder: _vary(name, folder, change))


def _vary(name: str, folder: Path, change: Mapping[str, Any]) -> None:
    from transformers import AutoConfig

    source = make(name)
    for weights in source.glob("*.safetensors*"):
        (folder / weights.name).symlink_to(weights)
    config = AutoConfig.from_pretrained(source)
    for key, value in change.items():
        assert hasattr(config, key), key
        setattr(config, key, value)
    config.save_pretrained(folder)


def _make(family: Family, folder: Path) -> None:
    import torch
    import transformers
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    model_class = getattr(transformers, family.architecture)
    generator = torch.Generator().manual_seed(3)
    model = model_class(model_class.config_class(**family.config))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            drawn = torch.empty_like(parameter).normal_(generator=generator)
            if parameter.ndim == 1:
                # Norms start from ones, or from zeros where one is added to the weight; biases from zeros.
                parameter.add_(drawn, alpha=0.2)
            else:
                parameter.copy_(drawn * _scale(family, name, parameter))
    model.to(torch.bfloat16).save_pretrained(folder)


def _scale(family: Family, name: str, parameter: Any) -> float:
    if "embed_tokens" in name:
        return family.embedding
    gain = 1.0
    if ".experts." in name and "down_proj" in name:
        gain = family.expert
    elif "o_proj" in name or "down_proj" in name:
        gain = family.output
    elif "q_proj" in name:
        # Sharp enough that what a token attends to is not just the mean of the row.
        gain = 2.0
    elif "gate.weight" in name:
        # A sharp router: an expert that rounding lets in or out has a small share.
        gain = 3.0
    return gain / float(parameter.shape[-1]) ** 0.5


def _shape(**more: Any) -> dict[str, Any]:
    return {
        "vocab_size": VOCAB,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": CONTEXT,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        **more,
    }


_LOCAL, _GLOBAL = "sliding_attention", "full_attention"
_FLAT = 0.1
"""Where experts are weighed by sigmoids, one that rounding lets in or out has a full share: so all add little."""

FAMILIES: dict[str, Family] = {
    "qwen2": Family("Qwen2ForCausalLM", _shape()),
    "mistral": Family(
        "MistralForCausalLM",
        _shape(head_dim=32, num_key_value_heads=1, sliding_window=WINDOW),
        ignored={"sliding_window": None},
    ),
    "phi3": Family("Phi3ForCausalLM", _shape(sliding_window=WINDOW), ignored={"sliding_window": None}),
    "gemma3": Family(
        "Gemma3ForCausalLM",
        _shape(
            num_hidden_layers=8,
            head_dim=32,
            num_key_value_heads=1,
            query_pre_attn_scalar=24,
            sliding_window=WINDOW,
            layer_types=[_LOCAL, _LOCAL, _GLOBAL] * 2 + [_LOCAL, _GLOBAL],
            tie_word_embeddings=True,
        ),
        # What is embedded is multiplied by the root of the hidden size.
        embedding=0.2,
        marks={"sliding_window": CONTEXT},
    ),
    "olmo2": Family("Olmo2ForCausalLM", _shape()),
    "granite": Family(
        "GraniteForCausalLM",
        _shape(
            num_hidden_layers=8,
            embedding_multiplier=12.0,
            residual_multiplier=0.22,
            attention_multiplier=0.0625,
            logits_scaling=8.0,
            tie_word_embeddings=True,
        ),
        embedding=0.1,
        output=2.0,
        marks={"residual_multiplier": 1.0},
    ),
    "glm4": Family("Glm4ForCausalLM", _shape(head_dim=32, attention_bias=True), embedding=3.0),
    "glm4-moe": Family(
        "Glm4MoeForCausalLM",
        _shape(
            head_dim=32,
            attention_bias=True,
            use_qk_norm=True,
            n_routed_experts=8,
            num_experts_per_tok=4,
            moe_intermediate_size=64,
            routed_scaling_factor=1.5,
            first_k_dense_replace=1,
        ),
        expert=_FLAT,
    ),
    "mixtral": Family("MixtralForCausalLM", _shape(head_dim=32, num_local_experts=8, num_experts_per_tok=4)),
}

UNSUPPORTED: dict[str, Family] = {"cohere": Family("CohereForCausalLM", _shape(tie_word_embeddings=True))}
"""Families whose blocks hand on a residual that is in the hidden states already; what is read then is wrong."""
