"""An installed SGLang package on disk, held against the record of hashes that its installation came with.

Reads only. Every file is hashed every time: sizes and times prove nothing about contents. Compiled caches are left out,
as they come and go by themselves.
"""

import base64
import csv
import hashlib
import importlib.util
import json
import os
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from enum import StrEnum
from importlib.machinery import PathFinder
from pathlib import Path

from worker.patch import edit

TARGET = "srt/model_executor/model_runner.py"
"""The one file that the `source` installer edits, below the package."""
PARTIAL_NAME = ".model_runner.py.layertap-partial"
"""A replacement being written, beside the target. Only ever left behind by a crash."""

_NAME = "sglang"
_ASK_SECONDS = 60.0
_HASH_THREADS = 4


class PatchError(Exception):
    """The patch cannot be applied, reverted or checked; the message names the file or package and the remedy."""


class Condition(StrEnum):
    """What a package is, compared with its record."""

    PRISTINE = "pristine"
    PATCHED = "patched"
    FOREIGN = "foreign"
    UNVERIFIABLE = "unverifiable"


@dataclass(frozen=True)
class PatchState:
    """The outcome of a check. Paths are relative to the folder that holds the package.

    `edit` is the version of Layertap's edit in the target, whether or not anything else is changed too; `holders` are
    process ids of live workers that need it.
    """

    condition: Condition
    package: str
    version: str | None
    edit: int | None = None
    files: int = 0
    changed: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    added: tuple[str, ...] = ()
    holders: tuple[int, ...] = ()
    remedy: str | None = None


@dataclass(frozen=True)
class Record:
    """Hashes by path relative to the folder that holds the package, as `algorithm=urlsafe base64`."""

    version: str
    hashes: dict[str, str] = field(repr=False)


def find_package() -> Path:
    """The SGLang package that this interpreter would import. Raises `PatchError`."""
    # The path is asked first: the engine's process looks there too, whatever is loaded in this one.
    spec = PathFinder.find_spec(_NAME) or importlib.util.find_spec(_NAME)
    if spec is None or not spec.submodule_search_locations:
        raise PatchError('SGLang is not installed; install the worker: pip install "layertap[worker]"')
    return Path(next(iter(spec.submodule_search_locations))).resolve()


