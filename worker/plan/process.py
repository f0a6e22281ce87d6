"""Runs the plan process from the worker's event loop and ends it, whatever happens.

Usage: `async for line in plan_lines(request, quiet_seconds): …`; the last line is a result.
"""

import asyncio
import sys
from collections.abc import AsyncGenerator
from contextlib import aclosing

from pydantic import ValidationError

from worker.plan.messages import MAX_LINE, PLAN_LINE, PlanErrorLine, PlanLine, PlanRequest, PlanResultLine
from worker.plan.plan import PlanError

_STDERR_KEPT = 2000


async def plan_lines(request: PlanRequest, quiet_seconds: float) -> AsyncGenerator[PlanLine, None]:
    """The lines of a plan process, the result last.

    Raises `PlanError`: the plan's own, `plan_stuck` after `quiet_seconds` without a line (allow for the time that the
    tokenizer takes to load), `plan_crashed` if the process ends without a result. Closing the generator kills it.
    """
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "worker.plan"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        limit=MAX_LINE,
        # Ctrl-C reaches the whole foreground group, but how the worker stops is for the worker to say.
        start_new_session=True,
    )
    errors = asyncio.create_task(_tail(process))
    try:
        async with aclosing(_lines(process, request, quiet_seconds)) as lines:
            async for line in lines:
                if isinstance(line, PlanErrorLine):
                    raise PlanError(line.code, line.reason, line.retryable)
                yield line
                if isinstance(line, PlanResultLine):
                    return
        raise PlanError("plan_crashed", f"exit code {await process.wait()}: {await errors}", retryable=True)
    finally:
        if process.returncode is None:
            process.kill()
        await asyncio.shield(process.wait())
        errors.cancel()


async def _lines(
    process: asyncio.subprocess.Process, request: PlanRequest, quiet_seconds: float
) -> AsyncGenerator[PlanLine, None]:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(request.model_dump_json().encode())
    process.stdin.write_eof()
    while True:
        try:
            line = await asyncio.wait_for(process.stdout.readline(), quiet_seconds)
        except TimeoutError:
            raise PlanError("plan_stuck", f"no sign of progress for {quiet_seconds:g} s", retryable=True) from None
        if not line:
            return
        try:
            said = PLAN_LINE.validate_json(line)
        except ValidationError as error:
            raise PlanError("plan_crashed", f"unreadable line: {line[:200]!r}", retryable=True) from error
        yield said


async def _tail(process: asyncio.subprocess.Process) -> str:
    """The end of what the process writes to standard error, which must be read lest it block."""
    assert process.stderr is not None
    kept = b""
    while chunk := await process.stderr.read(4096):
        kept = (kept + chunk)[-_STDERR_KEPT:]
    return kept.decode(errors="replace").strip()
