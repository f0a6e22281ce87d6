"""A driver that fails says nothing, and raises nothing. The driver is a stand-in: a real one fails when it likes."""

from types import SimpleNamespace

import pynvml
import pytest

from worker.watchdog import gpu

NAMES = ["GPU-aa", "GPU-ab"]


@pytest.fixture
def driver(nvidia_driver: None, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Two GPUs, which hold 1 and 2 bytes and are busy for 10 and 20 per cent."""
    found = {
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlDeviceGetCount": lambda: 2,
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetUUID": lambda handle: NAMES[handle],
        "nvmlDeviceGetMemoryInfo": lambda handle: SimpleNamespace(used=handle + 1),
        "nvmlDeviceGetUtilizationRates": lambda handle: SimpleNamespace(gpu=10 * (handle + 1)),
    }
    for name, function in found.items():
        monkeypatch.setattr(pynvml, name, function)
    return monkeypatch


def test_only_the_gpus_named_are_looked_at(driver: pytest.MonkeyPatch) -> None:
    assert gpu.gpu_use(["0", "1"]) == gpu.GpuUse(3, 20)
    assert gpu.gpu_use(["GPU-aa"]) == gpu.GpuUse(1, 10)
    assert gpu.gpu_use(["GPU-ab"]) == gpu.gpu_use(["1"]) == gpu.GpuUse(2, 20)
    assert gpu.gpu_use(["2"]) is None
    assert gpu.gpu_use([]) is None
    assert len(gpu.gpu_lines()) == 2


@pytest.mark.parametrize(
    "call", ["nvmlInit", "nvmlShutdown", "nvmlDeviceGetCount", "nvmlDeviceGetHandleByIndex", "nvmlDeviceGetMemoryInfo"]
)
def test_a_driver_that_fails_raises_nothing(driver: pytest.MonkeyPatch, call: str) -> None:
    def fail(*args: object) -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)

    driver.setattr(pynvml, call, fail)
    use, lines = gpu.gpu_use(["0"]), gpu.gpu_lines()
    assert (use is None, lines == []) == (call != "nvmlShutdown", call != "nvmlShutdown")


def test_a_gpu_that_does_not_say_how_busy_it_is_is_unknown(driver: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)

    driver.setattr(pynvml, "nvmlDeviceGetUtilizationRates", fail)
    assert gpu.gpu_use(["0"]) == gpu.GpuUse(1, None)
    assert gpu.gpu_lines()[0] == "GPU 0: 0 MiB in use, load unknown"
