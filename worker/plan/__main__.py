"""The plan process: `python -m worker.plan` reads a `PlanRequest` on standard input and writes `PlanLine`s.

Tokenising keeps an interpreter busy for minutes, so it has one of its own. It dies with its parent.
"""

import os
import sys
import time
from functools import partial
from pathlib import Path
from typing import TextIO

from pydantic import ValidationError

from layertap.schemas.tasks import TaskRowProblem
from worker.plan.messages import (
    PlanErrorLine,
    PlanLine,
    PlanProgressLine,
    PlanRequest,
    PlanResultLine,
    RowErrorsLine,
)
from worker.plan.plan import PlanError, PlanProgress, make_plan
from worker.plan.render import LoadedTokenizer, TokenizerError
from worker.tied import tie_to_parent

PROGRESS_SECONDS = 0.5


class Reporter:
    """Writes the lines; progress at most every `PROGRESS_SECONDS`."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._next_progress = 0.0

    def say(self, line: PlanLine) -> None:
        """One line, at once."""
        self._out.write(line.model_dump_json() + "\n")
        self._out.flush()

    def errors(self, errors: list[TaskRowProblem]) -> None:
        """Row errors, which are never held back."""
        self.say(RowErrorsLine(errors=errors))

    def progress(self, now: PlanProgress) -> None:
        """Progress, unless the last was a moment ago."""
        if time.monotonic() >= self._next_progress:
            self._next_progress = time.monotonic() + PROGRESS_SECONDS
            self.say(
                PlanProgressLine(
                    phase="planning", lines=now.lines, rows=now.rows, tokens=now.tokens, row_errors=now.row_errors
                )
            )


def answer(request: bytes, reporter: Reporter) -> PlanResultLine | PlanErrorLine:
    """Makes the plan that `request` asks for; the last line to say."""
    try:
        wanted = PlanRequest.model_validate_json(request)
        reporter.say(PlanProgressLine(phase="loading"))
        result = make_plan(
            wanted.storage / wanted.spec.dataset_file,
            wanted.storage / wanted.spec.tokens_dir,
            wanted.spec,
            wanted.layers,
            wanted.final,
            wanted.model,
            partial(LoadedTokenizer.load, Path(wanted.model.path)),
            report_errors=reporter.errors,
            report_progress=reporter.progress,
        )
    except ValidationError as error:
        return PlanErrorLine(code="bad_request", reason=str(error)[:4000], retryable=False)
    except TokenizerError as error:
        return PlanErrorLine(code="tokenizer_unusable", reason=str(error)[:4000], retryable=False)
    except PlanError as error:
        return PlanErrorLine(code=error.code, reason=error.reason, retryable=error.retryable)
    except OSError as error:
        return PlanErrorLine(code="storage_error", reason=str(error), retryable=True)
    return PlanResultLine(shards=result.shards, rows=result.rows, tokens=result.tokens, row_errors=result.row_errors)


def main() -> int:
    """The exit code is 0 after a result, 1 after an error."""
    tie_to_parent(os.getppid())
    # Standard output carries the protocol alone; what libraries print goes to standard error.
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as out:
        os.dup2(2, 1)
        reporter = Reporter(out)
        last = answer(sys.stdin.buffer.read(), reporter)
        reporter.say(last)
    return 1 if isinstance(last, PlanErrorLine) else 0


if __name__ == "__main__":
    sys.exit(main())
