"""Engines in which no rank sees every row."""

import itertools

import pytest

from worker.capture.scattered import NAMES, refusal


@pytest.mark.parametrize(
    "arguments",
    [
        {"enable_dp_attention": True},
        {"attn_dp_size": 2},
        {"attn_cp_size": "2"},
        {"enable_prefill_cp": True},
        {"enable_two_batch_overlap": True},
        {"pp_size": 2},
        {"dp_size": "4"},
        {"nnodes": 2},
    ],
)
def test_what_scatters_rows_is_named(arguments: dict[str, object]) -> None:
    why = refusal({"tp_size": 8, **arguments})
    assert why is not None
    assert why.startswith("--" + next(iter(arguments)).replace("_", "-"))


def test_what_is_off_is_let_through() -> None:
    assert refusal(dict(zip(sorted(NAMES), itertools.cycle((1, False, None, "1")), strict=False))) is None
