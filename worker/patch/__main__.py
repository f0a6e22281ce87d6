"""`python -m worker.patch`: for people, the state of an installed SGLang, and the way back to the released files.

Exit codes: 0 all is well, 1 it is not (`verify`) or a live worker still needs the edit (`revert`), 2 it could not be
checked or reverted.
"""

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

from worker.patch.choice import restore_abandoned
from worker.patch.package import Condition, PatchError, PatchState, find_package, find_package_of
from worker.patch.source import SourceInstaller

_SHOWN = 20
_MEANING = {
    Condition.PRISTINE: "every file is as released",
    Condition.PATCHED: "Layertap's edit is in it, and nothing else is changed",
    Condition.FOREIGN: "changed by somebody else",
    Condition.UNVERIFIABLE: "there is nothing to compare its files with",
}


def main(arguments: list[str] | None = None) -> int:
    """Runs one command; returns the exit code."""
    options = _parser().parse_args(arguments)
    try:
        package = options.package or (find_package_of(options.python) if options.python else find_package())
        if options.command == "revert":
            restore_abandoned(package, options.patch_dir)
        state = SourceInstaller(package, options.patch_dir).state()
    except PatchError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if options.json:
        print(json.dumps(asdict(state), indent=2))
    else:
        _print(state)
    return _exit_code(options.command, state)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m worker.patch", description=__doc__.partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    for name, purpose in (
        ("status", "say what the installed SGLang is: pristine, patched or foreign"),
        ("verify", "as status, with exit code 1 unless it is pristine, or patched for a live worker"),
        ("revert", "take Layertap's edit out, unless a live worker needs it"),
    ):
        command = commands.add_parser(name, help=purpose, description=purpose)
        place = command.add_mutually_exclusive_group()
        place.add_argument("--python", type=Path, metavar="PATH", help="the Python whose SGLang is meant")
        place.add_argument("--package", type=Path, metavar="DIR", help="the folder called sglang itself")
        command.add_argument("--patch-dir", type=Path, metavar="DIR", help="as given to the worker, if it was")
        command.add_argument("--json", action="store_true", help="print JSON, for programs")
    return parser


def _print(state: PatchState) -> None:
    version = f"SGLang {state.version}, " if state.version else ""
    print(f"{state.condition}: {version}{state.files} files in {state.package}: {_MEANING[state.condition]}")
    if state.edit is not None:
        holders = ", ".join(map(str, state.holders))
        print(f"  edit of version {state.edit}, needed by " + (f"process {holders}" if holders else "no live worker"))
    for word, paths in (("changed", state.changed), ("missing", state.missing), ("added", state.added)):
        for path in paths[:_SHOWN]:
            print(f"  {word} {path}")
        if len(paths) > _SHOWN:
            print(f"  and {len(paths) - _SHOWN} more {word}; --json lists all")
    if state.remedy:
        print(f"  → {state.remedy}")


def _exit_code(command: str, state: PatchState) -> int:
    if command == "revert":
        return int(state.edit is not None)
    held = state.condition is Condition.PATCHED and bool(state.holders)
    return int(command == "verify" and state.condition is not Condition.PRISTINE and not held)


if __name__ == "__main__":
    sys.exit(main())
