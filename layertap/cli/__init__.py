"""The command line: `layertap VERB`. Each verb group is a module; this one puts them together.

Exit codes: 0 done, 1 the job watched failed or was cancelled, 2 the request or its surroundings are wrong, 130 Ctrl-C.
"""

from layertap.cli import data, engine, fleet, incidents, jobs, run, up  # noqa: F401  importing a module adds its verbs
from layertap.cli.app import app


def main() -> None:
    """Entry point of the `layertap` command."""
    app()
