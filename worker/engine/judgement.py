"""What the self-check concludes from what it read: whether the states can be trusted, and which strategy to use. Pure.

Every boundary of the check's rows was read at several places in one forward. Two anchors are beyond dispute: the
model's final norm, applied to boundary L as the last block's exit gave it, must be the final hidden state, and the
model's head applied to that must give the engine's own log-probabilities. That proves the reading at the exits, the
same at every block, and so the exits settle any quarrel between the strategies.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from worker.capture.sources import Source, State
from worker.engine.spec import Strategy

Array = npt.NDArray[np.float32]

SAME_FORWARD = 0.002
"""Relative error, token by token, between two readings of one value: less than bf16 rounds it."""
NORM = 0.02
"""The same between a norm applied again and the model's own, which may round its sum elsewhere."""
LOG_PROBABILITY = 0.03
"""Mean difference over mean size of log-probabilities: logits are rounded to bf16 too."""
BATCH = 0.1
"""Relative error of a typical token when its row runs alone instead of in a batch: kernels differ by a few per cent."""


class CheckError(Exception):
    """The engine serves, but the states that the capture delivers cannot be trusted; the message says why."""


@dataclass(frozen=True)
class Readings:
    """What the check found, for T tokens of several rows one after another; `lengths` are the rows' lengths.

    `states` and `final` are [T, H];
    `head` and `engine` are log-probabilities by row, the first token left out (`head` None: the model offers none).
    """

    layers: int
    lengths: Sequence[int]
    states: Mapping[State, Array]
    final: Array
    head: Sequence[list[float] | None]
    engine: Sequence[list[float]]


@dataclass(frozen=True)
class Judgement:
    """The strategy to use, the figures behind it (relative errors), and remarks."""

    strategy: Strategy
    figures: dict[str, float]
    remarks: tuple[str, ...]


def judge(readings: Readings) -> Judgement:
    """Weighs every witness against the others. Raises `CheckError`."""
    with_hooks = (Source.HOOKS, 0) in readings.states
    _check_buffers(readings, Source.EXITS if with_hooks else Source.COLLECT)
    figures = {"norm": _check_norm(readings)} | _check_head(readings)
    if not with_hooks:
        return Judgement("collect", figures, ())
    strategy, quarrel, remarks = _settle(readings)
    return Judgement(strategy, figures | quarrel, tuple(remarks))


def confirm(judgement: Judgement, readings: Readings, row: int, alone: Mapping[int, Array]) -> Judgement:
    """The judgement, once the boundaries `alone` [S, H] of that row in a forward of its own agree with it.

    Rows that are swapped and buffers that are stale show here. Raises `CheckError`.
    """
    start = sum(readings.lengths[:row])
    rows = slice(start, start + readings.lengths[row])
    worst = 0.0
    for k, state in alone.items():
        among = _of_strategy(readings.states, judgement.strategy, k)[rows]
        error = float(np.median(token_errors(among, state)))
        if error > BATCH:
            raise CheckError(
                f"boundary {k} of a row differs by {error:.0%} between a batch and the row alone: "
                "rows are mixed up, or a buffer is read after its time"
            )
        worst = max(worst, error)
    figures = {name: round(value, 6) for name, value in (judgement.figures | {"batch": worst}).items()}
    return replace(judgement, figures=figures)


def _of_strategy(states: Mapping[State, Array], strategy: Strategy, boundary: int) -> Array:
    """Boundaries 0 and L have one reading, whatever the strategy."""
    found = states.get((Source(strategy), boundary))
    return states[(Source.HOOKS, boundary)] if found is None else found


def token_errors(found: Array, right: Array) -> Array:
    """Relative error of each token's state: ‖found − right‖ / ‖right‖, [T]."""
    scale = np.linalg.norm(right, axis=-1)
    errors: Array = np.linalg.norm(found - right, axis=-1) / np.maximum(scale, np.finfo(np.float32).tiny)
    # Not a number is no agreement, and no comparison with a limit may take it for one.
    return np.where(np.isnan(errors), np.float32(np.inf), errors)


