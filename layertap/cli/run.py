"""Verbs that become the service or a worker: all arguments go to `python -m service` or `python -m worker`."""

import importlib.util
import os
import sys
from typing import Annotated

import typer

from layertap.cli.app import app
from layertap.errors import MissingExtraError

_PASS_THROUGH = {"allow_extra_args": True, "ignore_unknown_options": True, "allow_interspersed_args": False}
Arguments = Annotated[list[str] | None, typer.Argument(metavar="[ARGS]...", help="Passed through; --help shows them.")]

NEEDS = {"service": "uvicorn", "worker": "sglang"}
"""For each part, a package that only its extra installs."""


@app.command(context_settings=_PASS_THROUGH, add_help_option=False)
def service(arguments: Arguments = None) -> None:
    """Run the control plane in this process; arguments as in `python -m service`."""
    _become("service", arguments or [])


@app.command(context_settings=_PASS_THROUGH, add_help_option=False)
def worker(arguments: Arguments = None) -> None:
    """Run one worker in this process; arguments as in `python -m worker`."""
    _become("worker", arguments or [])


def command(part: str) -> list[str]:
    """How to start `part`. Raises `MissingExtraError` where it is not installed.

    `-P` keeps a folder called like the part, in the directory one happens to be in, from being run instead.
    """
    for module in (part, NEEDS[part]):
        if importlib.util.find_spec(module) is None:
            raise MissingExtraError(f"the {part} is not installed; install it with `pip install 'layertap[{part}]'`")
    return [sys.executable, "-P", "-m", part]


def _become(part: str, arguments: list[str]) -> None:
    words = command(part)
    os.execv(words[0], [*words, *arguments])
