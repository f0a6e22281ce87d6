"""Verbs about what the service has: models and workers."""

import typer
from rich.markup import escape
from rich.table import Table

from layertap.cli import text
from layertap.cli.app import JsonOption, app, connect, out, print_json
from layertap.schemas.figures import WorkerFigures
from layertap.schemas.workers import WorkerState

_STYLES = {
    WorkerState.ACTIVE: "green",
    WorkerState.DRAINING: "yellow",
    WorkerState.GONE: "dim",
    WorkerState.LOST: "red",
}


@app.command()
def models(ctx: typer.Context, as_json: JsonOption = False) -> None:
    """List the models that jobs may name."""
    found = list(connect(ctx).models())
    if as_json:
        print_json(found)
        return
    if not found:
        out.print("no models: no worker has registered; `layertap up --model DIR` starts one")
        return
    table = Table("model", box=None, header_style="dim", pad_edge=False)
    for column in ("blocks", "hidden size", "longest row"):
        table.add_column(column, justify="right")
    table.add_column("path", overflow="fold", style="dim")
    for model in found:
        longest = f"{model.max_row_tokens:,}"
        table.add_row(escape(model.name), str(model.num_layers), f"{model.hidden_size:,}", longest, escape(model.path))
    out.print(table)


@app.command()
def workers(ctx: typer.Context, as_json: JsonOption = False) -> None:
    """List the workers that the service knows, and how fast they go now."""
    found = list(connect(ctx).workers())
    if as_json:
        print_json(found)
        return
    if not found:
        out.print("no workers; `layertap worker` starts one")
        return
    table = Table("worker", "state", "host", "loaded", "doing", box=None, header_style="dim", pad_edge=False)
    for column in ("tokens/s", "written", "of plain", "waits", "GPU", "seen"):
        table.add_column(column, justify="right")
    for worker in found:
        state = f"[{_STYLES[worker.state]}]{worker.state}[/]"
        loaded, doing = escape(worker.loaded_model or "–"), escape(worker.status or "–")
        speed = _speed(worker.figures)
        table.add_row(worker.id, state, escape(worker.host), loaded, doing, *speed, text.age(worker.seen_at))
    out.print(table)


def _speed(figures: WorkerFigures | None) -> list[str]:
    if figures is None:
        return ["–"] * 5
    shares = (figures.plain_share, figures.writer_wait, figures.gpu_use)
    written = f"{text.size(int(figures.bytes_per_second))}/s"
    return [f"{figures.tokens_per_second:,.0f}", written, *map(text.per_cent, shares)]
