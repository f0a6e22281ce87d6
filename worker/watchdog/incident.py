"""An incident as it is put together: what was found, the evidence, what was tried; kept on disk and reported."""

import logging
import os
import secrets
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from layertap.schemas.incidents import Blame, Evidence, IncidentKind, IncidentReport
from worker.watchdog.evidence import redact
from worker.watchdog.rules import Phase, Verdict

logger = logging.getLogger(__name__)

_KEPT_ON_DISK = 200
_OUT_OF_MEMORY = ("outofmemoryerror", "out of memory", "cannot allocate memory", "cuda error: out of memory")


def out_of_memory(log_tail: str) -> bool:
    """Whether the last words of an engine speak of memory."""
    return any(words in log_tail.lower() for words in _OUT_OF_MEMORY)


@dataclass
class Draft:
    """An incident before its blame is known."""

    worker: str
    model: str
    tasks: list[str]
    phase: Phase
    verdict: Verdict
    evidence: Evidence
    happened_at: datetime
    tried: list[str] = field(default_factory=list)
    processes_left: int = 0
    gpu_bytes_left: int | None = None

    @classmethod
    def of(
        cls, worker: str, model: str, tasks: list[str], phase: Phase, verdict: Verdict, evidence: Evidence
    ) -> "Draft":
        """What is known the moment the evidence is in. Last words about memory make it an out-of-memory incident."""
        if out_of_memory(evidence.log_tail):
            verdict = Verdict(IncidentKind.OUT_OF_MEMORY, f"out of memory: {verdict.reason}")
        return cls(worker, model, tasks, phase, verdict, evidence, datetime.now(UTC))

    def report(self, blame: Blame) -> IncidentReport:
        """The incident for the service, under an id of its own."""
        return IncidentReport(
            id=f"inc_{secrets.token_hex(10)}",
            worker=self.worker,
            model=self.model,
            tasks=self.tasks,
            kind=self.verdict.kind,
            phase=self.phase.value,
            reason=redact(self.verdict.reason)[:4000],
            blame=blame,
            tried=self.tried,
            processes_left=self.processes_left,
            gpu_bytes_left=self.gpu_bytes_left,
            evidence=self.evidence,
            happened_at=self.happened_at,
        )

    @staticmethod
    def save(report: IncidentReport, folder: Path) -> None:
        """Keeps the report on disk, whatever becomes of the service; the oldest go."""
        path = folder / f"{report.happened_at:%Y%m%dT%H%M%S}-{report.id}.json"
        partial = path.with_suffix(".tmp")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            partial.write_text(report.model_dump_json(indent=1))
            os.replace(partial, path)
            for old in sorted(folder.glob("*.json"))[:-_KEPT_ON_DISK]:
                old.unlink(missing_ok=True)
        except OSError as error:
            logger.warning("incident %s could not be kept on disk: %s", report.id, error)
