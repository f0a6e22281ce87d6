"""The report with which each rank of the engine says that the capture is in. No report means an unpatched engine."""

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class Attached:
    """What one rank reports once the capture is in. `dtype` is the safetensors name of the residual stream's dtype."""

    pid: int
    tp_rank: int
    tp_size: int
    pp_size: int
    architecture: str
    num_layers: int
    hidden_size: int
    dtype: str
    strategy: str
    installer: str


def attached_dir(run_dir: Path) -> Path:
    """Where the ranks of one engine report in."""
    return run_dir / "attached"


def write_report(run_dir: Path, report: Attached) -> None:
    """Writes a rank's report, whole or not at all."""
    path = attached_dir(run_dir) / f"rank{report.tp_rank}.json"
    partial = path.with_suffix(".tmp")
    partial.write_text(json.dumps(asdict(report)))
    os.replace(partial, path)


def read_reports(run_dir: Path) -> list[Attached]:
    """The reports so far, by rank."""
    reports = [Attached(**json.loads(path.read_text())) for path in attached_dir(run_dir).glob("rank*.json")]
    return sorted(reports, key=lambda report: report.tp_rank)
