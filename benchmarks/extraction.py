"""Extraction against plain prefill of the same rows by the same engine process: what taking the states out costs."""

import tempfile
from pathlib import Path

from benchmarks.engine import serving, threads
from benchmarks.pairs import Budget, Rate, Ratio, Result, in_turn, rate, ratio
from benchmarks.rows import tokenised

NAME = "extraction"
BOUND_SECONDS = 270.0
AIM = 0.95
_TOKENS = 8000
_BUDGET = Budget(seconds=150, fewest=3, most=7)


async def measure(model: Path) -> Result:
    """Pairs of a plain pass and an extraction. The ratio is extraction's tokens a second over plain prefill's."""
    rows = tokenised(model, _TOKENS)
    with tempfile.TemporaryDirectory(prefix="layertap-bench-") as folder:
        async with serving(model, rows, Path(folder)) as passes:
            taken = await in_turn({"plain": passes.plain, "extract": passes.extract}, _BUDGET)
            facts: dict[str, str | int | float] = {
                "model": model.name,
                "rows": len(rows),
                "tokens": passes.tokens,
                "boundaries": " ".join(map(str, passes.layers)) + " and the final hidden state",
                "shard MB": passes.shard.stat().st_size / 1e6,
                "OpenMP threads": threads(),
            }
            tokens = passes.tokens
    return Result(
        name=NAME,
        title="Extraction against plain SGLang prefill",
        ratios=[Ratio("extraction over plain prefill, tokens a second", ratio(taken["plain"], taken["extract"]), AIM)],
        rates=[
            Rate("plain prefill", rate(tokens, taken["plain"]), "tokens/s"),
            Rate("extraction to a sealed shard", rate(tokens, taken["extract"]), "tokens/s"),
        ],
        facts=facts,
        seconds=taken,
    )