def find_package_of(python: Path) -> Path:
    """The SGLang package that another interpreter would import. Raises `PatchError`."""
    ask = f"import importlib.util as u; s = u.find_spec({_NAME!r}); print(s.submodule_search_locations[0] if s else '')"
    try:
        # -P: a folder called sglang in the directory one happens to be in is not the installed package.
        answer = subprocess.run(
            [str(python), "-P", "-c", ask], capture_output=True, text=True, timeout=_ASK_SECONDS, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise PatchError(f"--python {python} did not answer ({error}); name a Python 3.11 or newer") from error
    if not answer.stdout.strip():
        raise PatchError(f"--python {python} has no SGLang; name the Python that the engine runs with")
    return Path(answer.stdout.strip()).resolve()


def read_record(package: Path) -> Record:
    """The record beside the package. Raises `PatchError` where there is none, as for an editable installation."""
    infos = sorted(package.parent.glob(f"{_NAME}-*.dist-info"))
    if len(infos) > 1:
        raise PatchError(
            f"{package.parent} holds {len(infos)} records of SGLang ({', '.join(info.name for info in infos)}); "
            "remove the leftover of the earlier installation, or install SGLang anew"
        )
    if not infos or not (infos[0] / "RECORD").is_file():
        raise PatchError(
            f"{package} has no record of its files beside it (an editable or hand-made installation); its sources "
            "cannot be told from edited ones: install SGLang from a wheel, or use the installer plugin or forward_hooks"
        )
    if _editable(infos[0]):
        raise PatchError(
            f"{package} is an editable installation; install SGLang from a wheel, "
            "or use the installer plugin or forward_hooks"
        )
    with (infos[0] / "RECORD").open(newline="", encoding="utf-8") as file:
        hashes = {row[0]: row[1] for row in csv.reader(file) if len(row) >= 2 and row[1]}
    prefix = f"{package.name}/"
    ours = {path: value for path, value in hashes.items() if path.startswith(prefix) and not _compiled(path)}
    if not ours:
        raise PatchError(f"{infos[0] / 'RECORD'} lists no file of {package}; install SGLang from a wheel")
    return Record(infos[0].name.removeprefix(f"{_NAME}-").removesuffix(".dist-info"), ours)


def recorded_as(data: bytes, recorded: str) -> bool:
    """Whether the record's hash is the hash of these bytes."""
    algorithm, _, value = recorded.partition("=")
    return _encoded(hashlib.new(algorithm, data).digest()) == value


def check(package: Path, holders: tuple[int, ...] = ()) -> PatchState:
    """Compares every file of the package with the record, each hashed once. Raises `PatchError` if it is not there."""
    if not (package / "__init__.py").is_file():
        raise PatchError(f"{package} is no SGLang package; name the folder called {_NAME} in site-packages")
    try:
        record = read_record(package)
    except PatchError as error:
        found = _edit_of(package)
        return PatchState(Condition.UNVERIFIABLE, str(package), None, found, holders=holders, remedy=str(error))
    present = set(_files(package))
    known = sorted(present & record.hashes.keys())
    with ThreadPoolExecutor(_HASH_THREADS) as pool:
        same = pool.map(lambda path: _file_matches(package.parent / path, record.hashes[path]), known)
        changed = [path for path, equal in zip(known, same, strict=True) if not equal]
    target = f"{package.name}/{TARGET}"
    version = _edit_of(package) if target in changed else None
    if version is not None and _only_edited(package, record):
        changed.remove(target)
    missing, added = sorted(record.hashes.keys() - present), sorted(present - record.hashes.keys())
    foreign = bool(changed or missing or added)
    condition = Condition.FOREIGN if foreign else Condition.PRISTINE if version is None else Condition.PATCHED
    return PatchState(
        condition, str(package), record.version, version, len(present), tuple(changed), tuple(missing), tuple(added),
        holders, _remedy(condition, holders, record.version),
    )  # fmt: skip


def _remedy(condition: Condition, holders: tuple[int, ...], version: str) -> str | None:
    if condition is Condition.FOREIGN:
        return (
            "somebody else changed this package, and Layertap leaves that alone; to have the released files back: "
            f"pip install --force-reinstall --no-deps sglang=={version}"
        )
    if condition is Condition.PATCHED and not holders:
        return "no live worker needs the edit: `layertap engine revert` takes it out, as does the next worker start"
    return None


def _only_edited(package: Path, record: Record) -> bool:
    removed = edit.remove((package / TARGET).read_bytes())
    return removed is not None and recorded_as(removed[0], record.hashes[f"{package.name}/{TARGET}"])


def _edit_of(package: Path) -> int | None:
    try:
        removed = edit.remove((package / TARGET).read_bytes())
    except OSError:
        return None
    return removed[1] if removed else None


def _editable(info: Path) -> bool:
    try:
        origin = json.loads((info / "direct_url.json").read_bytes())
    except (OSError, ValueError):
        return False
    return bool(origin.get("dir_info", {}).get("editable"))


def _files(package: Path) -> Iterator[str]:
    root = package.parent
    for folder, folders, names in os.walk(package):
        folders[:] = [name for name in folders if name != "__pycache__"]
        below = os.path.relpath(folder, root)
        yield from (f"{below}/{name}" for name in names if not _compiled(name))


def _compiled(path: str) -> bool:
    return path.endswith(".pyc") or "/__pycache__/" in path


def _file_matches(path: Path, recorded: str) -> bool:
    algorithm, _, value = recorded.partition("=")
    with path.open("rb") as file:
        return _encoded(hashlib.file_digest(file, algorithm).digest()) == value


def _encoded(digest: bytes) -> str:
    return base64.urlsafe_b64encode(digest).rstrip(b"=").decode()
