"""What a run found, written out after each measurement, so that a run that is cut short has not been for nothing."""

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.h200.local import Extracted


class Results:
    """The rows so far, and the longest run; `facts` describe the machine."""

    def __init__(self, out: Path, facts: dict[str, Any]) -> None:
        self._out = out
        self._found: dict[str, Any] = {"machine": facts, "results": []}

    def add(
        self,
        shape: str,
        mix: str,
        way: str,
        tokens: int,
        seconds: Sequence[float],
        nbytes: int = 0,
        steady: float | None = None,
    ) -> None:
        """One way's repetitions, of `tokens` tokens and `nbytes` bytes each; the median of their seconds counts.

        `steady` is the rate without the ends of a run, in tokens a second.
        """
        median = statistics.median(seconds)
        row = {
            "shape": shape, "rows": mix, "way": way, "tokens_per_s": round(tokens / median), "tokens": tokens,
            "seconds": [round(s, 3) for s in seconds], "mb_per_s": round(nbytes / median / 1e6),
        }  # fmt: skip
        if steady is not None:
            row["steady_tokens_per_s"] = round(steady)
        self._found["results"].append(row)
        self._write()
        print(
            f"{shape:<12} {mix:>9}  {way:<32} {row['tokens_per_s']:>8,} tokens/s {row['mb_per_s']:>6,} MB/s"
            + ("" if steady is None else f"  steady {steady:>8,.0f} tokens/s"),
            flush=True,
        )

    def extracted(
        self, shape: str, mix: str, way: str, done: Extracted, seconds: Sequence[float] | None = None
    ) -> None:
        """An extraction, or the last of several that took `seconds` each."""
        self.add(shape, mix, way, done.tokens, seconds or [done.seconds], done.nbytes, done.steady)

    def endured(self, **figures: Any) -> None:
        """What the long run was like."""
        self._found["endurance"] = figures
        self._write()

    def _write(self) -> None:
        self._out.write_text(json.dumps(self._found, indent=1) + "\n")