def _check_buffers(readings: Readings, source: Source) -> None:
    layers = readings.layers
    for second in range(1, layers + 1):
        here, before = (readings.states.get((source, k)) for k in (second, second - 1))
        if here is not None and before is not None and np.array_equal(here, before):
            raise CheckError(f"boundaries {second - 1} and {second} are the same values: one buffer was read twice")


def _check_norm(readings: Readings) -> float:
    normed = readings.states[(Source.NORMED, readings.layers)]
    error = float(token_errors(normed, readings.final).max())
    if error > NORM:
        raise CheckError(
            f"the final norm of boundary {readings.layers} is {error:.1%} off the final hidden state: the last "
            "boundary is not the residual stream after the last block, or the final state is not taken after the norm"
        )
    return error


def _check_head(readings: Readings) -> dict[str, float]:
    for ours, engines in zip(readings.head, readings.engine, strict=True):
        if ours is not None and len(ours) != len(engines):
            raise CheckError(
                f"the head was read at {len(ours)} tokens of a row, the engine's log-probabilities are of "
                f"{len(engines)}: a chunk must hold the whole row; set --chunked-prefill-size to 64 or more"
            )
    pairs = [
        pair
        for ours, engines in zip(readings.head, readings.engine, strict=True)
        if ours is not None
        for pair in zip(ours, engines, strict=True)
    ]
    if not pairs:
        return {}
    found, right = np.asarray(pairs, dtype=np.float64).T
    error = float(np.abs(found - right).mean() / max(np.abs(right).mean(), 1e-6))
    if not error <= LOG_PROBABILITY:
        raise CheckError(
            f"the head gives log-probabilities on the final hidden state that are {error:.0%} off the engine's own: "
            "the states belong to other rows, or the head reads something else"
        )
    return {"log_probability": error}


def _settle(readings: Readings) -> tuple[Strategy, dict[str, float], list[str]]:
    """Which of the two strategies agrees with the exits."""
    layers, states = readings.layers, readings.states
    hooks = {k: _apart(states, Source.HOOKS, k) for k in range(1, layers + 1)}
    collect = {k: _apart(states, Source.COLLECT, k) for k in range(1, layers) if (Source.COLLECT, k) in states}
    figures = {"hooks": max(hooks.values())}
    if collect:
        figures["collect"] = max(collect.values())
    remarks = [
        f"{name} is wrong at {sum(e > SAME_FORWARD for e in found.values())} of {len(found)} boundaries, "
        f"up to {max(found.values()):.0%} off: {_why(readings, source)}"
        for name, source, found in (("hooks", Source.HOOKS, hooks), ("collect", Source.COLLECT, collect))
        if found and max(found.values()) > SAME_FORWARD
    ]
    if figures["hooks"] <= SAME_FORWARD:
        return "hooks", figures, remarks
    if collect and figures["collect"] <= SAME_FORWARD and hooks[layers] <= SAME_FORWARD:
        return "collect", figures, remarks
    raise CheckError("no strategy reads the residual stream right: " + "; ".join(remarks))


def _apart(states: Mapping[State, Array], source: Source, boundary: int) -> float:
    return float(token_errors(states[(source, boundary)], states[(Source.EXITS, boundary)]).max())


def _why(readings: Readings, source: Source) -> str:
    """What the wrong values are instead, where that can be recognised."""
    states, inner = readings.states, range(1, readings.layers)
    for shift in (-1, 1):
        pairs = [(k, k + shift) for k in inner if (Source.EXITS, k + shift) in states]
        if pairs and all(
            token_errors(states[(source, k)], states[(Source.EXITS, other)]).max() <= SAME_FORWARD for k, other in pairs
        ):
            return f"it holds boundary k {shift:+d} in the place of boundary k"
    bare = [k for k in inner if (Source.BARE, k) in states]
    if bare and all(token_errors(states[(source, k)], states[(Source.BARE, k)]).max() <= SAME_FORWARD for k in bare):
        return "it leaves the residual out"
    return "its values are none of the model's other states"
