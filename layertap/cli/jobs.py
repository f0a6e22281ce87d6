"""Verbs about jobs: submit, status, watch, errors, cancel, retry, rm."""

from itertools import islice
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from layertap.cli import text
from layertap.cli.app import JsonOption, app, connect, err, out, print_json
from layertap.cli.incidents import mention
from layertap.cli.progress import bytes_bar, show_job
from layertap.client import Client
from layertap.errors import LayertapError
from layertap.schemas.datasets import RowProblem
from layertap.schemas.jobs import MIB, Final, Job, JobState, LossMask, Overflow, Preset

JobArgument = Annotated[str, typer.Argument(metavar="JOB", help="Id of the job, job_….")]
_SUBMIT_ERRORS_SHOWN = 5


@app.command()
def submit(
    ctx: typer.Context,
    source: Annotated[str, typer.Argument(metavar="FILE", help="JSONL file to upload, or the id of a data set, ds_….")],
    model: Annotated[str, typer.Option(help="Model by the name that `layertap models` shows.")],
    layers: Annotated[str | None, typer.Option(help="Boundaries, as in 3,31,59: 0 is the embedding.")] = None,
    preset: Annotated[Preset | None, typer.Option(help="Named choice of boundaries.")] = None,
    final: Annotated[Final, typer.Option(help="Final hidden state, after the norm.")] = Final.POST_NORM,
    max_tokens: Annotated[
        int | None, typer.Option(help="Longest row in tokens; by default what the model takes.")
    ] = None,
    overflow: Annotated[Overflow, typer.Option(help="What happens to longer rows.")] = Overflow.TRUNCATE,
    loss_mask: Annotated[LossMask, typer.Option(help="Which tokens are supervised.")] = LossMask.ASSISTANT,
    shard_bytes: Annotated[int, typer.Option(help="Size of a shard in bytes.")] = 1024 * MIB,
    metadata: Annotated[
        list[str] | None, typer.Option(metavar="KEY=VALUE", help="Kept with the job; repeatable.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="Name of the uploaded data set; by default the file's.")] = None,
    watch: Annotated[bool, typer.Option("--watch", help="Show progress until the job has ended.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Upload a data set and ask for its hidden states."""
    boundaries, labels = _boundaries(layers), _metadata(metadata or [])
    if (boundaries is None) == (preset is None):
        raise LayertapError("give exactly one of --layers and --preset; --preset eagle3 suits an EAGLE-3 drafter")
    client = connect(ctx)
    dataset = source if source.startswith("ds_") and not Path(source).exists() else _upload(client, Path(source), name)
    job = client.create_job(
        dataset,
        model,
        boundaries,
        preset,
        final=final,
        max_tokens=max_tokens,
        overflow=overflow,
        loss_mask=loss_mask,
        shard_bytes=shard_bytes,
        metadata=labels,
    )
    if not as_json:
        out.print(f"job [bold]{job.id}[/] {text.state(job.state)}: boundaries {job.layers} of {escape(job.model)}")
    if watch:
        job = show_job(client.follow(job.id))
    if as_json:
        print_json(job)
    elif not watch:
        err.print(f"follow it with: layertap watch {job.id}", style="dim", soft_wrap=True)
    if watch:
        _end(job, quiet=as_json)


@app.command()
def status(
    ctx: typer.Context,
    job: Annotated[str | None, typer.Argument(metavar="[JOB]", help="One job in full; without it, the newest.")] = None,
    state: Annotated[JobState | None, typer.Option(help="Only jobs in this state.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=10_000, help="How many jobs at most.")] = 20,
    as_json: JsonOption = False,
) -> None:
    """Show the jobs, or one of them."""
    client = connect(ctx)
    if job is not None:
        found = client.job(job)
        if as_json:
            print_json(found)
        else:
            _print_job(found)
            mention(client, found.id)
        return
    jobs = list(islice(client.jobs(state, page_size=min(limit, 100)), limit))
    if as_json:
        print_json(jobs)
        return
    if not jobs:
        out.print("no jobs yet; `layertap submit FILE --model M --preset eagle3` makes one")
        return
    table = Table("job", "state", "model", "boundaries", box=None, header_style="dim", pad_edge=False)
    for column in ("rows", "tokens", "shards", "created"):
        table.add_column(column, justify="right")
    for item in jobs:
        p = item.progress
        table.add_row(
            item.id,
            text.state(item.state),
            escape(item.model),
            ",".join(map(str, item.layers)),
            text.count(p.rows_done, p.rows_total),
            text.count(p.tokens_done, p.tokens_total),
            text.count(p.shards_done, p.shards_total),
            text.age(item.created_at),
        )
    out.print(table)


@app.command()
def watch(ctx: typer.Context, job: JobArgument, as_json: JsonOption = False) -> None:
    """Show a job's progress until it has ended; exit code 0 if it succeeded, 1 if not."""
    ended = show_job(connect(ctx).follow(job))
    if as_json:
        print_json(ended)
    _end(ended, quiet=as_json)


@app.command()
def errors(
    ctx: typer.Context,
    job: Annotated[str, typer.Argument(metavar="JOB", help="Id of a job, job_…, or of a data set, ds_….")],
    limit: Annotated[int, typer.Option(min=1, help="How many at most.")] = 1000,
    as_json: JsonOption = False,
) -> None:
    """List the rows that have no hidden states, and why."""
    found = list(islice(connect(ctx).errors(job), limit))
    if as_json:
        print_json(found)
    elif found:
        _print_problems(found)
    else:
        out.print("no row errors")


@app.command()
def cancel(ctx: typer.Context, job: JobArgument, as_json: JsonOption = False) -> None:
    """Stop a job; what it has finished stays and can be pulled."""
    _print_short(connect(ctx).cancel(job), as_json)


@app.command()
def retry(ctx: typer.Context, job: JobArgument, as_json: JsonOption = False) -> None:
    """Queue again what failed of a job."""
    _print_short(connect(ctx).retry(job), as_json)


@app.command()
def rm(
    ctx: typer.Context,
    names: Annotated[list[str], typer.Argument(metavar="ID...", help="Jobs (job_…) or data sets (ds_…).")],
) -> None:
    """Delete jobs with their shards, or data sets."""
    client = connect(ctx)
    for name in names:
        client.delete(name)
        out.print(f"deleted {name}")


def _upload(client: Client, path: Path, name: str | None) -> str:
    if not path.is_file():
        raise LayertapError(f"{path} is no file; name a JSONL file, or the id of a data set (ds_…)")
    with bytes_bar(f"uploading {path.name}", path.stat().st_size) as update:
        dataset = client.upload_dataset(path, name, update)
    err.print(f"data set {dataset.id}: {text.counted(dataset.rows, 'row')}, {text.size(dataset.bytes)}", soft_wrap=True)
    if dataset.bad_rows:
        err.print(f"[yellow]{text.counted(dataset.bad_rows, 'bad line')} without hidden states:[/]", soft_wrap=True)
        for problem in islice(client.errors(dataset.id), _SUBMIT_ERRORS_SHOWN):
            err.print(f"  line {problem.line}: {escape(problem.reason)}", soft_wrap=True)
        if dataset.bad_rows > _SUBMIT_ERRORS_SHOWN:
            err.print(f"  … all of them: layertap errors {dataset.id}", soft_wrap=True)
    return dataset.id


def _boundaries(value: str | None) -> list[int] | None:
    if value is None:
        return None
    try:
        return [int(part) for part in value.split(",")]
    except ValueError:
        raise LayertapError(f"--layers {value!r} is not a list of integers; write it as 3,31,59") from None


def _metadata(pairs: list[str]) -> dict[str, str]:
    labels = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not key or not equals:
            raise LayertapError(f"--metadata {pair!r} is no KEY=VALUE")
        labels[key] = value
    return labels


def _end(job: Job, quiet: bool) -> None:
    """The last words about an ended job, and the exit code."""
    if not quiet:
        p = job.progress
        done = f"{text.counted(p.rows_done, 'row')}, {p.tokens_done:,} tokens, {text.counted(p.shards_done, 'shard')}"
        out.print(f"job [bold]{job.id}[/] {text.state(job.state)}: {done}", soft_wrap=True)
        if job.failure is not None:
            err.print(f"[red]{escape(job.failure.code)}[/]: {escape(job.failure.reason)}", soft_wrap=True)
        if p.row_errors:
            err.print(
                f"{text.counted(p.row_errors, 'row')} without hidden states: layertap errors {job.id}", soft_wrap=True
            )
    raise typer.Exit(0 if job.state is JobState.SUCCEEDED else 1)


def _print_short(job: Job, as_json: bool) -> None:
    if as_json:
        print_json(job)
    else:
        out.print(f"job [bold]{job.id}[/] {text.state(job.state)}")


def _print_problems(problems: list[RowProblem]) -> None:
    table = Table("line", "stage", "code", "reason", box=None, header_style="dim", pad_edge=False)
    for problem in problems:
        table.add_row(str(problem.line), problem.stage, escape(problem.code), escape(problem.reason))
    out.print(table)


def _print_job(job: Job) -> None:
    p = job.progress
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="dim")
    table.add_column(overflow="fold")
    table.add_row("job", f"[bold]{job.id}[/]")
    table.add_row("state", text.state(job.state))
    if job.failure is not None:
        table.add_row("failure", f"[red]{escape(job.failure.code)}[/]: {escape(job.failure.reason)}")
    table.add_row("model", escape(job.model))
    table.add_row("boundaries", ", ".join(map(str, job.layers)) + (f"  (preset {job.preset})" if job.preset else ""))
    table.add_row("final", job.final)
    table.add_row("data set", job.dataset)
    table.add_row(
        "rows",
        text.count(p.rows_done, p.rows_total) + (f"  ({text.counted(p.row_errors, 'error')})" if p.row_errors else ""),
    )
    table.add_row("tokens", text.count(p.tokens_done, p.tokens_total))
    table.add_row("shards", text.count(p.shards_done, p.shards_total) + f"  ({text.size(p.bytes_total)})")
    if p.tokens_per_second is not None:
        table.add_row("speed", f"{p.tokens_per_second:,.0f} tokens/s on the mean")
    if p.now is not None:
        table.add_row("now", ", ".join(text.speed(p.now)))
        held_up = f"forward waits {text.per_cent(p.now.writer_wait)}, pool {text.per_cent(p.now.pool_fill)} full"
        table.add_row("writer", held_up)
        table.add_row("GPU", f"{text.per_cent(p.now.gpu_use)} in use")
    if p.eta_seconds is not None and not job.state.terminal:
        table.add_row("ETA", text.duration(p.eta_seconds))
    for key, value in job.metadata.items():
        table.add_row(escape(key), escape(value))
    table.add_row("created", f"{job.created_at:%Y-%m-%d %H:%M:%S} UTC")
    ended = job.succeeded_at or job.failed_at or job.cancelled_at
    if ended is not None:
        table.add_row(
            "ended", f"{ended:%Y-%m-%d %H:%M:%S} UTC, after {text.duration((ended - job.created_at).total_seconds())}"
        )
    out.print(table)
