"""The `source` installer: a small edit of the installed package, for what no attachment point of SGLang's own reaches.

What it may replace, and what it must restore, the record of the installation says: anything else is somebody's own
change and stays. Files are replaced by rename, never written in place, since package installers hard-link files into
their caches. Journal and backup lie outside the package; after a crash at any point `revert` restores it.
"""

import contextlib
import json
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from pathlib import Path

from layertap.durable import sync_folder
from worker.capture.installed import INSTALLER_VARIABLE
from worker.patch import claims, edit
from worker.patch.installer import Applied
from worker.patch.package import PARTIAL_NAME, TARGET, PatchError, PatchState, check, read_record, recorded_as


def default_root() -> Path:
    """Where journals and backups lie unless told otherwise. All workers on one installation must share it."""
    state = os.environ.get("XDG_STATE_HOME") or os.path.join(os.path.expanduser("~"), ".local", "state")
    return Path(state) / "layertap" / "patch"


def state_directory(package: Path, root: Path | None = None) -> Path:
    """Of one package: its lock, claims, journal and backup."""
    return (root or default_root()) / sha256(os.fsencode(package.resolve())).hexdigest()[:16]


@dataclass(frozen=True)
class _Journal:
    """Written before the package is touched. `original` is the recorded hash of the target, as in RECORD."""

    intent: str
    package: str
    file: str
    version: str
    edit: int
    original: str


