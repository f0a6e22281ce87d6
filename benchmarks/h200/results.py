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
        self, shape: str, mix: str, way: str, tokens: int, seconds: Sequence[float], nbytes: int = 0, **more: Any
    ) -> None:
        """One way's repetitions, of `tokens` tokens and `nbytes` bytes each; the median of their seconds counts."""
        median = statistics.median(seconds)
        row = {
            "shape": shape, "rows": mix, "way": way, "tokens_per_s": round(tokens / median), "tokens": tokens,
            "seconds": [round(s, 3) for s in seconds], "mb_per_s": round(nbytes / median / 1e6), **more,
        }  # fmt: skip
        self._found["results"].append(row)
        self._write()
        print(
            f"{shape:<12} {mix:>9}  {way:<32} {row['tokens_per_s']:>8,} tokens/s {row['mb_per_s']:>6,} MB/s"
            + (f"  steady {row['steady_tokens_per_s']:>8,} tokens/s" if "steady_tokens_per_s" in row else ""),
            flush=True,
        )

    def extracted(self, shape: str, mix: str, way: str, runs: Sequence[Extracted]) -> None:
        """Extractions of the same rows: the steady rate is the median's, the memory that of all."""
        steady = [run.steady for run in runs if run.steady is not None]
        looks = [look for run in runs for look in run.looks]
        more: dict[str, Any] = {"steady_tokens_per_s": round(statistics.median(steady))} if steady else {}
        for name, place in (("gpu_mib", 1), ("resident_mib", 2)):
            if held := [look[place] for look in looks]:
                more[name] = {"first": held[0], "most": max(held), "last": held[-1]}
        self.add(shape, mix, way, runs[-1].tokens, [run.seconds for run in runs], runs[-1].nbytes, **more)

    def endured(self, **figures: Any) -> None:
        """What the long run was like."""
        self._found["endurance"] = figures
        self._write()

    def _write(self) -> None:
        self._out.write_text(json.dumps(self._found, indent=1) + "\n")
