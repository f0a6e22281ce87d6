"""Live progress: a bar where standard error is a terminal, plain lines where it is not."""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn

from layertap.cli import text
from layertap.cli.app import err
from layertap.pull import PullProgress
from layertap.schemas.jobs import Job, JobState

_LINE_SECONDS = 2.0
_QUIET_SECONDS = 30.0
"""Seconds between lines where only the estimates have changed."""


def show_job(updates: Iterable[Job]) -> Job:
    """Shows the job's progress until it has ended, and returns it ended. `updates` must yield at least once."""
    return _job_bar(updates) if err.is_terminal else _job_lines(updates)


def _job_bar(updates: Iterable[Job]) -> Job:
    columns = (
        SpinnerColumn(finished_text=" "),
        TextColumn("{task.description}"),
        BarColumn(bar_width=32),
        TextColumn("{task.fields[figures]}"),
    )
    with Progress(*columns, console=err) as progress:
        bar = progress.add_task("", total=None, figures="")
        for job in updates:
            p = job.progress
            total = p.tokens_total or None
            done = total if job.state is JobState.SUCCEEDED else p.tokens_done
            progress.update(
                bar, total=total, completed=done or 0, description=text.state(job.state), figures=escape(_figures(job))
            )
            if job.state.terminal:
                progress.stop_task(bar)
    return job


def _job_lines(updates: Iterable[Job]) -> Job:
    shown: tuple[JobState, int, int] | None = None
    shown_at = float("-inf")
    for job in updates:
        now = time.monotonic()
        news = (job.state, job.progress.rows_done, job.progress.tokens_done)
        quiet = _QUIET_SECONDS if news == shown else _LINE_SECONDS
        if shown is None or job.state != shown[0] or now - shown_at >= quiet:
            err.print(f"{job.id} {job.state}  {_figures(job)}", markup=False, soft_wrap=True)
            shown, shown_at = news, now
    return job


def _figures(job: Job) -> str:
    p = job.progress
    if p.rows_total is None:
        return ""
    parts = [f"{text.count(p.rows_done, p.rows_total)} rows", f"{text.count(p.tokens_done, p.tokens_total)} tokens"]
    if p.now is not None:
        parts += text.speed(p.now)
    if p.tokens_per_second is not None:
        parts.append(f"{p.tokens_per_second:,.0f} tokens/s" + ("" if p.now is None else " on the mean"))
    if p.eta_seconds is not None and not job.state.terminal:
        parts.append(f"ETA {text.duration(p.eta_seconds)}")
    if p.row_errors:
        parts.append(text.counted(p.row_errors, "row error"))
    return "  ".join(parts)


@contextmanager
def bytes_bar(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """Gives a function that is told how many bytes of `total` are done. Without a terminal nothing is shown."""
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=32), TextColumn("{task.fields[figures]}"))
    with Progress(*columns, console=err, disable=not err.is_terminal, transient=True) as progress:
        bar = progress.add_task(escape(what), total=total, figures="")
        started = time.monotonic()

        def update(done: int) -> None:
            rate = done / max(1e-3, time.monotonic() - started)
            progress.update(
                bar, completed=done, figures=f"{text.size(done)} of {text.size(total)}  {text.size(int(rate))}/s"
            )

        yield update


@contextmanager
def pull_bar() -> Iterator[Callable[[PullProgress], None]]:
    """Gives a function that is told how far a pull is. Without a terminal nothing is shown."""
    columns = (TextColumn("pulling"), BarColumn(bar_width=32), TextColumn("{task.fields[figures]}"))
    with Progress(*columns, console=err, disable=not err.is_terminal, transient=True) as progress:
        bar = progress.add_task("", total=None, figures="")

        def update(p: PullProgress) -> None:
            shards = text.count(p.shards_done, p.shards_total)
            figures = f"{text.size(p.bytes_done)} of {text.size(p.bytes_total)}  {shards} shards"
            progress.update(bar, total=p.bytes_total, completed=p.bytes_done, figures=figures)

        yield update
