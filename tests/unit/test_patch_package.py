"""What a package is, compared with its record; and which installer it offers."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from fixtures_packages import FILES, install

from worker.engine.spec import EngineSpec, environment
from worker.engine.spec import command as engine_command
from worker.patch.attachment import PLUGIN_NAME
from worker.patch.choice import choose, make, patch_digest
from worker.patch.installer import INSTALLERS
from worker.patch.package import TARGET, Condition, PatchError, check, find_package, find_package_of

APPLY_AND_END = """
import sys
from pathlib import Path
from worker.patch.source import SourceInstaller
SourceInstaller(*map(Path, sys.argv[1:])).apply()
"""


def test_a_package_as_released_is_pristine(package: Path) -> None:
    state = check(package)
    assert state.condition is Condition.PRISTINE
    assert (state.version, state.files, state.edit, state.remedy) == ("9.8.7", len(FILES), None, None)


def test_compiled_caches_are_no_change(package: Path) -> None:
    (package / "__pycache__").mkdir()
    (package / "__pycache__" / "__init__.cpython-311.pyc").write_bytes(b"anything")
    (package / "loose.pyc").write_bytes(b"anything")
    assert check(package).condition is Condition.PRISTINE


def test_foreign_changes_are_listed_file_by_file(package: Path) -> None:
    before = (package / "srt/environ.py").stat()
    (package / "srt/environ.py").write_text("FLAGS = ()\n")
    # Size and times prove nothing.
    os.utime(package / "srt/environ.py", ns=(before.st_atime_ns, before.st_mtime_ns))
    (package / "kernels/a, b.json").unlink()
    (package / "extra.py").touch()
    state = check(package)
    assert state.condition is Condition.FOREIGN
    assert state.changed == ("sglang/srt/environ.py",)
    assert state.missing == ("sglang/kernels/a, b.json",)
    assert state.added == ("sglang/extra.py",)
    assert state.remedy is not None
    assert "sglang==9.8.7" in state.remedy


def test_a_package_without_a_record_is_a_state_of_its_own_with_a_remedy(package: Path) -> None:
    shutil.rmtree(package.parent / "sglang-9.8.7.dist-info")
    state = check(package)
    assert state.condition is Condition.UNVERIFIABLE
    assert state.remedy is not None
    assert "install SGLang from a wheel" in state.remedy


def test_an_editable_installation_is_unverifiable(package: Path) -> None:
    origin = {"url": "file:///src", "dir_info": {"editable": True}}
    (package.parent / "sglang-9.8.7.dist-info" / "direct_url.json").write_text(json.dumps(origin))
    state = check(package)
    assert state.condition is Condition.UNVERIFIABLE
    assert "editable" in str(state.remedy)


def test_two_records_side_by_side_are_not_guessed_between(package: Path) -> None:
    (package.parent / "sglang-1.0.dist-info").mkdir()
    assert "2 records" in str(check(package).remedy)


def test_a_folder_that_is_no_package_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PatchError, match=r"no SGLang package"):
        check(tmp_path)


def test_the_package_is_the_one_that_an_engine_would_import(
    tmp_path: Path, package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = find_package()
    assert find_package_of(Path(sys.executable)) == installed
    monkeypatch.syspath_prepend(package.parent)
    monkeypatch.setenv("PYTHONPATH", str(package.parent))
    assert find_package() == package.resolve()
    assert find_package_of(Path(sys.executable)) == package.resolve()
    with pytest.raises(PatchError, match="did not answer"):
        find_package_of(tmp_path / "no-python")


def test_the_first_installer_that_the_package_offers_is_chosen(tmp_path: Path, package: Path) -> None:
    assert choose("auto", package) == "plugin"
    old = install(tmp_path / "old", files={name: text for name, text in FILES.items() if "plugins" not in name})
    assert choose("auto", old) == "forward_hooks"
    assert choose("source", old) == "source"
    with pytest.raises(PatchError, match=r"--installer plugin: .*use forward_hooks or source"):
        choose("plugin", old)
    with pytest.raises(PatchError, match=r"install SGLang 0\.5\.9 or newer"):
        choose("auto", tmp_path)


def test_the_digest_tells_installers_apart_and_stays_the_same(package: Path) -> None:
    digests = [patch_digest(make(name, package)) for name in INSTALLERS]
    assert len(set(digests)) == len(INSTALLERS)
    assert digests == [patch_digest(make(name, package)) for name in INSTALLERS]
    assert all(len(digest) == 64 for digest in digests)


def test_only_the_plugin_installer_names_the_plugin(package: Path, tmp_path: Path) -> None:
    for name in INSTALLERS:
        installer = make(name, package, tmp_path / "patch")
        applied = installer.apply()
        assert applied.installer == name
        assert applied.environment == {"LAYERTAP_INSTALLER": name}
        assert applied.plugins == ((PLUGIN_NAME,) if name == "plugin" else ())
        installer.revert()
    assert check(package).condition is Condition.PRISTINE


def command(*words: str | Path) -> subprocess.CompletedProcess[str]:
    full = [sys.executable, "-m", "layertap.cli", "engine", *map(str, words)]
    return subprocess.run(full, capture_output=True, text=True, timeout=60, check=False)


def test_people_can_see_verify_and_revert_an_abandoned_edit(package: Path, tmp_path: Path) -> None:
    where = ("--package", package, "--patch-dir", tmp_path / "patch")
    released = (package / "srt/model_executor/model_runner.py").read_bytes()
    assert command("verify", *where).returncode == 0
    subprocess.run([sys.executable, "-c", APPLY_AND_END, package, tmp_path / "patch"], check=True, timeout=60)
    shown = command("status", *where, "--json")
    assert shown.returncode == 0
    assert json.loads(shown.stdout)["condition"] == "patched"
    verified = command("verify", *where)
    assert verified.returncode == 1
    assert "needed by no live worker" in verified.stdout
    reverted = command("revert", *where)
    assert reverted.returncode == 0
    assert reverted.stdout.startswith("pristine: SGLang 9.8.7")
    assert (package / "srt/model_executor/model_runner.py").read_bytes() == released


def test_a_command_on_no_package_fails_with_a_readable_error(tmp_path: Path) -> None:
    failed = command("status", "--package", tmp_path)
    assert failed.returncode == 2
    assert failed.stderr.startswith("error: ")
    assert "Traceback" not in failed.stderr


def test_the_engine_is_started_with_what_the_installer_asks_for(package: Path, tmp_path: Path) -> None:
    spec = EngineSpec("/m", "BF16", "cpu", "9.8.7", extra_args=("--forward-hooks=[]",))
    base = {"SGLANG_PLUGINS": "theirs", "LAYERTAP_INSTALLER": "auto"}
    for name in INSTALLERS:
        installer = make(name, package, tmp_path / "patch")
        applied = installer.apply()
        env = environment(spec, base, tmp_path, applied)
        assert env["LAYERTAP_INSTALLER"] == name
        plugins = env["SGLANG_PLUGINS"].split(",")
        assert plugins == ["theirs", *([PLUGIN_NAME] if name == "plugin" else []), "layertap_cpu"]
        words = engine_command(spec, 1, "key", applied)
        assert (words[-2] == "--forward-hooks") == (name == "forward_hooks")
        installer.revert()


def test_a_worker_start_takes_out_what_a_dead_worker_left_and_names_an_installer_that_is_not_there(
    tmp_path: Path,
) -> None:
    old = install(tmp_path / "site", files={name: text for name, text in FILES.items() if "plugins" not in name})
    (old.parent / "sglang-9.8.7.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: sglang\nVersion: 9.8.7\n"
    )
    released = (old / TARGET).read_bytes()
    subprocess.run([sys.executable, "-c", APPLY_AND_END, old, tmp_path / "patch"], check=True, timeout=60)
    assert (old / TARGET).read_bytes() != released
    (tmp_path / "model").mkdir()
    sizes = {"num_hidden_layers": 2, "hidden_size": 8, "vocab_size": 9, "max_position_embeddings": 64}
    (tmp_path / "model" / "config.json").write_text(json.dumps(sizes | {"dtype": "bfloat16"}))
    words = ["--model", tmp_path / "model", "--run-dir", tmp_path / "run", "--patch-dir", tmp_path / "patch"]
    started = subprocess.run(
        [sys.executable, "-m", "worker", *map(str, words), "--installer", "plugin"],
        env=os.environ | {"PYTHONPATH": str(old.parent)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert started.returncode == 2, started.stderr
    assert "--installer plugin" in started.stderr
    assert (old / TARGET).read_bytes() == released
    assert check(old).condition is Condition.PRISTINE
