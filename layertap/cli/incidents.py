"""The verb about what went wrong with engines: a table, or one incident as a page to read from top to bottom."""

from itertools import islice
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from layertap.cli import text
from layertap.cli.app import JsonOption, app, connect, out, print_json
from layertap.client import Client
from layertap.errors import LayertapError
from layertap.schemas.incidents import Blame, Incident, ProcessEvidence

_BLAME_STYLES = {Blame.PATCH: "bold red", Blame.ENVIRONMENT: "red", Blame.ROW: "yellow"}
_MENTIONED = 100


@app.command()
def incidents(
    ctx: typer.Context,
    incident: Annotated[
        str | None, typer.Argument(metavar="[ID]", help="One incident in full, inc_…; without it, the newest.")
    ] = None,
    job: Annotated[str | None, typer.Option(metavar="JOB", help="Only those that hit this job.")] = None,
    worker: Annotated[str | None, typer.Option(metavar="WORKER", help="Only those of this worker.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="How many at most.")] = 20,
    as_json: JsonOption = False,
) -> None:
    """List what went wrong with engines, or show one incident with its evidence."""
    client = connect(ctx)
    if incident is not None:
        if job is not None or worker is not None:
            raise LayertapError("--job and --worker narrow the list; leave them out to show one incident")
        found = client.incident(incident)
        if as_json:
            print_json(found)
        else:
            _print_incident(found)
        return
    listed = list(islice(client.incidents(job, worker, page_size=min(limit, 100)), limit))
    if as_json:
        print_json(listed)
    elif listed:
        _print_table(listed)
    else:
        out.print("no incidents")


def mention(client: Client, job: str) -> None:
    """A line about the incidents that hit the job; nothing where there are none."""
    found = list(islice(client.incidents(job, page_size=_MENTIONED), _MENTIONED + 1))
    if not found:
        return
    latest = found[0]
    number = f"over {_MENTIONED} incidents" if len(found) > _MENTIONED else text.counted(len(found), "incident")
    what = f"{latest.kind}, blame: {latest.blame}, {text.age(latest.happened_at)}"
    out.print(f"[yellow]{number}[/], the latest {latest.id} ({what}): layertap incidents --job {job}", soft_wrap=True)


def _print_table(listed: list[Incident]) -> None:
    table = Table("incident", "what", "blame", "worker", "jobs", box=None, header_style="dim", pad_edge=False)
    table.add_column("when", justify="right")
    for item in listed:
        jobs = "\n".join(item.jobs) or "–"
        table.add_row(item.id, item.kind, _blame(item.blame), item.worker, jobs, text.age(item.happened_at))
    out.print(table)


def _blame(blame: Blame) -> str:
    style = _BLAME_STYLES.get(blame)
    return f"[{style}]{blame}[/]" if style else blame.value


def _print_incident(incident: Incident) -> None:
    evidence = incident.evidence
    out.print(_facts(incident))
    _heading("signals")
    _lines([f"{name}: {value}" for name, value in evidence.signals.items()] + evidence.gpu)
    _heading("engine")
    _lines([f"{name}: {value}" for name, value in evidence.engine.items()])
    _heading("blame")
    out.print(_blame(incident.blame))
    _heading("what was tried")
    _lines(incident.tried)
    _lines([_left(incident)])
    _heading("stacks")
    for process in evidence.processes:
        _print_process(process)
    if not evidence.processes:
        _lines([])
    _heading("last lines of the log")
    _lines([evidence.log_tail.rstrip("\n")] if evidence.log_tail else [])


def _facts(incident: Incident) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="dim")
    table.add_column(overflow="fold")
    reason = escape(text.printable(incident.reason))
    table.add_row("incident", f"[bold]{incident.id}[/]")
    table.add_row("what", f"[red]{incident.kind}[/] ({escape(text.printable(incident.phase))}): {reason}")
    table.add_row("engine of", escape(text.printable(f"{incident.model} on {incident.worker}")))
    if incident.jobs:
        table.add_row("jobs", ", ".join(map(escape, incident.jobs)))
    table.add_row("since", f"{text.moment(incident.happened_at)}, {text.age(incident.happened_at)}")
    table.add_row("reported", text.moment(incident.reported_at))
    return table


def _left(incident: Incident) -> str:
    memory = "unknown" if incident.gpu_bytes_left is None else text.size(incident.gpu_bytes_left)
    return f"left after the clean-up: processes: {incident.processes_left}, GPU memory: {memory}"


def _print_process(process: ProcessEvidence) -> None:
    facts = [
        process.state,
        text.counted(process.threads, "thread"),
        f"{text.size(process.rss_bytes)} of memory",
        f"{process.cpu_seconds:,.0f} s of CPU",
        f"waits in {process.wait_channel}" if process.wait_channel not in ("", "0") else "",
    ]
    out.print(f"[bold]{process.pid}[/] {escape(text.printable(process.command))}", soft_wrap=True)
    out.print(f"[dim]{escape(text.printable(', '.join(filter(None, facts))))}[/]", soft_wrap=True)
    _lines([process.stack.rstrip("\n")])
    out.print()


def _heading(title: str) -> None:
    out.print(f"\n[bold underline]{title}[/]")


def _lines(lines: list[str]) -> None:
    """As they are, except for what would steer the terminal."""
    for line in lines or ["–"]:
        out.print(text.printable(line), markup=False, soft_wrap=True)
