"""The source installer: reversible to the byte from every point it can be killed at, shared by workers, never over a
foreign change."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from fixtures_packages import MODEL_RUNNER, contents, install

from worker.patch import claims, edit
from worker.patch.choice import restore_abandoned
from worker.patch.package import PARTIAL_NAME, TARGET, Condition, PatchError, check
from worker.patch.source import SourceInstaller, state_directory

ORIGINAL = MODEL_RUNNER.encode()
EDITED = edit.insert(ORIGINAL)

LIFE = """
import os, signal, sys
from pathlib import Path
from worker.patch.source import SourceInstaller

package, root, phase, deadly = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], int(sys.argv[4])
steps = None

def checkpoint(step):
    global steps
    if steps is None:
        return
    if steps == deadly:
        os.kill(os.getpid(), signal.SIGKILL)
    steps += 1

installer = SourceInstaller(package, root, checkpoint)
if phase != "apply":
    installer.apply()
steps = 0
if phase == "hold":
    print("applied", flush=True)
    sys.stdin.read()
getattr(installer, "apply" if phase == "apply" else "revert")()
"""
"""One worker's process: applies and reverts, and is killed at one step of the phase that is asked for."""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "patch"


@pytest.fixture
def target(package: Path) -> Path:
    return package / TARGET


def live(package: Path, root: Path, phase: str, deadly: int = -1) -> int:
    words = [sys.executable, "-c", LIFE, str(package), str(root), phase, str(deadly)]
    return subprocess.run(words, timeout=60, check=False).returncode


@contextmanager
def holding(package: Path, root: Path) -> Iterator[subprocess.Popen[str]]:
    """Another worker's process that has applied the edit, and reverts when its input ends."""
    words = [sys.executable, "-c", LIFE, str(package), str(root), "hold", "-1"]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "applied\n"
            yield process
        finally:
            process.kill()
            process.wait(30)


def steps_of(package: Path, root: Path, phase: str) -> list[str]:
    """The steps of applying or reverting, in order."""
    steps: list[str] = []
    installer = SourceInstaller(package, root, steps.append)
    installer.apply()
    applying = list(steps)
    installer.revert()
    return applying if phase == "apply" else steps[len(applying) :]


def test_apply_edits_one_file_and_revert_leaves_no_trace(package: Path, root: Path, target: Path) -> None:
    before, stat = contents(package.parent), target.stat()
    installer = SourceInstaller(package, root)
    installer.apply()
    assert contents(package.parent) == before | {f"sglang/{TARGET}": EDITED}
    state = installer.state()
    assert (state.condition, state.edit, state.holders) == (Condition.PATCHED, edit.VERSION, (os.getpid(),))
    installer.revert()
    assert contents(package.parent) == before
    assert (target.stat().st_mode, target.stat().st_mtime_ns) == (stat.st_mode, stat.st_mtime_ns)
    assert installer.state().condition is Condition.PRISTINE
    assert set(contents(state_directory(package, root))) == {"lock"}


def test_applying_and_reverting_twice_is_as_once(package: Path, root: Path, target: Path) -> None:
    installer = SourceInstaller(package, root)
    assert installer.apply() == installer.apply()
    assert target.read_bytes() == EDITED
    assert len(installer.state().holders) == 1
    installer.revert()
    installer.revert()
    assert target.read_bytes() == ORIGINAL
    installer.apply()
    installer.revert()
    assert target.read_bytes() == ORIGINAL


def test_reverting_what_was_never_applied_touches_nothing(package: Path, root: Path) -> None:
    before = contents(package.parent)
    restore_abandoned(package, root)
    assert contents(package.parent) == before
    assert not root.exists()


@pytest.mark.parametrize("phase", ["apply", "revert"])
def test_a_kill_at_any_step_leaves_what_the_next_start_restores(
    package: Path, root: Path, target: Path, phase: str
) -> None:
    released = contents(package.parent)
    steps = steps_of(package, root, phase)
    assert len(steps) == len(set(steps)) > 8
    for deadly, step in enumerate(steps):
        for next_start in ("restores", "applies"):
            assert live(package, root, phase, deadly) == -signal.SIGKILL, step
            assert target.read_bytes() in (ORIGINAL, EDITED), step
            if next_start == "applies":
                # The next worker goes on with the same installer at once.
                installer = SourceInstaller(package, root)
                installer.apply()
                assert target.read_bytes() == EDITED, step
                assert installer.state().holders == (os.getpid(),), step
                installer.revert()
            else:
                restore_abandoned(package, root)
            assert contents(package.parent) == released, step
            assert check(package).condition is Condition.PRISTINE, step
            assert set(contents(state_directory(package, root))) == {"lock"}, step
    assert live(package, root, phase, len(steps)) == 0


