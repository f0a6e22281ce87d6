"""The typer application that every verb joins, and what they share: options, the client, errors as readable text."""

import json
import sys
from collections.abc import Iterable
from typing import Annotated, Any

import typer
from pydantic import BaseModel
from rich.console import Console
from rich.markup import escape
from typer.core import TyperGroup

import layertap
from layertap.client import Client
from layertap.errors import ApiError, LayertapError
from layertap.transport import DEFAULT_URL

PIPE_WIDTH = 200
"""Columns of a table that goes into a pipe or a file, where nothing should be cut."""

out = Console(highlight=False, width=None if sys.stdout.isatty() else PIPE_WIDTH)
"""Results."""
err = Console(stderr=True, highlight=False)
"""Progress and errors, so that results can be piped."""

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]


ORDER = (
    *("up", "submit", "status", "watch", "errors", "pull", "verify", "inspect"),
    *("cancel", "retry", "rm", "models", "workers", "incidents", "service", "worker", "engine"),
)
"""Of the verbs in the help text: the way of a job first."""


class _Verbs(TyperGroup):
    """Prints an error of Layertap as its message and remedies, never as a traceback."""

    def list_commands(self, ctx: Any) -> list[str]:
        """The verbs in the order of `ORDER`."""
        return sorted(super().list_commands(ctx), key=ORDER.index)

    def invoke(self, ctx: Any) -> Any:
        """Runs the verb; exit code 2 on a `LayertapError`, 130 on Ctrl-C."""
        try:
            return super().invoke(ctx)
        except LayertapError as e:
            print_error(e)
            raise typer.Exit(2) from None
        except KeyboardInterrupt:
            err.print("stopped")
            raise typer.Exit(130) from None


app = typer.Typer(
    cls=_Verbs,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="Hidden states of a language model, extracted at serving speed.",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        out.print(layertap.__version__)
        raise typer.Exit


@app.callback()
def options(
    ctx: typer.Context,
    url: Annotated[
        str, typer.Option("--url", envvar="LAYERTAP_URL", help="Address of the service.", show_default=True)
    ] = DEFAULT_URL,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Options of every verb; the token comes from LAYERTAP_TOKEN, so that it shows in no process list."""
    ctx.obj = url


def connect(ctx: typer.Context) -> Client:
    """The client for the address that the command line names, closed when the verb is done."""
    return ctx.with_resource(Client(str(ctx.obj), tries=4))


def print_error(error: LayertapError) -> None:
    """The message in red, then one line a field with its remedy."""
    err.print(f"[bold red]error:[/] {escape(str(error))}", soft_wrap=True)
    if not isinstance(error, ApiError):
        return
    for field in error.errors:
        reason = "" if field.reason == error.detail else field.reason
        remedy = f"→ {field.remedy}" if field.remedy else ""
        err.print(
            f"  [bold]{escape(field.field)}[/]: {escape(' '.join(filter(None, (reason, remedy))))}", soft_wrap=True
        )


def print_json(value: BaseModel | Iterable[BaseModel] | dict[str, Any]) -> None:
    """One JSON document on standard output: an object, or an array of them."""
    if isinstance(value, BaseModel):
        plain: Any = value.model_dump(mode="json")
    elif isinstance(value, dict):
        plain = value
    else:
        plain = [item.model_dump(mode="json") for item in value]
    out.print(json.dumps(plain, ensure_ascii=False, indent=2), markup=False, soft_wrap=True)
