"""Evidence: what is kept of a sick engine before it is killed. Bounded in time and size, secrets removed.

Stacks come from py-spy. Where the kernel forbids it to look, the process is asked by signal: the capture has
faulthandler write every thread's stack to the log on SIGUSR1.
"""

import asyncio
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from layertap.schemas.incidents import MAX_EVIDENCE_BYTES, Evidence, ProcessEvidence
from worker.patch.package import find_package
from worker.patch.source import SourceInstaller
from worker.watchdog.observe import Seen, engine_processes

LOG_LINES = 200
_STACK_SECONDS = 10.0
_ALL_STACKS_SECONDS = 45.0
_STACK_CHARS = 24_000
_LOG_CHARS = 200_000
_SIGNAL_WAIT_S = 1.0
_PATCH_SECONDS = 10.0
_PATCH_CHARS = 500
_SECRETS = re.compile(
    r"(?i)(--(?:admin-)?api-key[= ]+|api_key['\"]?[=:]\s*['\"]?|authorization:\s*bearer\s+|\w*(?:token|secret)=)"
    r"[^\s'\",]+"
)


def processes_of(directory: Path, server: int | None) -> list[ProcessEvidence]:
    """Every process of the engine in `directory`, with its stacks: here, or in the log where py-spy can't read them.

    Takes under a minute however sick they are, unless /proc itself hangs; call it from a thread.
    """
    seen = engine_processes(directory, server)
    deadline = time.monotonic() + _ALL_STACKS_SECONDS
    found = [_describe(process, deadline) for process in seen]
    if seen and all(not process.stack.startswith("Process") for process in found):
        _ask_by_signal(seen)
    return found


def compose(
    log_tail: str, processes: list[ProcessEvidence], gpu: list[str], signals: dict[str, str], engine: dict[str, str]
) -> Evidence:
    """All of it together, without secrets, within its bound."""
    evidence = Evidence(
        log_tail=redact(log_tail)[-_LOG_CHARS:],
        processes=processes,
        gpu=gpu,
        signals=signals,
        engine={name: redact(value) for name, value in engine.items()},
    )
    return _fit(evidence)


async def patch_state(patch_dir: Path | None) -> str:
    """What the installed SGLang is, compared with its release: pristine, patched, foreign or unverifiable.

    Never raises and never lasts: where that can't be found out in time, it says why.
    """
    try:
        async with asyncio.timeout(_PATCH_SECONDS):
            return await asyncio.to_thread(lambda: str(SourceInstaller(find_package(), patch_dir).state().condition))
    except TimeoutError:
        return f"unknown: not read within {_PATCH_SECONDS:g} s"
    except Exception as error:  # noqa: BLE001 (the rest of the evidence must be kept all the same)
        return f"unknown: {type(error).__name__}: {error}"[:_PATCH_CHARS]


def redact(text: str) -> str:
    """The text without keys and tokens."""
    return _SECRETS.sub(r"\1***", text)


def tail(log: Path, lines: int = LOG_LINES) -> str:
    """The last lines of a log file, or nothing where there is none."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - _LOG_CHARS))
            return "\n".join(file.read().decode(errors="replace").splitlines()[-lines:])
    except OSError:
        return ""


def _describe(process: Seen, deadline: float) -> ProcessEvidence:
    return ProcessEvidence(
        pid=process.pid,
        command=redact(process.command)[:1000],
        state=process.state,
        threads=process.threads,
        rss_bytes=process.rss_bytes,
        cpu_seconds=process.cpu_seconds,
        wait_channel=process.wait_channel,
        stack=_stack(process.pid, deadline)[:_STACK_CHARS],
    )


def _stack(pid: int, deadline: float) -> str:
    seconds = min(_STACK_SECONDS, deadline - time.monotonic())
    program = shutil.which(
        "py-spy", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    )
    if program is None:
        return "no stack: py-spy is not installed"
    if seconds <= 0:
        return "no stack: the time for stacks was used up by other processes"
    try:
        done = subprocess.run(
            [program, "dump", "--pid", str(pid)], capture_output=True, text=True, errors="replace", timeout=seconds
        )
    except subprocess.TimeoutExpired:
        return f"no stack: py-spy gave none within {seconds:.0f} s"
    return done.stdout if done.returncode == 0 and done.stdout else f"no stack: py-spy: {done.stderr.strip()[-500:]}"


def _ask_by_signal(seen: list[Seen]) -> None:
    for process in seen:
        if _catches(process.pid, signal.SIGUSR1):
            try:
                os.kill(process.pid, signal.SIGUSR1)
            except ProcessLookupError:
                continue
    time.sleep(_SIGNAL_WAIT_S)


def _catches(pid: int, sig: signal.Signals) -> bool:
    """Whether the process has a handler for the signal; one that has none would die of it."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    caught = next((line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:")), "0")
    return bool(int(caught, 16) >> (sig - 1) & 1)


def _fit(evidence: Evidence) -> Evidence:
    """Cuts the log, which is the largest part, until the whole fits."""
    excess = len(evidence.model_dump_json()) - MAX_EVIDENCE_BYTES
    if excess <= 0:
        return evidence
    keep = max(0, len(evidence.log_tail) - excess)
    return evidence.model_copy(update={"log_tail": evidence.log_tail[-keep:] if keep else ""})
