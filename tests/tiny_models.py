"""Random tiny models of the families that tests run on: bf16 safetensors folders with SmolLM2's tokenizer and template.

The weights are drawn so that every block changes the residual stream by far more than rounding does, and every norm has
weights of its own: a boundary off by one, or a norm too many or too few, cannot pass for right.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from worker import demo_model

CACHE = Path(__file__).resolve().parent.parent / ".layertap" / "test-models" / "v1"
"""Made once for a checkout. To be renamed when anything about the models changes."""
NAMES = ("tiny-llama", "tiny-qwen3", "tiny-qwen3-moe")
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")


def smollm2() -> Path:
    """SmolLM2-135M-Instruct: 30 blocks, hidden size 576, bf16."""
    return demo_model.make(CACHE / demo_model.NAME)


def smollm2_float32() -> Path:
    """The same weights as `smollm2`, as float32: what is wrong with its states then is no rounding."""
    bf16 = smollm2()
    return demo_model.make_once(CACHE / f"{bf16.name}-float32", lambda folder: _widen(bf16, folder))


def _widen(bf16: Path, folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    shutil.copytree(bf16, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.safetensors"))
    weights = {name: tensor.float() for name, tensor in load_file(bf16 / "model.safetensors").items()}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((bf16 / "config.json").read_text())
    config.pop("torch_dtype", None)
    (folder / "config.json").write_text(json.dumps({**config, "dtype": "float32"}))


def tiny(name: str) -> Path:
    """The tiny model `name`, one of `NAMES`: 8 or 9 blocks, hidden size 128, context 4,096, vocabulary 49,152."""
    return demo_model.make_once(CACHE / name, lambda folder: _make(name, folder, smollm2()))


def copy_tokenizer(model: Path, folder: Path) -> None:
    """Gives a model folder the tokenizer of another."""
    for file in _TOKENIZER_FILES:
        shutil.copyfile(model / file, folder / file)


def _make(name: str, folder: Path, tokenizer: Path) -> None:
    import torch
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    copy_tokenizer(tokenizer, folder)
    generator = torch.Generator().manual_seed(NAMES.index(name))
    model = _MODELS[name]()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            parameter.normal_(generator=generator)
            if parameter.ndim == 1:
                parameter.mul_(0.2).add_(1.0)
            else:
                parameter.mul_(_scale(parameter_name, parameter))
    model.to(torch.bfloat16).save_pretrained(folder)


def _scale(name: str, parameter: Any) -> float:
    """The embedding stays the larger part of the stream, so that bf16 keeps well within a per cent of float32."""
    if "embed_tokens" in name:
        return 1.0
    gain = 1.0
    if "o_proj" in name or "down_proj" in name:
        gain = 0.4
    elif "mlp.gate.weight" in name:
        # A sharp router: an expert that rounding lets in or out has a small share.
        gain = 3.0
    return gain / float(parameter.shape[-1]) ** 0.5


def _shape(**more: Any) -> dict[str, Any]:
    return {
        "vocab_size": 49152,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 4096,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
        **more,
    }


def _llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**_shape(num_hidden_layers=8, tie_word_embeddings=True)))


def _qwen3() -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(Qwen3Config(**_shape(num_hidden_layers=9, tie_word_embeddings=False)))


def _qwen3_moe() -> Any:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    experts = {"num_experts": 8, "num_experts_per_tok": 4, "moe_intermediate_size": 128, "norm_topk_prob": True}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**_shape(num_hidden_layers=8, tie_word_embeddings=False, **experts)))


_MODELS: dict[str, Callable[[], Any]] = {"tiny-llama": _llama, "tiny-qwen3": _qwen3, "tiny-qwen3-moe": _qwen3_moe}
