"""What a model folder tells a worker, and what it says of a broken one."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from worker import models
from worker.models import ModelError, discover, facts

CONFIG = {
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "vocab_size": 100,
    "max_position_embeddings": 2048,
    "dtype": "bfloat16",
}


def model_folder(folder: Path, config: dict[str, Any] | str | None = None, **weights: Any) -> Path:
    folder.mkdir(parents=True)
    text = config if isinstance(config, str) else json.dumps(CONFIG if config is None else config)
    (folder / "config.json").write_text(text)
    save_file(
        {name: np.full((2, 3), value, np.float16) for name, value in (weights or {"w": 0}).items()},
        folder / "model.safetensors",
    )
    (folder / "tokenizer.json").write_text("{}")
    return folder


def test_smollm2_is_known_without_loading_it(smollm2: Path) -> None:
    found = facts(smollm2)
    assert (found.name, found.path) == ("SmolLM2-135M-Instruct", str(smollm2))
    assert (found.num_layers, found.hidden_size, found.vocab_size) == (30, 576, 49152)
    assert found.max_row_tokens == 8192 - 7
    assert found.pins.dtype == "BF16"
    assert found.pins.engine_version == models.engine_version()
    assert all(len(digest or "") == 64 for digest in (found.pins.model_hash, found.pins.chat_template_hash))


def test_reading_facts_imports_neither_torch_nor_the_engine(smollm2: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from worker.models import facts; facts(Path(sys.argv[1]));"
        "sys.exit(bool({'torch', 'sglang', 'transformers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", script, str(smollm2)], timeout=60, check=False).returncode == 0


def test_the_limit_of_the_worker_lowers_the_longest_row(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "m")
    assert facts(folder).max_row_tokens == 2041
    assert facts(folder, max_row_tokens=100).max_row_tokens == 100
    assert facts(folder, max_row_tokens=10_000).max_row_tokens == 2041


def test_a_multimodal_wrapper_is_read_by_its_text_config(tmp_path: Path) -> None:
    text = {key: value for key, value in CONFIG.items() if key != "dtype"}
    wrapper = {"text_config": text, "vision_config": {"hidden_size": 9}, "hidden_size": 7, "torch_dtype": "float16"}
    found = facts(model_folder(tmp_path / "m", wrapper))
    assert (found.num_layers, found.hidden_size, found.pins.dtype) == (4, 64, "F16")


def test_kimi_k2_5_is_read_by_its_text_config(tmp_path: Path) -> None:
    text = {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "kimi_k2",
        "num_hidden_layers": 61,
        "hidden_size": 7168,
        "vocab_size": 163840,
        "max_position_embeddings": 262144,
        "dtype": "bfloat16",
        "quantization_config": {"quant_method": "compressed-tensors"},
    }
    vision = {"vt_num_hidden_layers": 27, "vt_hidden_size": 1152, "text_hidden_size": 7168}
    wrapper = {"model_type": "kimi_k25", "text_config": text, "vision_config": vision, "dtype": "bfloat16"}
    found = facts(model_folder(tmp_path / "m", wrapper))
    assert (found.num_layers, found.hidden_size, found.vocab_size, found.pins.dtype) == (61, 7168, 163840, "BF16")
    assert found.max_row_tokens == 262144 - 7


def test_the_dtype_is_taken_from_the_weights_where_the_config_is_silent(tmp_path: Path) -> None:
    silent = {key: value for key, value in CONFIG.items() if key != "dtype"}
    assert facts(model_folder(tmp_path / "m", silent)).pins.dtype == "F16"


def test_copies_of_a_model_have_the_same_pins_wherever_they_lie(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "m")
    shutil.copytree(folder, tmp_path / "elsewhere" / "m")
    assert facts(tmp_path / "elsewhere" / "m").pins == facts(folder).pins


@pytest.mark.parametrize(
    ("file", "content", "changed"),
    [
        ("config.json", json.dumps(CONFIG | {"rope_theta": 5}), {"model_hash"}),
        ("tokenizer.json", '{"x": 1}', {"tokenizer_hash"}),
        ("chat_template.jinja", "{{ messages }}", {"chat_template_hash"}),
        ("tokenizer_config.json", '{"chat_template": "{{ messages }}"}', {"chat_template_hash", "tokenizer_hash"}),
        ("model.safetensors.index.json", "{}", {"model_hash"}),
        ("README.md", "hello", set()),
    ],
)
def test_a_changed_file_changes_the_hash_that_it_belongs_to(
    tmp_path: Path, file: str, content: str, changed: set[str]
) -> None:
    folder = model_folder(tmp_path / "m")
    before = facts(folder).pins
    (folder / file).write_text(content)
    after = facts(folder).pins
    assert {name for name in type(before).model_fields if getattr(before, name) != getattr(after, name)} == changed


def test_other_weights_of_another_shape_or_name_change_the_model_hash(tmp_path: Path) -> None:
    hashes = {facts(model_folder(tmp_path / name, **{name: 0})).pins.model_hash for name in ("a", "b", "longer_name")}
    assert len(hashes) == 3


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ("{broken", "cannot be read"),
        ("[]", "not a JSON object"),
        ("[" * 100_000, "cannot be read"),
        ({}, "is this a language model"),
        ({**CONFIG, "hidden_size": "64"}, "hidden_size must be a positive whole number"),
        ({**CONFIG, "num_hidden_layers": 0}, "num_hidden_layers must be a positive whole number"),
        ({**CONFIG, "dtype": "int4"}, "dtype int4"),
        ({**CONFIG, "max_position_embeddings": 7}, "leaves no room"),
        ({k: v for k, v in CONFIG.items() if k != "vocab_size"}, "no vocab_size"),
        ({k: v for k, v in CONFIG.items() if k != "max_position_embeddings"}, "no max_position_embeddings"),
    ],
)
def test_a_broken_config_is_refused_by_file_and_field(tmp_path: Path, config: Any, says: str) -> None:
    folder = model_folder(tmp_path / "m", config)
    with pytest.raises(ModelError) as caught:
        facts(folder)
    assert says in str(caught.value)
    assert str(folder / "config.json") in str(caught.value)


def test_a_git_lfs_pointer_is_not_taken_for_weights(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "m")
    (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n")
    with pytest.raises(ModelError, match="git-lfs pull"):
        facts(folder)


def test_discovery_takes_model_folders_and_folders_of_them(tmp_path: Path) -> None:
    one = model_folder(tmp_path / "one")
    model_folder(tmp_path / "more" / "b")
    model_folder(tmp_path / "more" / "a")
    model_folder(tmp_path / "more" / ".half-made.partial")
    (tmp_path / "more" / "notes").mkdir()
    assert [m.name for m in discover([tmp_path / "more", one, one])] == ["a", "b", "one"]


def test_two_models_of_one_name_are_refused(tmp_path: Path) -> None:
    paths = [model_folder(tmp_path / "x" / "m"), model_folder(tmp_path / "y" / "m")]
    with pytest.raises(ModelError, match="both called m; rename"):
        discover(paths)


def test_a_path_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no config\.json"):
        discover([tmp_path])
    with pytest.raises(ModelError, match="not a folder"):
        discover([tmp_path / "missing"])
    with pytest.raises(ModelError, match="is missing"):
        facts(tmp_path)
