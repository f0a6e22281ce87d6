"""One run on a GPU: plain prefill beside extraction, and what people do without Layertap.

`python -m benchmarks.h200 --work DIR --out FILE.json [--shape S …] [--engine-arg=--flag=value …]`. Prints a table and
writes rows of `shape`, `rows`, `way`, `tokens_per_s`. Ways are interleaved within each mix of rows, `repeats` times
each.
"""

import argparse
import asyncio
import json
import os
import shutil
import statistics
import subprocess
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from benchmarks.h200 import naive, shapes
from benchmarks.h200.local import extract, plain
from worker.engine.engine import Engine
from worker.engine.spec import EngineSpec
from worker.inflight import InFlight
from worker.models import engine_version

CHUNK = 8192
LAUNCH_SECONDS = 400
TOKENS = {"256": 524_288, "2048": 524_288, "16384": 524_288, "sharegpt": 524_288}


@asynccontextmanager
async def serving(shape: str, work: Path, extra: list[str]) -> AsyncIterator[Engine]:
    """An engine of that shape with random weights; ended at the end."""
    spec = EngineSpec(
        model_path=str(shapes.write(shape, work / shape)), dtype="BF16", device="cuda", tensor_parallel=1,
        chunked_prefill_size=CHUNK, max_total_tokens=0, pool_bytes=4 << 30, engine_version=engine_version(),
        extra_args=("--load-format=dummy", "--max-prefill-tokens=16384", *extra),
    )  # fmt: skip
    engine = Engine(spec, work / f"engine-{shape}", prefill_timeout=300)
    began = time.monotonic()
    await engine.launch(LAUNCH_SECONDS)
    print(f"{shape}: serving after {time.monotonic() - began:.0f} s", flush=True)
    try:
        yield engine
    finally:
        await engine.stop()


class Results:
    """The rows measured so far, written out after each."""

    def __init__(self, out: Path, facts: dict[str, Any]) -> None:
        self._out = out
        self._facts = facts
        self.rows: list[dict[str, Any]] = []

    def add(self, shape: str, mix: str, way: str, tokens: int, seconds: list[float], nbytes: int = 0) -> None:
        """One way's repetitions; the median counts."""
        median = statistics.median(seconds)
        row = {
            "shape": shape, "rows": mix, "way": way, "tokens_per_s": round(tokens / median), "tokens": tokens,
            "seconds": [round(s, 3) for s in seconds], "mb_per_s": round(nbytes / median / 1e6),
        }  # fmt: skip
        self.rows.append(row)
        self._out.write_text(json.dumps({"machine": self._facts, "results": self.rows}, indent=1) + "\n")
        print(
            f"{shape:<12} {mix:>9}  {way:<28} {row['tokens_per_s']:>8,} tokens/s {row['mb_per_s']:>6,} MB/s", flush=True
        )


