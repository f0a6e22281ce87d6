"""The source edit as pure rules: where it goes, that it adds and removes nothing else, and what it does when run."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from fixtures_packages import MODEL_RUNNER

from worker.patch import edit
from worker.patch.edit import UnknownSourceError

ORIGINAL = MODEL_RUNNER.encode()


def run_edited(tmp_path: Path, code: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Loads the edited model runner in a process that finds no installed `worker`, only what lies in `tmp_path`."""
    (tmp_path / "model_runner.py").write_bytes(edit.insert(ORIGINAL))
    plain = {name: value for name, value in os.environ.items() if not name.startswith(("LAYERTAP_", "PYTHON"))}
    words = [sys.executable, "-S", "-c", f"import sys; sys.path[:0] = [{str(tmp_path)!r}]\n{code}"]
    return subprocess.run(words, env=plain | env, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=60)


def with_a_capture(tmp_path: Path) -> None:
    """A `worker.capture.source` that prints what it is given."""
    (tmp_path / "worker" / "capture").mkdir(parents=True)
    (tmp_path / "worker" / "__init__.py").touch()
    (tmp_path / "worker" / "capture" / "__init__.py").touch()
    code = "def after_load(runner):\n    print('attached to', type(runner).__name__, runner.model is not None)\n"
    (tmp_path / "worker" / "capture" / "source.py").write_text(code)


LOAD = "from model_runner import ModelRunner\nModelRunner().load_model()\nprint('loaded', 'worker' in sys.modules)"
OURS = {"LAYERTAP_ENGINE_DIR": "/run", "LAYERTAP_INSTALLER": "source"}


def test_removing_the_edit_gives_every_byte_back() -> None:
    edited = edit.insert(ORIGINAL)
    assert edited != ORIGINAL
    assert edit.remove(edited) == (ORIGINAL, edit.VERSION)
    assert edit.remove(ORIGINAL) is None


def test_windows_line_ends_survive_the_edit() -> None:
    original = ORIGINAL.replace(b"\n", b"\r\n")
    edited = edit.insert(original)
    assert b"\n" not in edited.replace(b"\r\n", b"")
    assert edit.remove(edited) == (original, edit.VERSION)


def test_an_edited_engine_of_a_worker_attaches_once_the_model_is_loaded(tmp_path: Path) -> None:
    with_a_capture(tmp_path)
    assert run_edited(tmp_path, LOAD, **OURS).stdout == "attached to ModelRunner True\nloaded True\n"


@pytest.mark.parametrize(
    "env",
    [
        {},
        {"LAYERTAP_INSTALLER": "source"},
        {"LAYERTAP_ENGINE_DIR": "/run"},
        {"LAYERTAP_ENGINE_DIR": "/run", "LAYERTAP_INSTALLER": "plugin"},
        {"LAYERTAP_ENGINE_DIR": "/run", "LAYERTAP_INSTALLER": "forward_hooks"},
    ],
)
def test_an_edited_engine_of_anybody_else_imports_nothing_of_ours(tmp_path: Path, env: dict[str, str]) -> None:
    with_a_capture(tmp_path)
    assert run_edited(tmp_path, LOAD, **env).stdout == "loaded False\n"


def test_a_capture_that_cannot_be_imported_leaves_the_engine_running_and_says_so(tmp_path: Path) -> None:
    done = run_edited(tmp_path, LOAD, **OURS)
    assert done.stdout == "loaded False\n"
    assert "this engine runs unpatched" in done.stderr


def test_a_capture_that_fails_stops_the_load(tmp_path: Path) -> None:
    with_a_capture(tmp_path)
    (tmp_path / "worker" / "capture" / "source.py").write_text("def after_load(runner):\n    raise ValueError('no')\n")
    with pytest.raises(subprocess.CalledProcessError) as failed:
        run_edited(tmp_path, LOAD, **OURS)
    assert "ValueError: no" in failed.value.stderr


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda text: text.replace("load_model", "load"), "0 times"),
        (lambda text: text.replace("class ModelRunner", "class Runner"), "0 times"),
        (lambda text: text + "\n    def load_model(self):\n        pass\n", "2 times"),
        (lambda text: text.replace("self.model = object()", "return"), "may end before"),
        (lambda text: text.replace("def load_model(self)", "def load_model(runner)"), "not self"),
        (lambda text: text.replace("def load_model(self):", "def load_model(self)"), "not Python"),
        (lambda text: text[: text.index("\n\n    def forward")], "not ended"),
        (lambda text: edit.insert(text.encode()).decode(), "already"),
    ],
)
def test_a_source_that_is_not_understood_is_not_edited(change, reason: str) -> None:
    with pytest.raises(UnknownSourceError, match=reason):
        edit.insert(change(MODEL_RUNNER).encode())


def test_a_block_that_somebody_touched_is_not_taken_for_ours() -> None:
    edited = edit.insert(ORIGINAL)
    assert edit.remove(edited.replace(b"_layertap_after_load(self)", b"_layertap_after_load(None)")) is None
    assert edit.remove(edited + edited) is None
