"""Tensor parallelism: an engine of two ranks delivers what one of one rank delivers, and what is right."""

import asyncio
import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import probed_engines
import pytest
import reference
import tiny_models
from probed_engines import CHUNK, Row, Run
from reference import Reference, relative_error

from worker.engine import processes
from worker.engine.probe import Probed

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(900)]

TOLERANCE = 0.02
EXACT = 0.001
"""What is allowed where the engine computes in float32 too."""
BLOCKS = 8
LENGTHS = (1, 2, 31, CHUNK - 1, CHUNK, CHUNK + 1, 5, 600, 333)
Places = dict[int | str, npt.NDArray[np.generic]]
"""A row's states [S, H] by boundary, and as `final`."""


def rows() -> list[Row]:
    random = np.random.default_rng(17)
    return [random.integers(3, 49152, n).astype(np.int32) for n in LENGTHS]


class Ranks(NamedTuple):
    """A model's rows, extracted in bf16 by one rank and by two and in float32 by two, and what is right."""

    name: str
    one: Run
    two: Run
    exact: Run
    right: list[Places]


@pytest.fixture(scope="module", params=["tiny-llama", "tiny-qwen3-moe"])
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    name: str = request.param
    model, directory = tiny_models.tiny(name), tmp_path_factory.mktemp(name)
    runs = [
        asyncio.run(
            probed_engines.run(
                probed_engines.spec(model, size, dtype),
                directory / f"{size}-{dtype}",
                [rows(), *([row] for row in rows())],
                range(BLOCKS + 1),
            )
        )
        for size, dtype in ((1, "BF16"), (2, "BF16"), (2, "F32"))
    ]
    right = [of_reference(reference.states(model, row.tolist(), range(BLOCKS + 1))) for row in rows()]
    return Ranks(name, runs[0], runs[1], runs[2], right)


def of_reference(right: Reference) -> Places:
    return {**right.boundaries, "final": right.final}


def together(run: Run) -> list[Places]:
    """The rows' states, extracted in one list."""
    return [of_probed(row) for row in run.lists[0]]


def alone(run: Run) -> list[Places]:
    """The rows' states, each extracted with no other row in the engine."""
    return [of_probed(row) for (row,) in run.lists[1:]]


def of_probed(row: Probed) -> Places:
    return {**{k: row.hidden_states[:, k] for k in range(BLOCKS + 1)}, "final": row.final_hidden_state}


def worst(found: list[Places], right: list[Places]) -> dict[int | str, float]:
    """The worst relative error over the rows, for each boundary and the final state."""
    pairs = list(zip(found, right, strict=True))
    return {place: max(relative_error(a[place], b[place]) for a, b in pairs) for place in right[0]}


def test_two_ranks_are_within_two_per_cent_of_hugging_face_at_every_boundary(ranks: Ranks) -> None:
    for found in (together(ranks.two), alone(ranks.two)):
        errors = worst(found, ranks.right)
        print(f"\n{ranks.name}: 2 ranks in bf16 {100 * max(errors.values()):.2f} %")
        assert max(errors.values()) < TOLERANCE, errors


def test_two_ranks_in_float32_are_far_within_that(ranks: Ranks) -> None:
    for found in (together(ranks.exact), alone(ranks.exact)):
        errors = worst(found, ranks.right)
        print(f"\n{ranks.name}: 2 ranks in float32 {100 * max(errors.values()):.4f} %")
        assert max(errors.values()) < EXACT, errors


def test_two_ranks_differ_from_one_no_more_than_two_roundings_do(ranks: Ranks) -> None:
    one, two = worst(together(ranks.one), ranks.right), worst(together(ranks.two), ranks.right)
    apart, variance = worst(together(ranks.two), together(ranks.one)), worst(alone(ranks.one), together(ranks.one))
    print(f"\n{ranks.name}: 2 ranks against 1 {100 * max(apart.values()):.2f} %", end=", ")
    print(f"1 rank {100 * max(one.values()):.2f} %, its batch variance {100 * max(variance.values()):.2f} %")
    for place, error in apart.items():
        assert error <= 1.25 * math.hypot(one[place], two[place]), place


def test_every_rank_reports_in(ranks: Ranks) -> None:
    assert [(report.tp_rank, report.tp_size) for report in ranks.one.reports] == [(0, 1)]
    assert [(report.tp_rank, report.tp_size) for report in ranks.two.reports] == [(0, 2), (1, 2)]
    first, second = ranks.two.reports
    assert first.pid != second.pid
    assert (first.architecture, first.num_layers) == (second.architecture, second.num_layers)
    assert first.num_layers == BLOCKS


def test_no_process_of_two_ranks_is_left_after_stop(ranks: Ranks) -> None:
    pids = {report.pid for report in ranks.two.reports}
    assert pids < set(ranks.two.serving)
    assert ranks.two.stopped == []
    assert not [pid for pid in ranks.two.serving if processes.alive(pid)]