async def measure_shape(shape: str, mixes: list[str], repeats: int, work: Path, extra: list[str], out: Results) -> None:
    """Plain prefill against extraction of three boundaries and of all, on one engine."""
    async with serving(shape, work, extra) as engine:
        depth = engine.reports[0].num_layers
        three, every = [2, depth // 2, depth - 3], list(range(depth + 1))
        budget = InFlight(6 * CHUNK)
        storage = work / "storage"
        warm = shapes.rows(shapes.lengths("sharegpt", 60_000))
        await plain(engine, budget, warm, CHUNK, {})
        await once(engine, budget, warm, three, storage)
        for mix in mixes:
            rows = shapes.rows(shapes.lengths(mix, TOKENS[mix]))
            tokens = sum(map(len, rows))
            plains, threes, nbytes = [], [], 0
            for _ in range(repeats):
                plains.append(await plain(engine, budget, rows, CHUNK, {}))
                seconds, nbytes = await once(engine, budget, rows, three, storage)
                threes.append(seconds)
            out.add(shape, mix, "plain prefill", tokens, plains)
            out.add(shape, mix, "extract 3 + final", tokens, threes, nbytes)
            if mix == "2048":
                few = rows[:16]
                seconds, nbytes = await once(engine, budget, few, every, storage)
                out.add(shape, mix, f"extract all {depth + 1} + final", sum(map(len, few)), [seconds], nbytes)


async def once(
    engine: Engine, budget: InFlight, rows: list[Any], layers: list[int], storage: Path
) -> tuple[float, int]:
    """One extraction into an empty storage, which is emptied again."""
    os.makedirs(storage)
    try:
        return await extract(engine, budget, rows, layers, storage)
    finally:
        shutil.rmtree(storage)


async def measure_others(shape: str, work: Path, extra: list[str], out: Results) -> None:
    """`torch.save` in the forward, and SGLang's own `return_hidden_states` (last layer only)."""
    site, saved = work / "site", work / "saved"
    naive.install(site)
    os.makedirs(saved, exist_ok=True)
    added = {
        "LAYERTAP_BENCH_NAIVE_DIR": str(saved),
        "SGLANG_PLUGINS": naive.ENTRY_POINT,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(site), os.getcwd(), os.environ.get("PYTHONPATH")])),
    }
    rows = shapes.rows(shapes.lengths("2048", 65_536))
    before = dict(os.environ)
    os.environ.update(added)
    try:
        async with serving(shape, work, extra) as engine:
            budget = InFlight(6 * CHUNK)
            await plain(engine, budget, rows[:8], CHUNK, {})
            seconds = [await plain(engine, budget, rows, CHUNK, {}) for _ in range(2)]
            out.add(shape, "2048", "torch.save in the forward", sum(map(len, rows)), seconds)
    finally:
        os.environ.clear()
        os.environ.update(before)
        shutil.rmtree(saved)
    async with serving(shape, work, [*extra, "--enable-return-hidden-states"]) as engine:
        budget = InFlight(6 * CHUNK)
        few = rows[:8]
        await plain(engine, budget, few, CHUNK, {})
        seconds = [await plain(engine, budget, few, CHUNK, {"return_hidden_states": True})]
        out.add(shape, "2048", "SGLang return_hidden_states", sum(map(len, few)), seconds)


def disk_mb_per_s(folder: Path) -> int:
    """What `dd` with fdatasync writes to the same disk, in MB/s."""
    file = folder / "dd"
    began = time.monotonic()
    argv = ["dd", "if=/dev/zero", f"of={file}", "bs=8M", "count=1024", "conv=fdatasync"]
    subprocess.run(argv, check=True, capture_output=True, timeout=120)
    seconds = time.monotonic() - began
    file.unlink()
    return round(1024 * 8 * 1.048576 / seconds)


def main() -> None:
    """Measures every shape asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--shape", action="append", choices=sorted(shapes.SHAPES))
    parser.add_argument("--mix", action="append", choices=sorted(TOKENS))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--engine-arg", action="append", default=[])
    parser.add_argument("--no-others", action="store_true")
    arguments = parser.parse_args()
    work = arguments.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    import torch

    facts = {
        "gpu": torch.cuda.get_device_name(), "engine": f"SGLang {engine_version()}", "torch": torch.__version__,
        "cpus": os.cpu_count(), "dd_mb_per_s": disk_mb_per_s(work), "chunk": CHUNK,
    }  # fmt: skip
    print(json.dumps(facts), flush=True)
    out = Results(arguments.out, facts)
    chosen = arguments.shape or list(shapes.SHAPES)
    for shape in chosen:
        mixes = arguments.mix or list(TOKENS)
        asyncio.run(measure_shape(shape, mixes, arguments.repeats, work, arguments.engine_arg, out))
    if not arguments.no_others:
        asyncio.run(measure_others(chosen[0], work, arguments.engine_arg, out))


if __name__ == "__main__":
    main()
