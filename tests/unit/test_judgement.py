"""The self-check's judgement, on readings made up: what passes, what is refused, and who wins a quarrel."""

from collections.abc import Callable

import numpy as np
import pytest

from worker.capture import sources
from worker.capture.sources import Source, State
from worker.engine.judgement import Array, CheckError, Readings, confirm, judge, token_errors

LAYERS, TOKENS, HIDDEN = 4, 9, 16
LENGTHS = [4, 4, 1]
States = dict[State, Array]


def _stream() -> list[Array]:
    """Boundaries 0 … L, [T, H]: each block adds as much as there is."""
    random = np.random.default_rng(0)
    parts = random.normal(size=(LAYERS + 1, TOKENS, HIDDEN)).astype(np.float32)
    return list(np.cumsum(parts, axis=0))


def _normed(stream: Array) -> Array:
    normed: Array = stream / np.sqrt((stream**2).mean(axis=-1, keepdims=True))
    return normed


def readings(hooks: bool = True, collects: bool = True) -> Readings:
    """A healthy check's."""
    stream = _stream()
    states: States = {}
    for source, k in sources.of_check(LAYERS, hooks, collects):
        if source is Source.NORMED:
            states[source, k] = _normed(stream[k])
        else:
            states[source, k] = stream[k] - stream[k - 1] if source is Source.BARE else stream[k].copy()
    log = [[-1.0 - row - i for i in range(length - 1)] for row, length in enumerate(LENGTHS)]
    return Readings(LAYERS, LENGTHS, states, _normed(stream[LAYERS]), log, [list(one) for one in log])


def alone(row: int) -> dict[int, Array]:
    start = sum(LENGTHS[:row])
    return {k: state[start : start + LENGTHS[row]] for k, state in enumerate(_stream())}


@pytest.mark.parametrize(
    ("hooks", "collects", "strategy"), [(True, True, "hooks"), (True, False, "hooks"), (False, True, "collect")]
)
def test_what_agrees_is_trusted(hooks: bool, collects: bool, strategy: str) -> None:
    found = readings(hooks, collects)
    judgement = confirm(judge(found), found, 1, alone(1))
    assert (judgement.strategy, judgement.remarks) == (strategy, ())
    assert max(judgement.figures.values()) < 1e-6
    assert {"norm", "log_probability", "batch"} <= judgement.figures.keys()


def test_a_model_without_a_head_is_judged_without_it() -> None:
    found = readings()
    judgement = judge(Readings(LAYERS, LENGTHS, found.states, found.final, [None] * 3, found.engine))
    assert "log_probability" not in judgement.figures


def _shift(states: States, source: Source) -> None:
    for k in range(1, LAYERS):
        states[source, k] = states[Source.EXITS, k + 1]


def _bare(states: States, source: Source) -> None:
    for k in range(1, LAYERS):
        states[source, k] = states[Source.BARE, k]


def _noise(states: States, source: Source) -> None:
    states[source, 2] = states[source, 2] + np.float32(0.5)


@pytest.mark.parametrize(
    ("fault", "words"),
    [(_shift, "boundary k +1 in the place"), (_bare, "leaves the residual out"), (_noise, "none of the model's other")],
)
@pytest.mark.parametrize(("wrong", "right"), [(Source.HOOKS, "collect"), (Source.COLLECT, "hooks")])
def test_the_strategy_that_agrees_with_the_exits_wins_and_the_other_is_named(
    fault: Callable[[States, Source], None], words: str, wrong: Source, right: str
) -> None:
    found = readings()
    states = dict(found.states)
    fault(states, wrong)
    judgement = judge(Readings(LAYERS, LENGTHS, states, found.final, found.head, found.engine))
    assert judgement.strategy == right
    (remark,) = judgement.remarks
    assert remark.startswith(f"{wrong.value} is wrong at")
    assert words in remark


def test_hooks_that_are_wrong_without_another_strategy_are_refused() -> None:
    found = readings(collects=False)
    states = dict(found.states)
    _noise(states, Source.HOOKS)
    with pytest.raises(CheckError, match="no strategy reads the residual stream right: hooks is wrong at 1 of 4"):
        judge(Readings(LAYERS, LENGTHS, states, found.final, found.head, found.engine))


def test_a_last_boundary_that_is_not_the_norms_is_refused() -> None:
    found = readings()
    states = {**found.states, (Source.NORMED, LAYERS): _normed(_stream()[LAYERS - 1])}
    with pytest.raises(CheckError, match="final norm of boundary 4"):
        judge(Readings(LAYERS, LENGTHS, states, found.final, found.head, found.engine))


def test_one_buffer_read_twice_is_refused() -> None:
    found = readings()
    states = {**found.states, (Source.EXITS, 3): found.states[Source.EXITS, 2]}
    with pytest.raises(CheckError, match="boundaries 2 and 3 are the same values"):
        judge(Readings(LAYERS, LENGTHS, states, found.final, found.head, found.engine))


def test_log_probabilities_of_other_rows_are_refused() -> None:
    found = readings()
    swapped = [found.engine[1], found.engine[0], found.engine[2]]
    with pytest.raises(CheckError, match="other rows"):
        judge(Readings(LAYERS, LENGTHS, found.states, found.final, found.head, swapped))


def test_a_row_that_is_another_one_alone_is_refused() -> None:
    found = readings()
    with pytest.raises(CheckError, match="between a batch and the row alone"):
        confirm(judge(found), found, 1, alone(0))


def test_a_log_probability_that_is_no_number_is_refused() -> None:
    found = readings()
    found.engine[0][1] = float("nan")
    with pytest.raises(CheckError, match="log-probabilities"):
        judge(found)


def test_a_row_whose_chunks_were_checked_one_by_one_is_refused_with_the_remedy() -> None:
    found = readings()
    assert found.head[0] is not None
    found.head[0].pop()
    with pytest.raises(CheckError, match="--chunked-prefill-size"):
        judge(found)


def test_an_error_that_is_no_number_is_no_agreement() -> None:
    right = np.ones((2, HIDDEN), np.float32)
    assert token_errors(right * np.float32("nan"), right).tolist() == [np.inf, np.inf]
