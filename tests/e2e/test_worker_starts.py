"""Workers that must refuse to start, and what they say. No engine is launched here."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from fixtures_service_process import until
from fixtures_stack import Stack, WorkerProcess, open_stack


@pytest.fixture(scope="module")
def idle_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with open_stack(tmp_path_factory.mktemp("starts")) as stack:
        yield stack


def exit_code(worker: WorkerProcess) -> int:
    until(lambda: worker.child.exit_code is not None, 90)
    assert worker.child.exit_code is not None
    return worker.child.exit_code


def test_a_second_worker_with_the_same_run_dir_refuses(idle_stack: Stack, tiny_llama: Path) -> None:
    first = idle_stack.start_worker("shared", tiny_llama)
    second = idle_stack.launch_worker("shared", tiny_llama)
    assert exit_code(second) == 2
    assert f"another worker uses {first.run_dir}; give each worker a --run-dir of its own" in second.log()
    assert first.child.exit_code is None
    assert first.terminate() == 0


def test_a_worker_that_sees_another_storage_refuses(idle_stack: Stack, tiny_llama: Path, tmp_path: Path) -> None:
    (tmp_path / ".layertap-storage").write_text("somebody else's nonce")
    worker = idle_stack.launch_worker("stranger", tiny_llama, storage=tmp_path)
    assert exit_code(worker) == 1
    assert "the worker does not see the storage directory of the service" in worker.log()


def test_a_worker_without_a_usable_model_names_the_folder_and_the_remedy(idle_stack: Stack, tmp_path: Path) -> None:
    worker = idle_stack.launch_worker("modelless", tmp_path)
    assert exit_code(worker) == 2
    assert f"{tmp_path} has no config.json" in worker.log()
