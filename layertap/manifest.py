"""The manifest of a pulled job: read from disk or from the service's answer, its version and file names checked.

Nothing here trusts a file name before it is known to stay inside the folder.
"""

import json
import re
from pathlib import Path

from pydantic import ValidationError

from layertap.errors import FormatError
from layertap.schemas.shards import FORMAT_VERSION, Manifest

MANIFEST_NAME = "manifest.json"
_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")


def parse(text: bytes, origin: str) -> Manifest:
    """The manifest in `text`. `origin` names it in errors.

    Raises `FormatError` on broken JSON, an unknown format version, a missing field, or a file name that is not plain.
    Fields that this version does not know are ignored.
    """
    try:
        raw = json.loads(text)
    except ValueError as e:
        raise FormatError(f"{origin} is not JSON ({e}); pull the job again") from None
    if not isinstance(raw, dict):
        raise FormatError(f"{origin} is not a manifest; pull the job again")
    version = raw.get("format_version")
    if version != FORMAT_VERSION:
        raise FormatError(
            f"{origin} has format_version {version!r}, this Layertap reads {FORMAT_VERSION}; "
            "install the version of layertap that the service runs"
        )
    try:
        manifest = Manifest.model_validate(raw, extra="ignore")
    except ValidationError as e:
        where = ".".join(str(part) for part in e.errors()[0]["loc"])
        raise FormatError(f"{origin} is incomplete: {where}: {e.errors()[0]['msg']}; pull the job again") from None
    for shard in manifest.shards:
        check_file_name(shard.file, origin)
    if len({shard.file for shard in manifest.shards}) != len(manifest.shards):
        raise FormatError(f"{origin} lists a file twice; pull the job again")
    return manifest


def load(directory: Path) -> Manifest:
    """The manifest of the pulled job in `directory`. Raises `FormatError` when there is none, and as `parse` does."""
    path = directory / MANIFEST_NAME
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        raise FormatError(
            f"{directory} holds no {MANIFEST_NAME}: not a pulled job, or the pull did not finish; "
            f"run `layertap pull JOB {directory}`"
        ) from None
    except OSError as e:
        raise FormatError(f"{path} can't be read: {e.strerror}") from None
    return parse(text, str(path))


def check_file_name(name: str, origin: str) -> None:
    """Raises `FormatError` unless `name` is a plain file name: no separator, no leading dot, no control character."""
    if not _FILE_NAME.fullmatch(name) or name == MANIFEST_NAME:
        raise FormatError(
            f"{origin} names the file {name!r}, which is not a plain shard name; nothing was written for it"
        )
