"""What a worker knows of a model before it loads it, read from the model folder without importing torch or the engine.

The hashes tell two workers whether they hold the same model. Weights are hashed by their safetensors headers, names and
sizes, never by their terabytes: a changed value inside a tensor of unchanged shape goes unnoticed.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from layertap.schemas.shards import Pins
from layertap.schemas.workers import ModelFacts

CONTEXT_MARGIN = 7
"""The engine refuses rows of context length − 6 tokens and longer."""
_CONTEXT_KEYS = ("max_sequence_length", "seq_length", "max_seq_len", "model_max_length", "max_position_embeddings")
_DTYPES = {"bfloat16": "BF16", "float16": "F16", "half": "F16", "float32": "F32", "float": "F32"}
_MAX_HEADER = 100_000_000
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
    "tiktoken.model",
)


class ModelError(Exception):
    """A model folder that cannot be used; the message names the file and the remedy."""


def discover(paths: Iterable[Path], max_row_tokens: int | None = None) -> list[ModelFacts]:
    """The models at `paths`, each a model folder or a folder of model folders, by name.

    A model is called like its folder. Hidden folders are passed over. Raises `ModelError`, also where two models have
    one name or a path holds none.
    """
    found: dict[str, ModelFacts] = {}
    for path in paths:
        for folder in _model_folders(path):
            one = facts(folder, max_row_tokens)
            other = found.get(one.name)
            if other is not None and other.path != one.path:
                raise ModelError(f"{other.path} and {one.path} are both called {one.name}; rename one of the folders")
            found[one.name] = one
    return sorted(found.values(), key=lambda model: model.name)


def facts(path: Path, max_row_tokens: int | None = None) -> ModelFacts:
    """The facts of the model folder `path`. `max_row_tokens` lowers the longest row below what the context allows.

    `pins.dtype` is the safetensors name of the dtype that the model computes in (BF16, F16, F32). Raises `ModelError`.
    """
    path = path.resolve()
    config = _config(path)
    inner = _text_config(config)
    context = _positive(path, inner, *_CONTEXT_KEYS)
    longest = context - CONTEXT_MARGIN
    if longest < 1:
        raise ModelError(f"{path / 'config.json'}: a context of {context} tokens leaves no room for a row")
    return ModelFacts(
        name=path.name,
        path=str(path),
        num_layers=_positive(path, inner, "num_hidden_layers", "n_layer", "num_layers"),
        hidden_size=_positive(path, inner, "hidden_size", "n_embd", "d_model"),
        vocab_size=_positive(
            path, inner | {"vocab_size": inner.get("vocab_size", config.get("vocab_size"))}, "vocab_size"
        ),
        max_row_tokens=longest if max_row_tokens is None else min(longest, max_row_tokens),
        pins=Pins(
            model_hash=_model_hash(path),
            tokenizer_hash=_tokenizer_hash(path),
            chat_template_hash=_chat_template_hash(path),
            engine_version=engine_version(),
            dtype=_dtype(path, config, inner),
        ),
    )


def engine_version() -> str:
    """The installed SGLang's version. Raises `ModelError` if there is none."""
    try:
        return metadata.version("sglang")
    except metadata.PackageNotFoundError:
        raise ModelError('SGLang is not installed; install the worker: pip install "layertap[worker]"') from None


def _model_folders(path: Path) -> list[Path]:
    if not path.is_dir():
        raise ModelError(f"{path} is not a folder; name a model folder, or a folder of model folders")
    if (path / "config.json").exists():
        return [path]
    folders = [
        child for child in sorted(path.iterdir()) if not child.name.startswith(".") and (child / "config.json").exists()
    ]
    if not folders:
        raise ModelError(f"{path} has no config.json, and none of its folders has; a model folder needs one")
    return folders


def _config(path: Path) -> dict[str, Any]:
    file = path / "config.json"
    try:
        config = json.loads(file.read_bytes())
    except FileNotFoundError:
        raise ModelError(f"{file} is missing; copy the whole model folder") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{file} cannot be read ({error}); copy the model folder again") from error
    if not isinstance(config, dict):
        raise ModelError(f"{file} is not a JSON object; copy the model folder again")
    return config


