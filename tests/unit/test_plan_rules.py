"""Length policy, supervision and packing: the pure rules of a plan."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from layertap.layout import ShardLayout, shard_bytes_estimate, token_bytes
from layertap.rows import RowError
from layertap.schemas.jobs import LossMask, Overflow
from layertap.schemas.tasks import PlannedShard
from worker.plan.policy import OverflowRefusedError, limit, settle
from worker.plan.render import Ids, Mask
from worker.plan.shards import ShardPacker


def row(mask: str) -> tuple[Ids, Mask]:
    return np.arange(len(mask), dtype=np.int32), np.array([int(bit) for bit in mask], dtype=np.uint8)


@pytest.mark.parametrize(("max_tokens", "engine", "longest"), [(None, 100, 100), (50, 100, 50), (500, 100, 100)])
def test_a_row_is_never_longer_than_the_engine_accepts(max_tokens: int | None, engine: int, longest: int) -> None:
    assert limit(max_tokens, engine) == longest


def test_truncation_keeps_the_first_tokens() -> None:
    ids, mask = settle(*row("00111"), 3, Overflow.TRUNCATE, LossMask.ASSISTANT)
    assert (ids.tolist(), mask.tolist()) == ([0, 1, 2], [0, 0, 1])


@pytest.mark.parametrize("overflow", Overflow)
def test_a_row_that_fits_is_left_as_it_is(overflow: Overflow) -> None:
    ids, mask = settle(*row("001"), 3, overflow, LossMask.ASSISTANT)
    assert (ids.tolist(), mask.tolist()) == ([0, 1, 2], [0, 0, 1])


def test_skip_lists_the_row_and_error_ends_the_job() -> None:
    with pytest.raises(RowError) as caught:
        settle(*row("0011"), 3, Overflow.SKIP, LossMask.ASSISTANT)
    assert caught.value.code == "too_long"
    with pytest.raises(OverflowRefusedError, match="4 tokens, 3 are allowed"):
        settle(*row("0011"), 3, Overflow.ERROR, LossMask.ASSISTANT)


@pytest.mark.parametrize(("mask", "longest"), [("000", 3), ("0001", 3)])
def test_a_row_left_without_a_supervised_token_is_a_row_error(mask: str, longest: int) -> None:
    with pytest.raises(RowError) as caught:
        settle(*row(mask), longest, Overflow.TRUNCATE, LossMask.ASSISTANT)
    assert caught.value.code == "nothing_supervised"
    _, all_of_it = settle(*row(mask), longest, Overflow.TRUNCATE, LossMask.ALL)
    assert all_of_it.tolist() == [1, 1, 1]


def test_a_row_of_no_tokens_is_a_row_error_and_one_token_is_enough() -> None:
    with pytest.raises(RowError) as caught:
        settle(*row(""), 3, Overflow.TRUNCATE, LossMask.ALL)
    assert caught.value.code == "empty_row"
    assert len(settle(*row("1"), 3, Overflow.TRUNCATE, LossMask.ASSISTANT)[0]) == 1


def pack(lengths: list[int], per_token: int, shard_bytes: int) -> list[PlannedShard]:
    packer = ShardPacker(per_token, shard_bytes)
    for tokens in lengths:
        packer.add(tokens)
    return packer.finish()


@given(
    st.lists(st.integers(1, 5000), max_size=60),
    st.integers(9, 5000),
    st.integers(64 * 1024, 4 * 1024 * 1024),
)
def test_every_row_is_in_one_shard_in_order_and_no_shard_is_larger_than_asked(
    lengths: list[int], per_token: int, shard_bytes: int
) -> None:
    shards = pack(lengths, per_token, shard_bytes)
    held = [i for shard in shards for i in range(shard.first_row, shard.first_row + shard.rows)]
    assert held == list(range(len(lengths)))
    for shard in shards:
        rows = lengths[shard.first_row : shard.first_row + shard.rows]
        assert shard.tokens == sum(rows)
        assert shard.bytes == shard_bytes_estimate(rows, per_token)
        assert shard.bytes <= shard_bytes or shard.rows == 1
    for left, right in itertools.pairwise(shards):
        with_next_row = lengths[left.first_row : right.first_row + 1]
        assert shard_bytes_estimate(with_next_row, per_token) > shard_bytes, "a shard was cut too early"


def test_a_row_larger_than_a_shard_is_a_shard_of_its_own() -> None:
    assert [(s.first_row, s.rows) for s in pack([5, 100_000, 5, 5], 100, 64 * 1024)] == [(0, 1), (1, 1), (2, 2)]


def test_the_planned_bytes_are_enough_for_the_file() -> None:
    lengths = [7, 300, 12]
    (shard,) = pack(lengths, token_bytes(3, 576, "BF16", True), 1 << 30)
    metadata = {"job": "job_" + "x" * 26, "model": "SmolLM2-135M-Instruct"}
    layout = ShardLayout.of(lengths, [2, 15, 27], 576, "BF16", True, metadata)
    assert 0 <= shard.bytes - layout.nbytes <= 8192
