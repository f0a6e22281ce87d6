"""What is in a pulled job, in figures: token lengths, supervised fraction, and norms at every boundary.

Norms are taken over a bounded sample of whole rows, spread evenly over the job; the summary says how large it was.
"""

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from layertap.reader import Array, Extraction

SAMPLE_TOKENS = 65_536
_CHUNK_ELEMENTS = 8_000_000
QUANTILES = (0.0, 0.25, 0.5, 0.75, 0.95, 1.0)


@dataclass(frozen=True)
class Norms:
    """L2 norms of the sampled tokens' vectors at one place; non-finite vectors are counted and left out."""

    place: str
    mean: float
    minimum: float
    low: float
    high: float
    maximum: float
    non_finite: int
    """Values, not vectors, that are NaN or infinite."""


@dataclass(frozen=True)
class Summary:
    """Figures of a job. `lengths` are tokens a row, int64, in ascending order of row id; `low`/`high` 5 % and 95 %."""

    rows: int
    tokens: int
    lengths: list[int]
    supervised_tokens: int
    sampled_rows: int
    sampled_tokens: int
    norms: list[Norms]

    def length_quantiles(self) -> dict[str, int]:
        """Tokens a row at `QUANTILES`, by name ("p50")."""
        if not self.lengths:
            return {}
        values = np.quantile(np.asarray(self.lengths), QUANTILES, method="nearest")
        return {f"p{round(100 * q)}": int(v) for q, v in zip(QUANTILES, values, strict=True)}

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON; the lengths as quantiles."""
        plain = asdict(self)
        del plain["lengths"]
        return {**plain, "length_quantiles": self.length_quantiles()}


def summarize(rows: Extraction, sample_tokens: int = SAMPLE_TOKENS) -> Summary:
    """Reads every row's length and mask, and the hidden states of at most about `sample_tokens` tokens.

    Raises `ShardError` on a damaged shard.
    """
    lengths, supervised = [], 0
    for row in rows:
        lengths.append(len(row.input_ids))
        supervised += int(np.count_nonzero(row.loss_mask))
    sample = _sample(lengths, sample_tokens)
    places = [*(str(k) for k in rows.manifest.layers)]
    with_final = bool(sample) and rows[sample[0]].final_hidden_state is not None
    collected: list[list[Array]] = [[] for _ in range(len(places) + with_final)]
    bad = np.zeros(len(collected), np.int64)
    for i in sample:
        row = rows[i]
        _collect(row.hidden_states, collected, bad)
        final = row.final_hidden_state
        if final is not None:
            _collect(final[:, None], collected[len(places) :], bad[len(places) :])
    if with_final:
        places.append("final")
    norms = [
        _norms(place, np.concatenate(parts), int(n))
        for place, parts, n in zip(places, collected, bad, strict=True)
        if parts
    ]
    return Summary(len(rows), sum(lengths), lengths, supervised, len(sample), sum(lengths[i] for i in sample), norms)


def _sample(lengths: list[int], budget: int) -> list[int]:
    """Indices of whole rows, evenly spread, of about `budget` tokens at most; never none while there are rows."""
    if not lengths:
        return []
    total = sum(lengths)
    if total <= budget:
        return list(range(len(lengths)))
    wanted = max(1, int(len(lengths) * budget / total))
    spread = np.unique(np.linspace(0, len(lengths) - 1, wanted).round().astype(int))
    taken: list[int] = []
    used = 0
    for i in spread:
        if taken and used + lengths[i] > budget:
            continue
        taken.append(int(i))
        used += lengths[i]
    return taken


def _collect(states: Array, norms: list[list[Array]], bad: Array) -> None:
    """Adds the norms of `states` [S, K, H], place by place, a bounded number of values at a time."""
    step = max(1, _CHUNK_ELEMENTS // max(1, states.shape[1] * states.shape[2]))
    for begin in range(0, len(states), step):
        part = states[begin : begin + step].astype(np.float32)
        finite = np.isfinite(part)
        squares = np.where(finite, part, 0).astype(np.float64)
        lengths = np.sqrt(np.einsum("skh,skh->sk", squares, squares))
        whole: Array = np.all(finite, axis=2)
        for k in range(part.shape[1]):
            norms[k].append(lengths[whole[:, k], k])
            bad[k] += np.count_nonzero(~finite[:, k])


def _norms(place: str, values: Array, non_finite: int) -> Norms:
    if not len(values):
        nan = float("nan")
        return Norms(place, nan, nan, nan, nan, nan, non_finite)
    low, high = np.quantile(values, (0.05, 0.95))
    return Norms(
        place, float(values.mean()), float(values.min()), float(low), float(high), float(values.max()), non_finite
    )