def _text_config(config: dict[str, Any]) -> dict[str, Any]:
    """The language model's part: multimodal wrappers nest it."""
    for key in ("text_config", "llm_config", "language_config"):
        nested = config.get(key)
        if isinstance(nested, dict) and "num_hidden_layers" in nested:
            return nested
    return config


def _positive(path: Path, config: dict[str, Any], *keys: str) -> int:
    for key in keys:
        value = config.get(key)
        if value is None:
            continue
        if type(value) is not int or value < 1:
            raise ModelError(f"{path / 'config.json'}: {key} must be a positive whole number")
        return value
    raise ModelError(
        f"{path / 'config.json'} has no {keys[-1] if len(keys) > 3 else keys[0]}; is this a language model?"
    )


def _dtype(path: Path, config: dict[str, Any], inner: dict[str, Any]) -> str:
    for place in (inner, config):
        named = place.get("dtype") or place.get("torch_dtype")
        if isinstance(named, str):
            known = _DTYPES.get(named.removeprefix("torch."))
            if known is None:
                raise ModelError(f"{path / 'config.json'}: dtype {named} is none of bfloat16, float16, float32")
            return known
    stored = Counter(
        tensor["dtype"]
        for file in sorted(path.glob("*.safetensors"))
        for name, tensor in _tensors(file).items()
        if name != "__metadata__" and tensor.get("dtype") in _DTYPES.values()
    )
    if not stored:
        raise ModelError(f'{path / "config.json"} names no dtype, and no weights tell; add "dtype", as bfloat16')
    return str(stored.most_common(1)[0][0])


def _tensors(file: Path) -> dict[str, dict[str, Any]]:
    try:
        tensors: dict[str, dict[str, Any]] = json.loads(_safetensors_header(file))
    except ValueError as error:
        raise ModelError(f"{file} has a broken header ({error}); copy it again") from error
    return tensors


def _safetensors_header(file: Path) -> bytes:
    """The JSON header of a safetensors file."""
    with file.open("rb") as weights:
        size = int.from_bytes(weights.read(8), "little")
        header = weights.read(min(size, _MAX_HEADER))
    if len(header) != size or not header.startswith(b"{"):
        raise ModelError(f"{file} is not a whole safetensors file; copy it again (git-lfs pull, if it is a pointer)")
    return header


def _model_hash(path: Path) -> str:
    parts = [("config.json", (path / "config.json").read_bytes())]
    for file in _files(path, _WEIGHT_SUFFIXES):
        parts.append((file.name, str(file.stat().st_size).encode()))
        if file.suffix == ".safetensors":
            parts.append((file.name + " header", _safetensors_header(file)))
    parts += [(file.name, file.read_bytes()) for file in _files(path, (".safetensors.index.json", ".bin.index.json"))]
    return _digest(parts)


def _tokenizer_hash(path: Path) -> str:
    files = [path / name for name in _TOKENIZER_FILES if (path / name).is_file()]
    files += _files(path, (".tiktoken",)) + sorted(path.glob("tokenization_*.py"))
    return _digest([(file.name, file.read_bytes()) for file in files])


def _chat_template_hash(path: Path) -> str | None:
    """Of the template's text, wherever a model folder may keep it."""
    separate = path / "chat_template.jinja"
    if separate.is_file():
        return hashlib.sha256(separate.read_bytes()).hexdigest()
    for name in ("chat_template.json", "tokenizer_config.json"):
        try:
            template = json.loads((path / name).read_bytes()).get("chat_template")
        except FileNotFoundError:
            continue
        except (OSError, ValueError, AttributeError) as error:
            raise ModelError(f"{path / name} cannot be read ({error}); copy the model folder again") from error
        if template:
            text = template if isinstance(template, str) else json.dumps(template, sort_keys=True)
            return hashlib.sha256(text.encode()).hexdigest()
    return None


def _files(path: Path, suffixes: tuple[str, ...]) -> list[Path]:
    return sorted(file for file in path.iterdir() if file.name.endswith(suffixes) and file.is_file())


def _digest(parts: Sequence[tuple[str, bytes]]) -> str:
    """One sha256 of named parts; their lengths keep them apart."""
    whole = hashlib.sha256()
    for name, data in parts:
        whole.update(f"{name}\0{len(data)}\0".encode())
        whole.update(data)
    return whole.hexdigest()