class SourceInstaller:
    """Edits one installed package, shared with every other worker on it. `checkpoint` is told each step before it."""

    def __init__(
        self, package: Path, root: Path | None = None, checkpoint: Callable[[str], None] = lambda step: None
    ) -> None:
        self._package = package.resolve()
        self._target = self._package / TARGET
        self._directory = state_directory(self._package, root)
        self._journal_path = self._directory / "journal.json"
        self._backup_path = self._directory / "original"
        self._claim = claims.Claim(self._directory)
        self._checkpoint = checkpoint

    @property
    def edit_text(self) -> str:
        """The block that goes into the package."""
        return edit.BLOCK

    def apply(self) -> Applied:
        """Edits the package, or joins those who use its edit already. Raises `PatchError`."""
        with self._exclusively():
            try:
                self._apply()
            except BaseException:
                self._claim.withdraw()
                raise
        return Applied("source", environment={INSTALLER_VARIABLE: "source"})

    def revert(self) -> None:
        """Withdraws this worker's claim, and restores the package if no live worker has one. Raises `PatchError`.

        Also what undoes an edit that a dead worker left.
        """
        if not self._directory.exists() and not self._looks_edited():
            return
        with self._exclusively():
            self._claim.withdraw()
            claims.drop_dead(self._directory)
            if not claims.holders(self._directory):
                self._restore()

    def state(self) -> PatchState:
        """The package on disk, every file of it, against its own record."""
        return check(self._package, claims.holders(self._directory))

    def _apply(self) -> None:
        record = read_record(self._package)
        recorded = record.hashes.get(f"{self._package.name}/{TARGET}")
        if recorded is None or not self._target.is_file():
            raise PatchError(f"{self._target} is not part of this SGLang; use the installer plugin or forward_hooks")
        claims.drop_dead(self._directory)
        current = self._target.read_bytes()
        original = self._original_of(current, recorded)
        patched = self._edited(original)
        if current not in (original, patched):
            if others := claims.holders(self._directory):
                raise PatchError(
                    f"{self._target} holds the edit of another Layertap release, in use by process {others[0]}; "
                    "stop that worker, or run the same release"
                )
            self._restore()
            current = original
        self._checkpoint("claim")
        self._claim.make()
        if not self._backed_up(recorded):
            self._replace(self._backup_path, original, "backup", self._target.stat())
        journal = _Journal("apply", str(self._package), TARGET, record.version, edit.VERSION, recorded)
        self._write_journal(journal)
        if current != patched:
            self._replace(self._target, patched, "edit", self._target.stat(), keep_times=False)
        self._drop_compiled()

    def _restore(self) -> None:
        journal = self._read_journal()
        self._target.with_name(PARTIAL_NAME).unlink(missing_ok=True)
        if journal is not None or self._looks_edited():
            self._restore_target(journal)
        for path in (self._journal_path, self._backup_path):
            self._checkpoint(f"forget {path.name}")
            path.unlink(missing_ok=True)
            path.with_name(_partial_name(path)).unlink(missing_ok=True)
        sync_folder(self._directory)

    def _restore_target(self, journal: _Journal | None) -> None:
        recorded = self._recorded(journal)
        if recorded is None or not self._target.is_file():
            raise PatchError(
                f"{self._target} or its record of installation is gone since Layertap edited it; {self._reinstall()}"
            )
        current = self._target.read_bytes()
        original = self._original_of(current, recorded)
        if current != original:
            if journal is not None:
                self._write_journal(replace(journal, intent="revert"))
            like = self._backup_path if self._backed_up(recorded) else self._target
            self._replace(self._target, original, "restore", like.stat())
        self._drop_compiled()

    def _original_of(self, current: bytes, recorded: str) -> bytes:
        """The released source, from the file itself. Raises `PatchError` where somebody else changed it."""
        if recorded_as(current, recorded):
            return current
        removed = edit.remove(current)
        if removed is None or not recorded_as(removed[0], recorded):
            raise PatchError(
                f"{self._target} is neither the released file nor Layertap's edit of it: somebody else changed it, and "
                f"Layertap does not overwrite that; {self._reinstall()}, or use the installer plugin or forward_hooks"
            )
        return removed[0]

    def _edited(self, original: bytes) -> bytes:
        try:
            return edit.insert(original)
        except edit.UnknownSourceError as error:
            raise PatchError(
                f"{self._target}: {error}; this release of SGLang cannot be edited, use plugin or forward_hooks"
            ) from error

    def _reinstall(self) -> str:
        try:
            version = read_record(self._package).version
        except PatchError:
            return "install SGLang anew"
        return f"pip install --force-reinstall --no-deps sglang=={version}"

    def _looks_edited(self) -> bool:
        try:
            return b"# layertap edit " in self._target.read_bytes()
        except OSError:
            return False

    def _recorded(self, journal: _Journal | None) -> str | None:
        """The target's released hash: the installation's word, or the journal's where the record is gone."""
        try:
            return read_record(self._package).hashes.get(f"{self._package.name}/{TARGET}")
        except PatchError:
            return journal.original if journal is not None else None

    def _backed_up(self, recorded: str) -> bool:
        return self._backup_path.is_file() and recorded_as(self._backup_path.read_bytes(), recorded)

    def _read_journal(self) -> _Journal | None:
        try:
            return _Journal(**json.loads(self._journal_path.read_bytes()))
        except FileNotFoundError:
            return None
        except (ValueError, TypeError) as error:
            raise PatchError(
                f"{self._journal_path} cannot be read ({error}); remove it and {self._reinstall()}"
            ) from error

    def _write_journal(self, journal: _Journal) -> None:
        self._replace(self._journal_path, json.dumps(asdict(journal), indent=1).encode(), f"journal {journal.intent}")

    def _replace(
        self, path: Path, data: bytes, step: str, like: os.stat_result | None = None, keep_times: bool = True
    ) -> None:
        """Puts a new file with these bytes in the place of `path`: whole or not at all, and on the disk at return.

        Mode and owner are those of `like`, and its times with `keep_times`.
        """
        partial = path.with_name(_partial_name(path))
        self._checkpoint(f"{step}: open")
        partial.unlink(missing_ok=True)
        try:
            with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:
                file.write(data[: len(data) // 2])
                file.flush()
                self._checkpoint(f"{step}: half written")
                file.write(data[len(data) // 2 :])
                file.flush()
                if like is not None:
                    _make_like(file.fileno(), like, keep_times)
                os.fsync(file.fileno())
            self._checkpoint(f"{step}: rename")
            os.replace(partial, path)
        except OSError:
            partial.unlink(missing_ok=True)
            raise
        self._checkpoint(f"{step}: sync folder")
        sync_folder(path.parent)

    def _drop_compiled(self) -> None:
        """Whatever Python compiled from the file before: some installations have it trusted unchecked."""
        self._checkpoint("drop compiled")
        for path in (self._target.parent / "__pycache__").glob(f"{self._target.stem}.*.pyc"):
            path.unlink(missing_ok=True)

    @contextmanager
    def _exclusively(self) -> Iterator[None]:
        try:
            with claims.locked(self._directory):
                yield
        except OSError as error:
            raise PatchError(
                f"{error.filename or self._package}: {error.strerror}; the package and {self._directory} must be "
                "writable: run as their owner, name another --patch-dir, or use the installer plugin or forward_hooks"
            ) from error


def _partial_name(path: Path) -> str:
    return PARTIAL_NAME if path.name == Path(TARGET).name else f".{path.name}.partial"


def _make_like(fd: int, like: os.stat_result, keep_times: bool) -> None:
    now = os.fstat(fd)
    if (now.st_uid, now.st_gid) != (like.st_uid, like.st_gid):
        with contextlib.suppress(PermissionError):
            os.fchown(fd, like.st_uid, like.st_gid)
    os.fchmod(fd, stat.S_IMODE(like.st_mode))
    if keep_times:
        os.utime(fd, ns=(like.st_atime_ns, like.st_mtime_ns))
