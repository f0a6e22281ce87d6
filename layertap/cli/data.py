"""Verbs about shards on this machine: pull, verify, inspect."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from layertap.cli import text
from layertap.cli.app import JsonOption, app, connect, err, out, print_json
from layertap.cli.progress import bytes_bar, pull_bar
from layertap.errors import MissingExtraError
from layertap.inspect import SAMPLE_TOKENS, Norms, Summary, summarize
from layertap.picture import draw
from layertap.reader import Extraction
from layertap.schemas.shards import Manifest

DirectoryArgument = Annotated[Path, typer.Argument(metavar="DIR", help="Folder of a pulled job.")]


@app.command()
def pull(
    ctx: typer.Context,
    job: Annotated[str, typer.Argument(metavar="JOB", help="Id of the job, job_….")],
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Folder to pull into, made where it is missing.")],
    jobs: Annotated[int, typer.Option(min=1, max=64, help="Downloads at a time.")] = 4,
    as_json: JsonOption = False,
) -> None:
    """Download a job's shards, every byte verified; run again to continue."""
    client = connect(ctx)
    try:
        with pull_bar() as update:
            report = client.pull(job, directory, jobs, update)
    except KeyboardInterrupt:
        err.print(f"stopped; what has come is kept, go on with: layertap pull {job} {directory}", soft_wrap=True)
        raise typer.Exit(130) from None
    if as_json:
        print_json(asdict(report))
        return
    skipped = f" ({report.skipped_shards:,} were there)" if report.skipped_shards else ""
    what = f"{text.counted(report.rows, 'row')}, {report.tokens:,} tokens"
    what += f" in {text.counted(report.shards, 'shard')}{skipped}"
    out.print(f"[green]verified[/] {what}, {text.size(report.bytes)} in {escape(str(directory))}", soft_wrap=True)
    if not report.complete:
        err.print(
            "[yellow]partial:[/] the job did not succeed, only the shards it had finished are here", soft_wrap=True
        )


@app.command()
def verify(directory: DirectoryArgument, as_json: JsonOption = False) -> None:
    """Compare every shard with the sha256 in the manifest."""
    rows = Extraction(directory)
    total = sum(shard.bytes for shard in rows.manifest.shards)
    with bytes_bar("verifying", total) as update:
        rows.verify(update)
    shards = len(rows.manifest.shards)
    if as_json:
        print_json({"ok": True, "job": rows.manifest.job, "complete": rows.complete, "shards": shards, "bytes": total})
    else:
        out.print(
            f"[green]verified[/] {text.counted(shards, 'shard')}, {text.size(total)}"
            + ("" if rows.complete else "; the job is partial")
        )


@app.command()
def inspect(
    directory: DirectoryArgument,
    png: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Where the picture goes; by default DIR/inspect.png.")
    ] = None,
    sample: Annotated[int, typer.Option(min=1, help="About how many tokens norms are taken over.")] = SAMPLE_TOKENS,
    as_json: JsonOption = False,
) -> None:
    """Show what is in a pulled job: tables, and a picture of norms and lengths."""
    rows = Extraction(directory)
    summary = summarize(rows, sample)
    if as_json:
        print_json({"manifest": rows.manifest.model_dump(mode="json"), "summary": summary.as_dict()})
    else:
        _print_facts(rows.manifest, summary)
        _print_boundaries(rows.manifest)
        _print_norms(summary)
        _print_shards(rows.manifest)
    if png is not None:
        draw(summary, rows.manifest, png)
    elif not as_json and summary.rows:
        png = directory / "inspect.png"
        try:
            draw(summary, rows.manifest, png)
        except MissingExtraError as e:
            err.print(escape(str(e)), style="dim", soft_wrap=True)
            return
    if png is not None:
        err.print(f"picture: {escape(str(png))}", soft_wrap=True)


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", title_style="bold", box=None, header_style="dim", pad_edge=False)


def _print_facts(manifest: Manifest, summary: Summary) -> None:
    table = _table("Job")
    table.show_header = False
    table.add_column(style="dim")
    table.add_column(overflow="fold")
    table.add_row("job", manifest.job + ("" if manifest.complete else "  [yellow]partial[/]"))
    table.add_row("model", escape(manifest.model))
    table.add_row("blocks, hidden size", f"{text.count(manifest.num_layers)}, {text.count(manifest.hidden_size)}")
    if manifest.pins is not None:
        table.add_row("dtype, engine", f"{manifest.pins.dtype}, SGLang {manifest.pins.engine_version}")
    table.add_row("final", manifest.final)
    table.add_row("rows, row errors", f"{summary.rows:,}, {manifest.row_errors:,}")
    table.add_row("tokens", f"{summary.tokens:,}")
    share = f"{100 * summary.supervised_tokens / summary.tokens:.1f} %" if summary.tokens else "–"
    table.add_row("supervised", f"{summary.supervised_tokens:,} tokens, {share}")
    lengths = "  ".join(f"{name} {value:,}" for name, value in summary.length_quantiles().items())
    table.add_row("tokens per row", lengths or "–")
    out.print(table)
    out.print()


def _print_boundaries(manifest: Manifest) -> None:
    table = _table("Boundaries, and what others call them")
    for column in (
        "boundary",
        "block output",
        "HF output_hidden_states",
        "SGLang layers_to_capture",
        "SGLang eagle3 id",
        "vLLM aux layer",
    ):
        table.add_column(column, justify="right")
    for names in manifest.boundaries:
        values = (
            names.boundary,
            names.block_output,
            names.hf_output_hidden_states,
            names.sglang_layers_to_capture,
            names.sglang_eagle3_layer_id,
            names.vllm_aux_hidden_state_layer,
        )
        table.add_row(*("–" if value is None else str(value) for value in values))
    out.print(table)
    out.print()


def _print_norms(summary: Summary) -> None:
    whole = summary.sampled_tokens == summary.tokens
    sample = "all" if whole else f"a sample of {summary.sampled_rows:,} rows,"
    table = _table(f"L2 norms over {sample} {summary.sampled_tokens:,} tokens")
    for column in ("boundary", "mean", "min", "max", "non-finite values"):
        table.add_column(column, justify="right")
    for n in summary.norms:
        table.add_row(*_norm_cells(n))
    out.print(table)
    out.print()


def _norm_cells(n: Norms) -> tuple[str, str, str, str, str]:
    broken = f"[bold red]{n.non_finite:,}[/]" if n.non_finite else "0"
    return n.place, f"{n.mean:,.4g}", f"{n.minimum:,.4g}", f"{n.maximum:,.4g}", broken


def _print_shards(manifest: Manifest, limit: int = 20) -> None:
    table = _table("Shards")
    table.add_column("file")
    for column in ("rows", "tokens", "size"):
        table.add_column(column, justify="right")
    table.add_column("sha256", style="dim")
    for shard in manifest.shards[:limit]:
        table.add_row(shard.file, f"{shard.rows:,}", f"{shard.tokens:,}", text.size(shard.bytes), shard.sha256[:16])
    out.print(table)
    if len(manifest.shards) > limit:
        out.print(f"… and {len(manifest.shards) - limit:,} more", style="dim")
