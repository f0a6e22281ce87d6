"""What a worker finds on its machine: the device, room on its disks, and the way to its service."""

import asyncio
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest

from worker import __main__ as process
from worker.service_api import ServiceApi
from worker.settings import Settings
from worker.worker import Worker


@pytest.mark.parametrize(("visible", "device"), [(None, "cuda"), ("0", "cuda"), ("", "cpu"), ("-1", "cpu")])
def test_a_worker_that_is_shown_no_gpu_runs_on_the_cpu(
    nvidia_driver: None, monkeypatch: pytest.MonkeyPatch, visible: str | None, device: str
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert process._device(Settings()) == device


@pytest.mark.parametrize(("visible", "ranks"), [("", 1), ("0", 2), ("0,1,-1,2", 3)])
def test_a_worker_that_is_shown_too_few_gpus_says_so(
    nvidia_driver: None, monkeypatch: pytest.MonkeyPatch, visible: str, ranks: int
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with pytest.raises(
        process.DeviceError, match=rf"CUDA_VISIBLE_DEVICES names \d GPUs, --tensor-parallel needs {ranks}"
    ):
        process._device(Settings(device="cuda", tensor_parallel=ranks))


@pytest.mark.parametrize(
    ("storage", "run_dir", "room"), [(1 << 30, 1 << 30, True), (1 << 20, 1 << 30, False), (1 << 30, 1 << 20, False)]
)
def test_a_worker_needs_room_for_the_shard_and_for_its_own_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, storage: int, run_dir: int, room: bool
) -> None:
    free = {tmp_path / "storage": storage, tmp_path / "run": run_dir}
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=free[folder]))
    worker = Worker(Settings(storage=tmp_path / "storage", run_dir=tmp_path / "run"), [], "cpu", 1024)
    assert asyncio.run(worker._has_room(64 << 20)) is room


@pytest.mark.parametrize(("host", "proxied"), [("127.0.0.1", False), ("localhost", False), ("10.0.0.5", True)])
def test_a_proxy_of_the_machine_is_not_asked_for_a_service_on_it(
    monkeypatch: pytest.MonkeyPatch, host: str, proxied: bool
) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://10.1.1.1:3128")
    api = ServiceApi(f"http://{host}:8178", None)
    chosen = cast(Any, api._http)._transport_for_url(httpx.URL(f"http://{host}:8178/v1/workers"))
    assert (chosen is not api._http._transport) is proxied
