"""Each installer on the real engine: the capture reports in, and delivers what the others deliver, to the bit."""

import asyncio
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from worker.engine.engine import Engine
from worker.engine.probe import Probed, probe
from worker.engine.spec import EngineSpec
from worker.models import facts
from worker.patch.installer import InstallerName
from worker.patch.package import TARGET, Condition, check, find_package
from worker.patch.source import SourceInstaller

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(1000)]

LENGTHS = (1, 40, 300)
"""The last is cut into chunks."""


def spec(model: Path, installer: InstallerName, patch_dir: Path) -> EngineSpec:
    return EngineSpec.of(
        facts(model),
        "cpu",
        chunked_prefill_size=128,
        max_total_tokens=4096,
        pool_bytes=64 << 20,
        installer=installer,
        patch_dir=str(patch_dir),
    )


def rows() -> list[np.ndarray]:
    random = np.random.default_rng(5)
    return [random.integers(3, 49152, length).astype(np.int32) for length in LENGTHS]


async def states(engine: Engine, installer: str) -> list[Probed]:
    """Each row prefilled alone, so that nothing hangs on how the engine makes up its batches."""
    assert [report.installer for report in engine.reports] == [installer]
    assert engine.describe()["installer"] == installer
    boundaries = range(engine.reports[0].num_layers + 1)
    return [(await probe(engine, [row], boundaries))[0] for row in rows()]


async def extract(model: Path, installer: InstallerName, folder: Path) -> tuple[list[Probed], dict[str, object]]:
    engine = Engine(spec(model, installer, folder / "patch"), folder / installer, prefill_timeout=60)
    try:
        await engine.launch(timeout=420)
        return await states(engine, installer), engine.describe()
    finally:
        await engine.stop()


def assert_equal(found: Sequence[Probed], expected: Sequence[Probed]) -> None:
    for row, right in zip(found, expected, strict=True):
        assert row.nonfinite == right.nonfinite == 0
        assert row.hidden_states.tobytes() == right.hidden_states.tobytes()
        assert row.final_hidden_state.tobytes() == right.final_hidden_state.tobytes()


@pytest.fixture(scope="module")
def by_plugin(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Probed], dict[str, object]]:
    """The states that the `plugin` installer's engine delivers, and what that engine says of itself."""
    found = asyncio.run(extract(tiny_llama, "plugin", tmp_path_factory.mktemp("plugin")))
    assert any(np.any(row.hidden_states[:, 0] != row.hidden_states[:, -1]) for row in found[0])
    return found


@pytest.fixture
def own_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the installed SGLang that this test alone uses, found before the installed one."""
    installed = find_package()
    site = tmp_path / "site"
    shutil.copytree(installed, site / installed.name)
    (info,) = installed.parent.glob("sglang-*.dist-info")
    shutil.copytree(info, site / info.name)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH", "")])))
    monkeypatch.syspath_prepend(site)
    assert find_package() == (site / installed.name).resolve()
    return site / installed.name


def test_forward_hooks_deliver_what_the_plugin_delivers(
    tiny_llama: Path, tmp_path: Path, by_plugin: tuple[list[Probed], dict[str, object]]
) -> None:
    found, described = asyncio.run(extract(tiny_llama, "forward_hooks", tmp_path))
    assert_equal(found, by_plugin[0])
    assert described["patch_digest"] != by_plugin[1]["patch_digest"]


def test_the_source_edit_delivers_what_the_plugin_delivers_and_is_gone_after_the_engine(
    tiny_llama: Path, tmp_path: Path, own_copy: Path, by_plugin: tuple[list[Probed], dict[str, object]]
) -> None:
    released = (own_copy / TARGET).read_bytes()

    async def life() -> list[Probed]:
        engine = Engine(spec(tiny_llama, "source", tmp_path / "patch"), tmp_path / "engine", prefill_timeout=60)
        try:
            await engine.launch(timeout=420)
            assert SourceInstaller(own_copy, tmp_path / "patch").state().condition is Condition.PATCHED
            return await states(engine, "source")
        finally:
            await engine.stop()

    found = asyncio.run(life())
    assert_equal(found, by_plugin[0])
    assert (own_copy / TARGET).read_bytes() == released
    assert check(own_copy).condition is Condition.PRISTINE
