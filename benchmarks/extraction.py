"""What taking the states out costs, and what it gains over Hugging Face, both with one engine process.

The cost is extraction against plain prefill of the same rows by the same engine; for the gain see `hugging_face`.
"""

import tempfile
from pathlib import Path

from benchmarks import hugging_face
from benchmarks.engine import Passes, serving, threads
from benchmarks.pairs import Budget, Rate, Ratio, Result, in_turn, rate, ratio
from benchmarks.rows import tokenised

BOUND_SECONDS = 640.0
AIM = 0.95
_TOKENS = 4000
_BUDGET = Budget(seconds=170, fewest=3, most=9)


async def measure(model: Path) -> list[Result]:
    """The cost, then the gain."""
    with tempfile.TemporaryDirectory(prefix="layertap-bench-") as folder:
        async with serving(model, tokenised(model), Path(folder)) as passes:
            return [await _against_plain(model, passes), await hugging_face.measure(model, passes)]


async def _against_plain(model: Path, every: Passes) -> Result:
    """Pairs of a plain pass and an extraction. The ratio is extraction's tokens a second over plain prefill's."""
    passes = every.some(_TOKENS, 1)
    taken = await in_turn({"plain": passes.plain, "extract": passes.extract}, _BUDGET)
    return Result(
        name="extraction",
        title="Extraction against plain SGLang prefill",
        ratios=[Ratio("extraction over plain prefill, tokens a second", ratio(taken["plain"], taken["extract"]), AIM)],
        rates=[
            Rate("plain prefill", rate(passes.tokens, taken["plain"]), "tokens/s"),
            Rate("extraction to a sealed shard", rate(passes.tokens, taken["extract"]), "tokens/s"),
        ],
        facts={
            "model": model.name,
            "rows": len(passes.rows),
            "tokens": passes.tokens,
            "boundaries": " ".join(map(str, passes.layers)) + " and the final hidden state",
            "shard MB": passes.shard.stat().st_size / 1e6,
            "OpenMP threads": threads(),
        },
        seconds=taken,
    )
