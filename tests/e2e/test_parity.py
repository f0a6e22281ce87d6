"""What the capture delivers, held against Hugging Face in float32: every row, every boundary, the final state."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import reference
import tiny_models
from fixtures_stack import CHUNK, CHUNKED, Stack, open_stack

from layertap.reader import Extraction

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1800)]

TOLERANCE = 0.02
EXACT = 0.001
"""What is allowed where the engine computes in float32 too."""
EXAMPLES = (Path(__file__).parents[2] / "examples" / "conversations.jsonl").read_text().splitlines()
LENGTHS = (1, 2, 3, 31, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 5, 700, 8, 333, 1500, 64)
"""Rows of very different lengths, of one chunk exactly and of one token more, of many chunks."""
BLOCKS = {"tiny-llama": 8, "tiny-qwen3": 9, "tiny-qwen3-moe": 8, "SmolLM2-135M-Instruct": 30}


class Chain(NamedTuple):
    """A stack whose worker offers every model, and whether its engine must cut rows into chunks."""

    stack: Stack
    chunked: bool


@pytest.fixture(scope="module", params=[True, False], ids=["chunked", "whole"])
def chain(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, smollm2: Path) -> Iterator[Chain]:
    models = [*map(tiny_models.tiny, tiny_models.NAMES), smollm2, tiny_models.smollm2_float32()]
    with open_stack(tmp_path_factory.mktemp("parity")) as stack:
        stack.start_worker("worker", *models, flags=CHUNKED if request.param else ())
        yield Chain(stack, request.param)


def model_dir(name: str) -> Path:
    return tiny_models.tiny(name) if name in tiny_models.NAMES else tiny_models.smollm2()


def rows_of_many_lengths() -> list[dict[str, list[int]] | str]:
    """Rows of random tokens, with conversations in between."""
    random = np.random.default_rng(11)
    ids: list[dict[str, list[int]] | str] = [{"input_ids": random.integers(3, 49152, n).tolist()} for n in LENGTHS]
    ids[3:3] = EXAMPLES[:3]
    return ids


def errors_against_the_reference(name: str, rows: Extraction) -> dict[str, float]:
    """The worst relative error over all rows, for each boundary and for the final state."""
    worst: dict[str, float] = {}
    layers = rows.manifest.layers
    for row in rows:
        right = reference.states(model_dir(name), row.input_ids.tolist(), layers)
        assert row.final_hidden_state is not None
        pairs = {f"boundary {k}": (row.boundary(k), right.boundaries[k]) for k in layers}
        pairs["final"] = (row.final_hidden_state, right.final)
        found = {p: reference.relative_error(a, b) for p, (a, b) in pairs.items()}
        worst = {place: max(error, worst.get(place, 0.0)) for place, error in found.items()}
    return worst


class Tiny(NamedTuple):
    """A tiny model, its number of blocks, and rows of many lengths extracted at every boundary and at a few."""

    name: str
    blocks: int
    every: Extraction
    few: Extraction


@pytest.fixture(scope="module", params=tiny_models.NAMES)
def tiny(request: pytest.FixtureRequest, chain: Chain) -> Tiny:
    name, rows = request.param, rows_of_many_lengths()
    blocks = BLOCKS[name]
    every = chain.stack.extract(rows, name, range(blocks + 1))
    few = chain.stack.extract(rows[:6], name, [0, 3, blocks - 1, blocks])
    return Tiny(name, blocks, every, few)


def test_every_row_and_boundary_is_within_two_per_cent_of_hugging_face(tiny: Tiny) -> None:
    assert len(tiny.every) == len(rows_of_many_lengths())
    assert max(len(row.input_ids) for row in tiny.every) > 10 * CHUNK
    worst = errors_against_the_reference(tiny.name, tiny.every)
    assert set(worst) == {*(f"boundary {k}" for k in range(tiny.blocks + 1)), "final"}
    assert max(worst.values()) < TOLERANCE, worst


def test_a_few_boundaries_are_as_right_as_all_of_them(tiny: Tiny) -> None:
    assert len(tiny.few) == 6
    worst = errors_against_the_reference(tiny.name, tiny.few)
    assert set(worst) == {*(f"boundary {k}" for k in (0, 3, tiny.blocks - 1, tiny.blocks)), "final"}
    assert max(worst.values()) < TOLERANCE, worst


def test_a_boundary_off_by_one_would_fail_the_two_per_cent(tiny: Tiny) -> None:
    for row in tiny.every:
        right = reference.states(model_dir(tiny.name), row.input_ids.tolist(), range(tiny.blocks + 1))
        for k in range(tiny.blocks):
            assert reference.relative_error(row.boundary(k), right.boundaries[k + 1]) > 2 * TOLERANCE, k
            assert reference.relative_error(row.boundary(k + 1), right.boundaries[k]) > 2 * TOLERANCE, k
        assert reference.relative_error(row.boundary(tiny.blocks), right.final) > 2 * TOLERANCE


SMOLLM2 = "SmolLM2-135M-Instruct"
SMOLLM2_FLOAT32 = f"{SMOLLM2}-float32"
LONGEST = max(EXAMPLES, key=len)
FEW = [*EXAMPLES[:2], EXAMPLES[12], LONGEST]
"""Real conversations, the shortest and the longest of the examples among them."""
SHORT = ['{"input_ids": [1, 2]}', '{"text": "A plain line."}']


@pytest.fixture(scope="module")
def smollm2_float32(chain: Chain) -> Extraction:
    return chain.stack.extract([*FEW, *SHORT], SMOLLM2_FLOAT32, range(31))


def test_smollm2_in_float32_is_far_within_two_per_cent_at_every_boundary(smollm2_float32: Extraction) -> None:
    assert len(smollm2_float32) == len(FEW) + len(SHORT)
    assert max(len(row.input_ids) for row in smollm2_float32) > 1500
    worst = errors_against_the_reference(SMOLLM2, smollm2_float32)
    assert max(worst.values()) < EXACT, worst


def test_a_boundary_of_smollm2_off_by_one_would_fail_that(smollm2_float32: Extraction) -> None:
    for row in list(smollm2_float32)[: len(FEW)]:
        right = reference.states(model_dir(SMOLLM2), row.input_ids.tolist(), range(31))
        for k in range(30):
            assert reference.relative_error(row.boundary(k), right.boundaries[k + 1]) > 2 * EXACT, k
            assert reference.relative_error(row.boundary(k + 1), right.boundaries[k]) > 2 * EXACT, k
        assert reference.relative_error(row.boundary(30), right.final) > 2 * EXACT


class Errors(NamedTuple):
    """Relative errors against float32, of the engine and of Hugging Face in bf16, by row and place."""

    ours: list[float]
    rounding: list[float]


def bf16_errors(rows: Extraction, first_token: int) -> Errors:
    """SmolLM2's errors from `first_token` of each row on, at every extracted boundary and of the final state."""
    errors = Errors([], [])
    layers = rows.manifest.layers
    for row in rows:
        ids = row.input_ids.tolist()
        right = reference.states(model_dir(SMOLLM2), ids, layers)
        rounded = reference.states(model_dir(SMOLLM2), ids, layers, "bfloat16")
        assert row.final_hidden_state is not None
        places = [(row.boundary(k), rounded.boundaries[k], right.boundaries[k]) for k in layers]
        for ours, theirs, exact in [*places, (row.final_hidden_state, rounded.final, right.final)]:
            errors.ours.append(reference.relative_error(ours[first_token:], exact[first_token:]))
            errors.rounding.append(reference.relative_error(theirs[first_token:], exact[first_token:]))
    return errors


