"""Verbs about the SGLang installed here: whether its files are the released ones, and how they become so again."""

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from layertap.cli.app import JsonOption, app
from layertap.errors import MissingExtraError

engine = typer.Typer(no_args_is_help=True, help="Check the installed SGLang, and take a left-over patch out.")
app.add_typer(engine, name="engine")

PythonOption = Annotated[
    Path | None, typer.Option("--python", metavar="PATH", help="The Python whose SGLang is meant; by default this one.")
]
PackageOption = Annotated[
    Path | None, typer.Option("--package", metavar="DIR", help="The folder called sglang itself.")
]
PatchDirOption = Annotated[
    Path | None,
    typer.Option("--patch-dir", metavar="DIR", envvar="LAYERTAP_PATCH_DIR", help="As given to the worker, if it was."),
]


@engine.command()
def status(
    python: PythonOption = None,
    package: PackageOption = None,
    patch_dir: PatchDirOption = None,
    as_json: JsonOption = False,
) -> None:
    """Say what it is: pristine, patched, or changed by somebody else."""
    _run("status", python, package, patch_dir, as_json)


@engine.command()
def verify(
    python: PythonOption = None,
    package: PackageOption = None,
    patch_dir: PatchDirOption = None,
    as_json: JsonOption = False,
) -> None:
    """As status; exit code 1 unless it is pristine, or patched for a live worker."""
    _run("verify", python, package, patch_dir, as_json)


@engine.command()
def revert(
    python: PythonOption = None,
    package: PackageOption = None,
    patch_dir: PatchDirOption = None,
    as_json: JsonOption = False,
) -> None:
    """Take the edit of Layertap out; exit code 1 where a live worker needs it."""
    _run("revert", python, package, patch_dir, as_json)


def _run(verb: str, python: Path | None, package: Path | None, patch_dir: Path | None, as_json: bool) -> None:
    if importlib.util.find_spec("worker") is None:
        raise MissingExtraError("the worker is not installed; install it with `pip install 'layertap[worker]'`")
    words = [sys.executable, "-P", "-m", "worker.patch", verb]
    for flag, value in (("--python", python), ("--package", package), ("--patch-dir", patch_dir)):
        if value is not None:
            words += [flag, str(value)]
    raise typer.Exit(subprocess.run([*words, *(["--json"] if as_json else [])], check=False).returncode)
