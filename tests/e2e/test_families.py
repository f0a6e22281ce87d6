"""What the capture delivers for many families of models, held against Hugging Face in float32.

Every row, every boundary and the final state are compared. One engine a family, no service.
"""

import asyncio
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import probed_engines
import pytest
import reference
import tiny_families
from probed_engines import CHUNK, Row
from reference import Reference, relative_error
from tiny_families import FAMILIES, VOCAB, WINDOW

from worker.engine.probe import Probed

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

TOLERANCE = 0.02
LENGTHS = (1, 2, 31, WINDOW, WINDOW + 1, CHUNK - 1, CHUNK, CHUNK + 1, 5, 700, 333)
"""Rows within a sliding window and far beyond it, of one chunk exactly, of one token more, of many chunks."""


class Extracted(NamedTuple):
    """A family's name, what the engine gave for each row, and what is right."""

    name: str
    found: list[Probed]
    right: list[Reference]


def rows() -> list[Row]:
    random = np.random.default_rng(5)
    return [random.integers(3, VOCAB, n).astype(np.int32) for n in LENGTHS]


def served(name: str) -> Path:
    """The model as SGLang serves it: without the values of the configuration that it ignores."""
    ignored = FAMILIES[name].ignored
    return tiny_families.variant(name, ignored) if ignored else tiny_families.make(name)


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def extracted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Extracted:
    name: str = request.param
    family = FAMILIES[name]
    spec = probed_engines.spec(tiny_families.make(name))
    directory = tmp_path_factory.mktemp(name) / "engine"
    run = asyncio.run(probed_engines.run(spec, directory, [rows()], range(family.blocks + 1)))
    (report,), (found,) = run.reports, run.lists
    assert (report.architecture, report.num_layers) == (family.architecture, family.blocks)
    right = [reference.states(served(name), row.tolist(), range(family.blocks + 1)) for row in rows()]
    return Extracted(name, found, right)


@pytest.mark.engine
def test_every_boundary_of_every_family_is_within_two_per_cent_of_hugging_face(extracted: Extracted) -> None:
    blocks = FAMILIES[extracted.name].blocks
    worst = dict.fromkeys([*range(blocks + 1), "final"], 0.0)
    for found, right in zip(extracted.found, extracted.right, strict=True):
        assert found.nonfinite == 0
        for k in range(blocks + 1):
            worst[k] = max(worst[k], relative_error(found.hidden_states[:, k], right.boundaries[k]))
        worst["final"] = max(worst["final"], relative_error(found.final_hidden_state, right.final))
    print(
        f"\n{extracted.name}: worst {100 * max(worst.values()):.2f} %,", {k: f"{100 * e:.2f}" for k, e in worst.items()}
    )
    assert max(worst.values()) < TOLERANCE, worst


@pytest.mark.engine
def test_a_boundary_of_any_family_off_by_one_would_fail_that(extracted: Extracted) -> None:
    blocks = FAMILIES[extracted.name].blocks
    for found, right in zip(extracted.found, extracted.right, strict=True):
        for k in range(blocks):
            assert relative_error(found.hidden_states[:, k], right.boundaries[k + 1]) > 2 * TOLERANCE, k
            assert relative_error(found.hidden_states[:, k + 1], right.boundaries[k]) > 2 * TOLERANCE, k
        assert relative_error(found.hidden_states[:, blocks], right.final) > 2 * TOLERANCE
        assert relative_error(found.final_hidden_state, right.boundaries[blocks]) > 2 * TOLERANCE


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_the_reference_reads_what_enters_each_block(name: str) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    family, folder = FAMILIES[name], tiny_families.make(name)
    row = rows()[2]
    right = reference.states(folder, row.tolist(), range(family.blocks + 1))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    entering, leaving = enter_and_leave(model, row)
    assert len(entering) == family.blocks
    for k, stream in enumerate([*entering, leaving[-1]]):
        assert relative_error(right.boundaries[k], stream) < 1e-5, k
    for k in range(family.blocks):
        assert relative_error(right.boundaries[k + 1], leaving[k]) < 1e-5, k


def enter_and_leave(model: Any, row: Row) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """What goes into each block of a Hugging Face model, and what comes out of it, [S, H] each."""
    import torch

    entering: list[np.ndarray] = []
    leaving: list[np.ndarray] = []

    def seen(module: object, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        entering.append(inputs[0][0].numpy())
        leaving.append((output[0] if isinstance(output, tuple) else output)[0].numpy())

    for block in model.model.layers:
        block.register_forward_hook(seen)
    with torch.inference_mode():
        model(torch.from_numpy(row).long()[None], use_cache=False)
    return entering, leaving


MARKED = [(name, key) for name, family in sorted(FAMILIES.items()) for key in {**family.marks, **family.ignored}]


@pytest.mark.parametrize(("name", "key"), MARKED)
def test_what_sets_a_family_apart_shows_in_its_states(name: str, key: str) -> None:
    family = FAMILIES[name]
    long = rows()[LENGTHS.index(333)].tolist()
    ours, other = (
        reference.states(model, long, range(family.blocks + 1))
        for model in (
            tiny_families.make(name),
            tiny_families.variant(name, {key: {**family.marks, **family.ignored}[key]}),
        )
    )
    for k in range(1, family.blocks + 1):
        assert relative_error(other.boundaries[k], ours.boundaries[k]) > 2 * TOLERANCE, k