def check_bf16(rows: Extraction) -> None:
    """SmolLM2 in bf16 is within 2 %, or as near to float32 as Hugging Face's own bf16 is.

    From the middle of SmolLM2 on, one number of a row's first token outweighs all else in the row, so that what is
    rounded off it decides the row's error, whoever computes it: that is held to the worst rounding over all rows. The
    other tokens are compared by themselves, row by row.
    """
    others = bf16_errors(rows, first_token=1)
    for ours, rounding in zip(others.ours, others.rounding, strict=True):
        assert ours < max(TOLERANCE, 1.25 * rounding)
    whole = bf16_errors(rows, first_token=0)
    assert max(whole.ours) < max(TOLERANCE, 1.25 * max(whole.rounding))


def test_smollm2_in_bf16_is_within_two_per_cent_or_within_what_bf16_allows(chain: Chain) -> None:
    rows = chain.stack.extract(FEW, SMOLLM2, [0, 1, 2, 15, 16, 28, 29, 30])
    assert len(rows) == len(FEW)
    check_bf16(rows)


@pytest.mark.slow
def test_every_example_conversation_is_right_at_every_boundary(chain: Chain) -> None:
    exact = chain.stack.extract(EXAMPLES, SMOLLM2_FLOAT32, range(31), shard_bytes=64 * 1024 * 1024)
    assert (len(exact), exact.manifest.row_errors) == (59, 1)
    worst = errors_against_the_reference(SMOLLM2, exact)
    assert max(worst.values()) < EXACT, worst
    rows = chain.stack.extract(EXAMPLES, SMOLLM2, range(31), shard_bytes=64 * 1024 * 1024)
    assert len(rows) == 59
    check_bf16(rows)
