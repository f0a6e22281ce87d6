"""A sick engine on a GPU: a kernel that spins is noticed, its stacks are kept, and the memory comes back."""

import asyncio
import json
import time
from pathlib import Path

import numpy as np
import pytest
from gpu_models import make
from test_gpu_engine import spec_of, used_bytes

from layertap.schemas.incidents import Evidence, IncidentKind
from worker.engine.client import EngineDownError
from worker.engine.engine import Engine
from worker.watchdog.guard import Guard
from worker.watchdog.rules import Limits, Phase, Verdict

pytestmark = pytest.mark.gpu

MARKED = 77
STALL_SECONDS = 15.0


async def hang(engine: Engine) -> tuple[Verdict, Evidence, float, int]:
    """The verdict on a hanging forward, the evidence, seconds until then, and bytes in use."""
    in_flight = 0
    guard = Guard(engine, Limits(serving_quiet=STALL_SECONDS), lambda: in_flight)
    try:
        assert await guard.through(_come_up(engine)) is None
        guard.enter(Phase.IDLE)
        watch = asyncio.create_task(guard.until_sick())
        in_flight, began = 8, time.monotonic()
        request = asyncio.create_task(engine.client.prefill(["hang"], [np.full(8, MARKED, np.int32)]))
        verdict = await asyncio.wait_for(watch, 120)
        noticed, used = time.monotonic() - began, used_bytes()
        evidence = await guard.evidence()
    finally:
        await engine.stop()
    with pytest.raises(EngineDownError):
        await request
    return verdict, evidence, noticed, used


async def _come_up(engine: Engine) -> None:
    await engine.start()
    await engine.until_serving()


def test_a_kernel_that_spins_is_noticed_explained_and_its_memory_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault = tmp_path / "fault.json"
    fault.write_text(json.dumps({"at": "forward", "do": "spin-kernel", "token": MARKED}))
    monkeypatch.setenv("TEST_ENGINE_FAULT", str(fault))
    model = make("llama", tmp_path / "llama")
    before = used_bytes()
    engine = Engine(spec_of(model, 2048), tmp_path / "engine", prefill_timeout=300)
    verdict, evidence, noticed, used = asyncio.run(hang(engine))
    after = used_bytes()
    print(f"MiB before {before >> 20}, hanging {used >> 20}, after {after >> 20}; noticed after {noticed:.0f} s")
    assert verdict.kind is IncidentKind.HUNG_SERVING
    assert noticed < STALL_SECONDS + 10
    assert any("spoiled_forward" in process.stack for process in evidence.processes)
    assert evidence.gpu
    assert after <= before + (64 << 20)