def test_a_half_written_file_is_never_in_the_place_of_the_real_one(package: Path, root: Path, target: Path) -> None:
    steps = steps_of(package, root, "apply")
    assert live(package, root, "apply", steps.index("edit: rename")) == -signal.SIGKILL
    assert target.with_name(PARTIAL_NAME).exists()
    state = check(package)
    assert state.condition is Condition.FOREIGN
    restore_abandoned(package, root)
    assert not target.with_name(PARTIAL_NAME).exists()


def test_a_hard_link_to_the_file_keeps_the_released_bytes(
    package: Path, root: Path, target: Path, tmp_path: Path
) -> None:
    twin = tmp_path / "cache.py"
    os.link(target, twin)
    before = twin.stat()
    installer = SourceInstaller(package, root)
    installer.apply()
    assert target.read_bytes() == EDITED
    assert twin.read_bytes() == ORIGINAL
    installer.revert()
    assert twin.read_bytes() == target.read_bytes() == ORIGINAL
    assert (twin.stat().st_ino, twin.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_no_compiled_file_outlives_the_source_it_came_from(package: Path, root: Path, target: Path) -> None:
    compiled = target.parent / "__pycache__" / "model_runner.cpython-311.pyc"
    other = target.parent / "__pycache__" / "other.cpython-311.pyc"
    compiled.parent.mkdir()
    installer = SourceInstaller(package, root)
    for change in (installer.apply, installer.revert):
        compiled.write_bytes(b"stale")
        other.write_bytes(b"not ours")
        change()
        assert not compiled.exists()
        assert other.exists()


def test_a_foreign_change_is_refused_by_name_and_kept(package: Path, root: Path, target: Path) -> None:
    foreign = ORIGINAL + b"\n# by hand\n"
    target.write_bytes(foreign)
    with pytest.raises(PatchError, match="somebody else changed it") as refused:
        SourceInstaller(package, root).apply()
    assert str(target) in str(refused.value)
    assert "--force-reinstall --no-deps sglang==9.8.7" in str(refused.value)
    assert target.read_bytes() == foreign
    restore_abandoned(package, root)
    assert target.read_bytes() == foreign
    assert check(package).changed == (f"sglang/{TARGET}",)


def test_a_foreign_change_on_top_of_the_edit_is_kept_until_it_is_reinstalled(
    package: Path, root: Path, target: Path
) -> None:
    installer = SourceInstaller(package, root)
    installer.apply()
    target.write_bytes(EDITED + b"\n# by hand\n")
    with pytest.raises(PatchError, match="somebody else changed it"):
        installer.revert()
    assert target.read_bytes() == EDITED + b"\n# by hand\n"
    assert check(package).condition is Condition.FOREIGN
    target.write_bytes(ORIGINAL)
    restore_abandoned(package, root)
    assert set(contents(state_directory(package, root))) == {"lock"}


def test_foreign_changes_elsewhere_survive_apply_and_revert(package: Path, root: Path) -> None:
    (package / "srt/environ.py").write_text("FLAGS = {1}\n")
    before = contents(package.parent)
    installer = SourceInstaller(package, root)
    installer.apply()
    state = installer.state()
    assert (state.condition, state.edit) == (Condition.FOREIGN, edit.VERSION)
    assert state.changed == ("sglang/srt/environ.py",)
    installer.revert()
    assert contents(package.parent) == before


def test_a_package_without_a_record_is_not_edited(package: Path, root: Path, target: Path) -> None:
    (package.parent / "sglang-9.8.7.dist-info" / "RECORD").unlink()
    with pytest.raises(PatchError, match="install SGLang from a wheel, or use the installer plugin"):
        SourceInstaller(package, root).apply()
    assert target.read_bytes() == ORIGINAL
    restore_abandoned(package, root)


def test_the_journal_is_enough_where_the_record_has_gone_since(package: Path, root: Path, target: Path) -> None:
    assert live(package, root, "apply") == 0
    assert target.read_bytes() == EDITED
    (package.parent / "sglang-9.8.7.dist-info" / "RECORD").unlink()
    restore_abandoned(package, root)
    assert target.read_bytes() == ORIGINAL


def test_the_record_is_enough_where_journal_and_backup_have_gone_since(package: Path, root: Path, target: Path) -> None:
    assert live(package, root, "apply") == 0
    for file in ("journal.json", "original"):
        (state_directory(package, root) / file).unlink()
    restore_abandoned(package, root)
    assert target.read_bytes() == ORIGINAL


def test_a_newer_release_installed_over_an_abandoned_edit_stays(
    package: Path, root: Path, target: Path, tmp_path: Path
) -> None:
    assert live(package, root, "apply") == 0
    shutil.rmtree(package.parent)
    newer = MODEL_RUNNER.replace("without a model", "of a newer release")
    install(package.parent, "9.8.8", {"__init__.py": "", TARGET: newer})
    restore_abandoned(package, root)
    assert target.read_text() == newer
    assert check(package).condition is Condition.PRISTINE
    assert set(contents(state_directory(package, root))) == {"lock"}


def test_the_edit_stays_until_the_last_live_worker_has_reverted(package: Path, root: Path, target: Path) -> None:
    installer = SourceInstaller(package, root)
    with holding(package, root) as other:
        installer.apply()
        assert set(installer.state().holders) == {os.getpid(), other.pid}
        installer.revert()
        assert target.read_bytes() == EDITED
        restore_abandoned(package, root)
        assert target.read_bytes() == EDITED
        other.communicate(timeout=30)
        assert other.returncode == 0
    assert target.read_bytes() == ORIGINAL


def test_a_killed_worker_holds_the_edit_no_longer(package: Path, root: Path, target: Path) -> None:
    with holding(package, root) as other:
        other.kill()
        other.wait(30)
        assert target.read_bytes() == EDITED
        state = SourceInstaller(package, root).state()
        assert (state.condition, state.holders) == (Condition.PATCHED, ())
        assert "layertap engine revert" in str(state.remedy)
        restore_abandoned(package, root)
    assert target.read_bytes() == ORIGINAL


def test_many_workers_at_once_never_see_the_package_without_the_edit_they_need(
    package: Path, root: Path, target: Path
) -> None:
    code = (
        "import sys; from pathlib import Path; from worker.patch import edit\n"
        "from worker.patch.source import SourceInstaller as S\n"
        "p, r = map(Path, sys.argv[1:]); t = p / 'srt/model_executor/model_runner.py'; i = S(p, r)\n"
        "for _ in range(25):\n"
        "    i.apply(); assert edit.remove(t.read_bytes()); i.revert()\n"
    )
    crowd = [subprocess.Popen([sys.executable, "-c", code, package, root]) for _ in range(4)]
    assert [process.wait(120) for process in crowd] == [0, 0, 0, 0]
    assert target.read_bytes() == ORIGINAL
    assert set(contents(state_directory(package, root))) == {"lock"}


def test_an_edit_of_another_release_is_replaced_only_when_nobody_uses_it(
    package: Path, root: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with holding(package, root):
        monkeypatch.setattr(edit, "VERSION", edit.VERSION + 1)
        monkeypatch.setattr(edit, "BLOCK", edit.BLOCK + "pass\n")
        installer = SourceInstaller(package, root)
        with pytest.raises(PatchError, match="edit of another Layertap release"):
            installer.apply()
        assert target.read_bytes() == EDITED
    installer.apply()
    assert target.read_bytes() == edit.insert(ORIGINAL) != EDITED
    assert json.loads((state_directory(package, root) / "journal.json").read_text())["edit"] == edit.VERSION
    installer.revert()
    assert target.read_bytes() == ORIGINAL


@pytest.mark.parametrize("failing", range(3))
def test_a_full_disk_leaves_the_package_pristine_and_unclaimed(
    package: Path, root: Path, monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    released = contents(package.parent)
    sync, calls = os.fsync, iter(range(100))

    def full_disk(fd: int) -> None:
        if next(calls) == 2 * failing:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        sync(fd)

    installer = SourceInstaller(package, root)
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full_disk)
        with pytest.raises(PatchError, match="No space left"):
            installer.apply()
    assert contents(package.parent) == released
    assert installer.state().holders == ()
    installer.revert()
    assert set(contents(state_directory(package, root))) == {"lock"}


def test_a_state_folder_that_cannot_be_made_is_a_clear_error(package: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(PatchError, match="--patch-dir"):
        SourceInstaller(package, tmp_path / "file").apply()


def test_the_wait_for_the_lock_is_bounded(tmp_path: Path) -> None:
    with (
        claims.locked(tmp_path),
        pytest.raises(PatchError, match="another process"),
        claims.locked(tmp_path, timeout=0.05),
    ):
        pass


def test_a_release_that_cannot_be_edited_is_refused_with_what_else_to_use(tmp_path: Path, root: Path) -> None:
    odd = install(tmp_path / "odd", files={"__init__.py": "", TARGET: "class ModelRunner:\n    pass\n"})
    with pytest.raises(PatchError, match="use plugin or forward_hooks"):
        SourceInstaller(odd, root).apply()
