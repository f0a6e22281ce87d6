"""What is true only of a GPU: right values through CUDA kernels and streams, and memory given back.

Needs an NVIDIA GPU.

`LAYERTAP_TEST_ENGINE_ARGS` adds server arguments, for machines whose SGLang lacks a backend.
"""

import asyncio
import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from gpu_models import NAMES, VOCAB, make, plain
from reference import relative_error, states

from worker import models
from worker.engine.engine import Engine
from worker.engine.gpus import gpus_of
from worker.engine.probe import Probed, probe
from worker.engine.self_check import check
from worker.engine.spec import EngineSpec
from worker.engine.warm_up import warm_up
from worker.models import engine_version
from worker.watchdog.gpu import gpu_bytes_used

pytestmark = pytest.mark.gpu

LENGTHS = [1, 17, 700, 33, 1500, 256, 4000]
WITHIN = 0.02


def spec_of(model: Path, chunk: int, tensor_parallel: int = 1) -> EngineSpec:
    return EngineSpec(
        model_path=str(model),
        dtype="BF16",
        device="cuda",
        tensor_parallel=tensor_parallel,
        chunked_prefill_size=chunk,
        max_total_tokens=32768,
        # Wrappers' processors are code in the model folder.
        extra_args=(
            "--mem-fraction-static=0.3",
            "--trust-remote-code",
            *os.environ.get("LAYERTAP_TEST_ENGINE_ARGS", "").split(),
        ),
        pool_bytes=1 << 30,
        engine_version=engine_version(),
    )


def rows() -> list[np.ndarray]:
    generator = np.random.default_rng(0)
    return [generator.integers(0, VOCAB, n).astype(np.int32) for n in LENGTHS]


async def probed(spec: EngineSpec, directory: Path, boundaries: list[int]) -> tuple[list[Probed], list[list[Probed]]]:
    engine = Engine(spec, directory, prefill_timeout=300)
    await engine.launch(timeout=400)
    try:
        facts = models.facts(Path(spec.model_path))
        speed = await warm_up(engine, facts.vocab_size, facts.max_row_tokens)
        engine.judgement = await check(engine, facts)
        print(f"{Path(spec.model_path).name}: plain {speed:,.0f} tokens/s; self-check {engine.judgement}", flush=True)
        assert engine.judgement.strategy == "hooks"
        assert not engine.judgement.remarks
        together = await probe(engine, rows(), boundaries)
        alone = [await probe(engine, [row], boundaries) for row in rows()[:4]]
    finally:
        await engine.stop()
    return together, alone


@pytest.mark.parametrize("name", NAMES)
def test_states_match_hugging_face_in_float32(name: str, tmp_path: Path) -> None:
    model = make(name, tmp_path / name)
    boundaries = list(range(models.facts(model).num_layers + 1))
    together, alone = asyncio.run(probed(spec_of(model, 2048), tmp_path / "engine", boundaries))
    worst: dict[object, float] = {}
    for row, found in zip(rows(), together, strict=True):
        right = states(plain(model), row.tolist(), boundaries)
        assert found.nonfinite == 0
        for k in boundaries:
            error = relative_error(found.hidden_states[:, k], right.boundaries[k])
            worst[k] = max(worst.get(k, 0.0), error)
        worst["final"] = max(worst.get("final", 0.0), relative_error(found.final_hidden_state, right.final))
    variance = max(
        relative_error(one[0].hidden_states.astype(np.float32), many.hidden_states.astype(np.float32))
        for one, many in zip(alone, together, strict=False)
    )
    listed = ", ".join(f"{k}: {100 * error:.2f} %" for k, error in worst.items())
    print(f"{name}: worst {listed}; batch variance {100 * variance:.3f} %")
    assert max(worst.values()) < WITHIN
    assert variance < WITHIN / 2


def test_two_ranks_give_what_one_gives(tmp_path: Path) -> None:
    """Needs two GPUs."""
    model = make("llama", tmp_path / "llama")
    boundaries = list(range(models.facts(model).num_layers + 1))
    together, _ = asyncio.run(probed(spec_of(model, 2048, 2), tmp_path / "engine", boundaries))
    worst = 0.0
    for row, found in zip(rows(), together, strict=True):
        right = states(model, row.tolist(), boundaries)
        errors = [relative_error(found.hidden_states[:, k], right.boundaries[k]) for k in boundaries]
        worst = max(worst, *errors, relative_error(found.final_hidden_state, right.final))
    print(f"llama on two GPUs: worst {100 * worst:.2f} %")
    assert worst < WITHIN


def test_what_another_gpu_holds_is_not_taken_for_the_engines() -> None:
    """Needs two GPUs."""
    import pynvml
    import torch

    pynvml.nvmlInit()
    identity = str(pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetHandleByIndex(1)))
    spec = spec_of(Path("model"), 2048)

    def used(visible: str) -> int:
        return gpu_bytes_used(gpus_of(spec, {"CUDA_VISIBLE_DEVICES": visible})) or 0

    names = ["0", "1", identity, identity[:12]]
    before = {name: used(name) for name in names}
    held = torch.empty(2 << 30, dtype=torch.uint8, device="cuda:1")
    grown = {name: used(name) - before[name] for name in names}
    del held
    print({name: f"{size >> 20} MiB more" for name, size in grown.items()})
    assert grown.pop("0") < 1 << 29
    assert all(size >= 2 << 30 for size in grown.values())
    assert gpu_bytes_used(["99"]) is None
    assert gpu_bytes_used(["GPU-of-nobody"]) is None
    assert gpu_bytes_used(["MIG-of-nobody"]) is None


def used_bytes() -> int:
    """Bytes in use on the first GPU, whoever uses them."""
    used = gpu_bytes_used(["0"])
    assert used is not None
    return used


def test_a_stopped_engine_gives_its_gpu_memory_back(tmp_path: Path) -> None:
    model = make("llama", tmp_path / "llama")
    before = used_bytes()

    async def serve_and_stop() -> tuple[int, float]:
        engine = Engine(spec_of(model, 2048), tmp_path / "engine", prefill_timeout=300)
        await engine.launch(timeout=400)
        serving = used_bytes()
        began = time.monotonic()
        await engine.stop()
        return serving, time.monotonic() - began

    serving, seconds = asyncio.run(serve_and_stop())
    after = used_bytes()
    print(f"MiB before {before >> 20}, serving {serving >> 20}, after {after >> 20}; stopped in {seconds:.1f} s")
    assert serving > before + (1 << 30)
    assert after <= before + (64 << 20)


def test_a_killed_engine_gives_its_gpu_memory_back(tmp_path: Path) -> None:
    model = make("llama", tmp_path / "llama")
    before = used_bytes()

    async def serve_and_kill() -> tuple[int, float]:
        engine = Engine(spec_of(model, 2048), tmp_path / "engine", prefill_timeout=300)
        await engine.launch(timeout=400)
        try:
            serving = used_bytes()
            assert engine.pid is not None
            os.kill(engine.pid, signal.SIGKILL)
            began = time.monotonic()
        finally:
            await engine.stop()
        return serving, time.monotonic() - began

    serving, seconds = asyncio.run(serve_and_kill())
    while used_bytes() > before + (64 << 20) and seconds < 30:
        time.sleep(0.25)
        seconds += 0.25
    after = used_bytes()
    print(f"MiB before {before >> 20}, serving {serving >> 20}, after {after >> 20}; back after {seconds:.1f} s")
    assert serving > before + (1 << 30)
    assert after <= before + (64 << 20)
