"""What the capture tells the worker in files: each rank's report that it is in, and what the head says of a check.

No report means an unpatched engine.
"""

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class Attached:
    """What one rank reports once the capture is in. `dtype` is the safetensors name of the residual stream's dtype.

    `strategy` is `hooks` or `collect`; `collects` says whether the model offers its own collection.
    """

    pid: int
    tp_rank: int
    tp_size: int
    architecture: str
    num_layers: int
    hidden_size: int
    dtype: str
    strategy: str
    collects: bool
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
    """The reports so far, by rank. Raises `ValueError` or `TypeError` where one is not of this release."""
    reports = [Attached(**json.loads(path.read_text())) for path in attached_dir(run_dir).glob("rank*.json")]
    return sorted(reports, key=lambda report: report.tp_rank)


def write_log_probabilities(run_dir: Path, session: str, row: int, found: list[float] | None) -> None:
    """Log-probabilities that the model's head gives the tokens of a check's row, the first left out; None: no head."""
    path = _check_file(run_dir, session, row)
    path.parent.mkdir(exist_ok=True)
    partial = path.with_suffix(".tmp")
    partial.write_text(json.dumps(found))
    os.replace(partial, path)


def take_log_probabilities(run_dir: Path, session: str, row: int) -> list[float] | None:
    """What was written for the row; the file is removed. Raises `FileNotFoundError` while there is none."""
    path = _check_file(run_dir, session, row)
    found: list[float] | None = json.loads(path.read_text())
    path.unlink()
    return found


def _check_file(run_dir: Path, session: str, row: int) -> Path:
    return run_dir / "checks" / f"{session}.{row}.json"
