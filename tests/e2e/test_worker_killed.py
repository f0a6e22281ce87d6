"""Workers killed with SIGKILL at the worst moments: the next one leaves no orphan and no edit, within seconds."""

import os
import shutil
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from engine_faults import LAYERS, MODEL, innocent
from fixtures_service_process import until
from fixtures_stack import PATIENCE, SLOW, Stack, WorkerProcess, open_stack

from layertap.schemas.incidents import IncidentKind
from worker.engine import processes
from worker.patch.package import TARGET, Condition, PatchState, check, find_package
from worker.patch.source import SourceInstaller

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(1200)]

SECONDS = 10
"""Within these a new worker has ended what is left of the old one's engine, and taken its edit out."""
EDIT = b"# layertap edit "


@dataclass
class Killable:
    """A stack whose workers run engines on a copy of SGLang, each engine with an orphan that ignores SIGTERM."""

    stack: Stack
    package: Path
    model: Path

    @property
    def fault(self) -> Path:
        return self.stack.root / "fault.json"

    def start(self, installer: str) -> WorkerProcess:
        """A worker on the one run directory and patch directory of this stack."""
        flags = (*SLOW, "--installer", installer, "--patch-dir", str(self.stack.root / "patch"))
        return self.stack.launch_worker("worker", self.model, flags=flags)

    def edited(self) -> bool:
        return EDIT in (self.package / TARGET).read_bytes()

    def state(self) -> PatchState:
        return SourceInstaller(self.package, self.stack.root / "patch").state()

    def orphans(self, worker: WorkerProcess) -> list[int]:
        return [pid for pid in worker.engine_pids() if "SIG_IGN" in _command(pid)]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a copy of the installed SGLang, and its record, that this module alone uses."""
    installed = find_package()
    folder = tmp_path_factory.mktemp("site")
    shutil.copytree(installed, folder / installed.name)
    (info,) = installed.parent.glob("sglang-*.dist-info")
    shutil.copytree(info, folder / info.name)
    return folder


@pytest.fixture
def killable(tmp_path: Path, tiny_llama: Path, site: Path) -> Iterator[Killable]:
    root = tmp_path / "stack"
    path = os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH", "")]))
    env = {"LAYERTAP_LEASE_SECONDS": "4", "PYTHONPATH": path, "TEST_ENGINE_FAULT": str(root / "fault.json")}
    with open_stack(root, env=env) as stack:
        yield Killable(stack, site / "sglang", tiny_llama)
    assert check(site / "sglang").condition is Condition.PRISTINE


def patched(killable: Killable, worker: WorkerProcess) -> None:
    """The edit has just been made; the engine may have been started, or not."""
    until(killable.edited, PATIENCE)


def launching(killable: Killable, worker: WorkerProcess) -> None:
    """The engine is loading its model."""
    until(lambda: killable.orphans(worker), PATIENCE, 0.1)


def serving(killable: Killable, worker: WorkerProcess) -> None:
    """A shard is half written."""
    worker.wait_mid_shard()
    assert killable.orphans(worker)


@pytest.mark.parametrize(
    ("installer", "moment"),
    [
        ("source", patched),
        ("source", launching),
        ("source", serving),
        ("plugin", launching),
        ("plugin", serving),
    ],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_a_worker_killed_at_any_moment_leaves_no_orphan_and_no_edit_once_the_next_has_started(
    killable: Killable, installer: str, moment: Callable[[Killable, WorkerProcess], None]
) -> None:
    killable.fault.write_text('{"at": "load", "do": "orphan"}')
    first = killable.start(installer)
    assert first.id
    job = killable.stack.submit([{"input_ids": ids} for ids in innocent(40, 500)], MODEL, LAYERS)
    moment(killable, first)
    first.kill()
    orphans = killable.orphans(first)
    assert bool(orphans) is (moment is not patched)
    assert killable.edited() is (installer == "source")
    killable.stack.client.cancel(job.id)

    second = killable.start(installer)
    until(lambda: not second.engine_pids() and not killable.edited(), SECONDS)
    assert not [pid for pid in orphans if processes.alive(pid)]
    state = killable.state()
    assert (state.condition, state.holders) == (Condition.PRISTINE, ())
    assert second.id, "it goes on and registers"
    assert ("of an engine that an earlier worker left behind" in second.log()) is bool(orphans)
    assert check(find_package()).condition is Condition.PRISTINE


def test_the_job_of_a_worker_killed_right_after_patching_is_done_by_the_next_which_leaves_no_edit(
    killable: Killable,
) -> None:
    first = killable.start("source")
    assert first.id
    job = killable.stack.submit([{"input_ids": ids} for ids in innocent(4)], MODEL, LAYERS)
    patched(killable, first)
    first.kill()
    second = killable.start("source")
    ended = killable.stack.succeeded(job)
    assert (ended.progress.rows_done, ended.progress.row_errors) == (4, 0)
    assert killable.stack.pull(ended).manifest.engine["installer"] == "source"
    # It is this copy that the engine has loaded.
    assert killable.state().condition is Condition.PATCHED
    assert second.terminate() == 0
    assert killable.state().condition is Condition.PRISTINE


def test_a_change_by_somebody_else_under_a_running_worker_costs_no_try_and_is_left_alone(killable: Killable) -> None:
    worker, target = killable.start("source"), killable.package / TARGET
    stack = killable.stack
    assert worker.id
    stack.succeeded(stack.submit([{"input_ids": ids} for ids in innocent(2)], MODEL, LAYERS))
    released = (find_package() / TARGET).read_bytes()
    foreign = released + b"# changed by somebody else\n"
    target.write_bytes(foreign)
    processes.send(list(worker.engine_pids()), signal.SIGKILL)
    job = stack.submit([{"input_ids": ids} for ids in innocent(2)], MODEL, LAYERS)
    until(lambda: any(i.kind is IncidentKind.DIED_LAUNCHING for i in stack.client.incidents()), PATIENCE)
    assert "somebody else changed it" in worker.log()
    assert target.read_bytes() == foreign
    target.write_bytes(released)
    stack.succeeded(job)
    assert stack.query("SELECT max(attempts) FROM tasks") == [(0,)]
    assert worker.terminate() == 0
    assert killable.state().condition is Condition.PRISTINE


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""
