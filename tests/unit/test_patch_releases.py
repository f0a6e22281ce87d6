"""The installers on released SGLang packages, unpacked from their wheels; of their code only the hook manager runs."""

import ast
import importlib.util
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from fixtures_packages import RELEASES, contents
from torch import nn

from worker.capture import attach
from worker.capture.forward_hooks import NoModelRunnerError, attach_from_here
from worker.patch import edit
from worker.patch.attachment import ForwardHooksInstaller
from worker.patch.choice import choose, restore_abandoned
from worker.patch.package import TARGET, Condition, check
from worker.patch.source import SourceInstaller, state_directory

Released = Callable[[str], Path]


@pytest.fixture(params=RELEASES)
def release(request: pytest.FixtureRequest, released: Released) -> Path:
    return released(request.param)


def test_the_source_edit_applies_and_reverts_to_the_byte(release: Path, tmp_path: Path) -> None:
    assert check(release).condition is Condition.PRISTINE
    target, released = release / TARGET, contents(release / "srt/model_executor")
    twin = tmp_path / "cache.py"
    os.link(target, twin)
    installer = SourceInstaller(release, tmp_path / "patch")
    installer.apply()
    state = installer.state()
    assert (state.condition, state.edit, state.version) == (Condition.PATCHED, edit.VERSION, release.parent.name)
    compile(target.read_bytes(), str(target), "exec", dont_inherit=True)
    assert edit.remove(target.read_bytes()) == (twin.read_bytes(), edit.VERSION)
    assert last_statements(target.read_text()) == [ast.unparse(node) for node in ast.parse(edit.BLOCK).body]
    installer.revert()
    assert contents(release / "srt/model_executor") == released
    assert check(release).condition is Condition.PRISTINE
    assert twin.read_bytes() == target.read_bytes()


def last_statements(source: str) -> list[str]:
    """The end of `ModelRunner.load_model`, as many statements as the edit has."""
    runner = next(n for n in ast.parse(source).body if isinstance(n, ast.ClassDef) and n.name == "ModelRunner")
    load = next(n for n in runner.body if isinstance(n, ast.FunctionDef) and n.name == "load_model")
    return [ast.unparse(node) for node in load.body[-len(ast.parse(edit.BLOCK).body) :]]


def test_an_abandoned_edit_of_a_release_is_found_without_its_journal(release: Path, tmp_path: Path) -> None:
    released = (release / TARGET).read_bytes()
    installer = SourceInstaller(release, tmp_path / "lost")
    installer.apply()
    assert state_directory(release, tmp_path / "other") != state_directory(release, tmp_path / "lost")
    restore_abandoned(release, tmp_path / "other")
    assert (release / TARGET).read_bytes() == released


def test_the_plugin_is_chosen_where_there_is_a_plugin_framework(released: Released) -> None:
    chosen = {version: choose("auto", released(version)) for version in RELEASES}
    assert chosen == {"0.5.9": "forward_hooks", "0.5.10": "forward_hooks", "0.5.16": "plugin", "0.5.23": "plugin"}
    for version in RELEASES:
        assert choose("source", released(version)) == "source"
        assert choose("forward_hooks", released(version)) == "forward_hooks"


class Model(nn.Module):
    """As SGLang runs it: by `forward`, past the module's own call."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, states: Any) -> Any:
        return self.layer(states)


class Runner(SimpleNamespace):
    """What holds a model and its configuration, as `ModelRunner` does, and registers hooks from a method or beside."""

    def initialize(self, manager: ModuleType, specs: list[dict[str, Any]]) -> None:
        manager.register_forward_hooks(self.model, specs)


@pytest.fixture
def attached(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, str]]:
    """The runners that the capture is attached to, in an engine patched by `forward_hooks`; and by which installer."""
    found: list[tuple[Any, str]] = []
    monkeypatch.setattr(attach, "attach", lambda runner, run_dir, installer: found.append((runner, installer)))
    monkeypatch.setenv("LAYERTAP_ENGINE_DIR", "/run")
    monkeypatch.setenv("LAYERTAP_INSTALLER", "forward_hooks")
    return found


def hook_manager(release: Path) -> ModuleType:
    file = release / "srt/model_executor/hook_manager.py"
    spec = importlib.util.spec_from_file_location(f"hook_manager_{release.parent.name.replace('.', '_')}", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def specs_of(release: Path) -> list[dict[str, Any]]:
    arguments = ForwardHooksInstaller(release).apply().arguments
    assert arguments[0] == "--forward-hooks"
    found: list[dict[str, Any]] = json.loads(arguments[1])
    return found


def finalize(model_runner: Runner, manager: ModuleType, specs: list[dict[str, Any]]) -> None:
    """How 0.5.16 and 0.5.23 do it; older releases do it in a method of the runner."""
    manager.register_forward_hooks(model_runner.model, specs)


@pytest.mark.parametrize("register", [finalize, Runner.initialize])
def test_hook_managers_of_all_releases_bring_the_capture_to_the_runner(
    release: Path, attached: list[tuple[Any, str]], register: Callable[..., None]
) -> None:
    model = Model()
    runner = Runner(model=model, model_config=SimpleNamespace(hidden_size=2))
    register(runner, hook_manager(release), specs_of(release))
    assert attached == [(runner, "forward_hooks")]
    assert len(model._forward_hooks) == 1
    assert not any(module._forward_hooks for module in model.children())


def test_hooks_of_a_draft_model_are_left_alone(release: Path, attached: list[tuple[Any, str]]) -> None:
    runner = Runner(model=Model(), model_config=SimpleNamespace(), is_draft_worker=True)
    finalize(runner, hook_manager(release), specs_of(release))
    assert attached == []


def test_a_factory_called_from_elsewhere_says_so(attached: list[tuple[Any, str]]) -> None:
    model = Model()
    with pytest.raises(NoModelRunnerError, match="--installer plugin or source"):
        (lambda model: attach_from_here({}))(model)
    assert attached == []


@pytest.mark.parametrize("installer", ["", "forward_hooks", "source"])
def test_the_plugin_stays_inert_when_another_installer_is_chosen(
    monkeypatch: pytest.MonkeyPatch, installer: str
) -> None:
    from worker.capture import plugin

    registered: list[str] = []
    registry = SimpleNamespace(register=lambda target, hook, kind: registered.append(target))
    stub = SimpleNamespace(HookRegistry=registry, HookType=SimpleNamespace(AFTER="after"))
    monkeypatch.setitem(sys.modules, "sglang.srt.plugins.hook_registry", stub)
    monkeypatch.setenv("LAYERTAP_ENGINE_DIR", "/run")
    monkeypatch.setenv("LAYERTAP_INSTALLER", installer)
    plugin.register()
    assert registered == []
    monkeypatch.setenv("LAYERTAP_INSTALLER", "plugin")
    plugin.register()
    assert registered == ["sglang.srt.model_executor.model_runner.ModelRunner.load_model"]
