"""One run on a GPU: plain prefill beside extraction, and what people do without Layertap.

`python -m benchmarks.h200 --work DIR --out FILE.json [--shape S …] [--engine-arg=--flag=value …]`. Prints a table and
writes rows of `shape`, `rows`, `way`, `tokens_per_s`. Plain prefill and extraction take turns within each mix of rows,
`--repeats` times each, on one engine.
"""

import argparse
import asyncio
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from benchmarks.h200 import hugging_face, in_process, naive, shapes, specforge
from benchmarks.h200.local import Extracted, extract, plain
from benchmarks.h200.memory import Look, watched
from benchmarks.h200.results import Results
from worker.engine.engine import Engine
from worker.engine.spec import EngineSpec, command
from worker.models import engine_version
from worker.patch.installer import UNPATCHED

CHUNK = 8192
LAUNCH_SECONDS = 400
MODULE_SECONDS = 240
TOKENS = {"llama-8b": 1 << 20, "llama-1b": 1 << 21, "moe-30b-a3b": 1 << 20}
"""Tokens of one repetition: ten to fifty seconds of plain prefill, ten shards and more."""
FEW_TOKENS = 1 << 17
"""Tokens for the ways that are ten times slower."""
MIXES = [mix for mix in shapes.MIXES if mix != "131072"]
"""Measured unless others are asked for."""
WAYS = ["extract", "in-forward", "hugging-face", "in-process", "specforge"]
"""Layertap and plain prefill; other ways in the engine's forward; ways without this engine, or without its server."""
LONG_ROWS_TOKENS = 1 << 19
"""Tokens of rows of 131,072, whose attention alone takes ten times as long as the rest of a 1B Llama."""
WINDOW_S = 30.0
LOOK_S = 5.0


def engine_spec(shape: str, work: Path, extra: list[str]) -> EngineSpec:
    """An engine of that shape with random weights."""
    return EngineSpec(
        model_path=str(shapes.write(shape, work / shape)), dtype="BF16", device="cuda",
        chunked_prefill_size=CHUNK, engine_version=engine_version(),
        extra_args=("--load-format=dummy", "--max-prefill-tokens=16384", *extra),
    )  # fmt: skip


@asynccontextmanager
async def serving(shape: str, work: Path, extra: list[str]) -> AsyncIterator[Engine]:
    """That engine while it serves; ended at the end."""
    engine = Engine(engine_spec(shape, work, extra), work / f"engine-{shape}", prefill_timeout=300)
    began = time.monotonic()
    await engine.launch(LAUNCH_SECONDS)
    print(f"{shape}: serving after {time.monotonic() - began:.0f} s", flush=True)
    try:
        yield engine
    finally:
        await engine.stop()


async def measure_shape(
    shape: str,
    mixes: list[str],
    repeats: int,
    at_least: float,
    work: Path,
    extra: list[str],
    out: Results,
    endure: float,
) -> None:
    """Plain prefill against extraction of three boundaries, of `at_least` seconds each, and of all, on one engine."""
    async with serving(shape, work, extra) as engine:
        depth = engine.reports[0].num_layers
        three, every = [2, depth // 2, depth - 3], list(range(depth + 1))
        warm = shapes.rows(shapes.lengths("sharegpt", 60_000))
        await plain(engine, warm, CHUNK)
        await once(engine, warm, three, work)
        for mix in mixes:
            rows = shapes.rows(shapes.lengths(mix, LONG_ROWS_TOKENS if mix == "131072" else TOKENS[shape]))
            tokens = sum(map(len, rows))
            plains, threes = [], []
            for _ in range(repeats):
                plains.append(await plain(engine, rows, CHUNK))
                threes.append(await once(engine, rows, three, work, times=rounds(at_least, plains[0])))
            out.add(shape, mix, "plain prefill", tokens, plains)
            out.extracted(shape, mix, "extract 3 + final", threes)
            if mix == "2048":
                done = await once(engine, rows[: FEW_TOKENS * 2 // 2048], every, work)
                out.extracted(shape, mix, f"extract all {depth + 1} + final", [done])
        if endure:
            await measure_endurance(engine, shape, three, work, endure, out)


async def measure_endurance(
    engine: Engine, shape: str, layers: list[int], work: Path, seconds: float, out: Results
) -> None:
    """Extraction without a pause for that long, plain prefill before and after it, and the memory meanwhile."""
    rows = shapes.rows(shapes.lengths("2048", TOKENS[shape]))
    tokens = sum(map(len, rows))
    plains = [await plain(engine, rows, CHUNK)]
    done = await once(
        engine, rows, layers, work, rounds(seconds, plains[0]), lambda looks: out.endured(shape=shape, looks=looks)
    )
    plains.append(await plain(engine, rows, CHUNK))
    out.add(shape, "2048", "plain prefill, before and after", tokens, plains)
    out.extracted(shape, "2048", f"extract 3 + final, {done.seconds:.0f} s", [done])
    windows = [0] * (int(done.seconds / WINDOW_S) + 1)
    for when, written in done.commits:
        windows[int(when / WINDOW_S)] += written
    out.endured(
        shape=shape, seconds=round(done.seconds, 1), tokens=done.tokens, nbytes=done.nbytes, shards=len(done.commits),
        tokens_per_s_by_window=[round(window / WINDOW_S) for window in windows[:-1]], window_s=WINDOW_S,
        looks=done.looks, looks_are=["s", "GPU MiB", "resident MiB", "GPU % busy"],
    )  # fmt: skip


def rounds(seconds: float, one: float) -> int:
    """How often to go over the same rows, where once takes `one` second(s), to go on for that many seconds."""
    return max(1, math.ceil(seconds / one))


async def once(
    engine: Engine, rows: list[Any], layers: list[int], work: Path, times: int = 1,
    keep: Callable[[list[Look]], None] = lambda looks: None,
) -> Extracted:  # fmt: skip
    """One extraction, `times` over the same rows, into an empty storage that is emptied again; its memory is watched.

    `keep` is given what was seen of the memory so far, again and again.
    """
    storage = work / "storage"
    os.makedirs(storage)
    try:
        async with watched(engine, LOOK_S, keep) as looks:
            done = await extract(engine, rows, CHUNK, layers, storage, times)
        done.looks = looks
        return done
    finally:
        shutil.rmtree(storage)


async def measure_in_forward(shape: str, work: Path, extra: list[str], out: Results) -> None:
    """`torch.save` in the forward, and SGLang's own `return_hidden_states` (last layer only), on one engine."""
    site, saved = work / "site", work / "saved"
    naive.install(site)
    os.makedirs(saved, exist_ok=True)
    rows = shapes.rows(shapes.lengths("2048", FEW_TOKENS))
    with _environment(
        {
            naive.FOLDER_VARIABLE: str(saved),
            "SGLANG_PLUGINS": naive.ENTRY_POINT,
            "PYTHONPATH": os.pathsep.join(filter(None, [str(site), os.getcwd(), os.environ.get("PYTHONPATH")])),
        }
    ):
        async with serving(shape, work, [*extra, "--enable-return-hidden-states"]) as engine:
            await plain(engine, rows[:8], CHUNK)
            seconds = [await plain(engine, rows, CHUNK) for _ in range(2)]
            out.add(shape, "2048", "plain prefill, its hooks off", FEW_TOKENS, seconds)
            naive.switch(saved).touch()
            seconds = [await plain(engine, rows, CHUNK) for _ in range(2)]
            naive.switch(saved).unlink()
            if not list(saved.glob("*.pt")):
                raise RuntimeError("torch.save in the forward saved nothing")
            out.add(shape, "2048", "torch.save in the forward", FEW_TOKENS, seconds)
            few = rows[:8]
            seconds = [await plain(engine, few, CHUNK, {"return_hidden_states": True})]
            out.add(shape, "2048", "SGLang return_hidden_states", sum(map(len, few)), seconds)
    shutil.rmtree(saved)


def measure_saving(module: ModuleType, way: str, shape: str, work: Path, out: Results, packages: str = "") -> None:
    """Batches of four rows of 2,048 tokens, by a module that saves the same boundaries as Layertap."""
    model = str(shapes.write(shape, work / shape))
    with tempfile.TemporaryDirectory(dir=work) as saved:
        found = _module(module.__name__, model, f"{saved}/states", "8", packages=packages)
    if found is not None:
        out.add(shape, "2048", way, found["tokens"], [found["seconds"]], found["bytes"])


def measure_in_process(shape: str, work: Path, extra: list[str], out: Results) -> None:
    """Plain prefill without HTTP, rows of 256 and of 2,048 tokens."""
    _, _, _, *arguments = command(engine_spec(shape, work, extra), 30_000, "-", UNPATCHED)
    found = _module(in_process.__name__, "256,2048", str(TOKENS[shape]), str(CHUNK), *arguments)
    for mix, seconds in (found or {}).items():
        tokens = sum(shapes.lengths(mix, TOKENS[shape]))
        out.add(shape, mix, "sglang.Engine in process, no states", tokens, [seconds])


def _module(name: str, *arguments: str, packages: str = "") -> dict[str, Any] | None:
    """What a module of ours prints as JSON, run in a process of its own; None, and why, where it fails.

    `packages` is a folder that comes first on its path.
    """
    argv = [sys.executable, "-m", name, *arguments]
    path = os.pathsep.join(filter(None, [packages, os.environ.get("PYTHONPATH")]))
    try:
        run = subprocess.run(
            argv, check=True, capture_output=True, text=True, timeout=MODULE_SECONDS,
            env=os.environ | {"PYTHONPATH": path},
        )  # fmt: skip
    except subprocess.SubprocessError as error:
        print(f"{name} did not run: {error}: {str(getattr(error, 'stderr', ''))[-2000:]}", flush=True)
        return None
    # Engines log, some of it to the same place, and after.
    found: dict[str, Any] = json.loads(next(line for line in run.stdout.splitlines()[::-1] if line.startswith("{")))
    return found


@contextmanager
def _environment(added: dict[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(added)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def disk_mb_per_s(folder: Path, *flags: str) -> int | None:
    """What `dd` writes there, in MB/s, to the end of its fdatasync; None where the file system takes no such flags."""
    file = folder / "dd"
    began = time.monotonic()
    argv = ["dd", "if=/dev/zero", f"of={file}", "bs=8M", "count=1024", "conv=fdatasync", *flags]
    run = subprocess.run(argv, check=False, capture_output=True, timeout=120)
    seconds = time.monotonic() - began
    file.unlink(missing_ok=True)
    return None if run.returncode else round(1024 * 8 * 1.048576 / seconds)


def main() -> None:
    """Measures every shape asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--shape", action="append", choices=sorted(shapes.SHAPES))
    parser.add_argument("--mix", action="append", choices=shapes.MIXES)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--at-least", type=float, default=0, help="seconds that an extraction goes on over its rows")
    parser.add_argument("--endure", type=float, default=0, help="seconds of the first shape's long run")
    parser.add_argument("--engine-arg", action="append", default=[])
    parser.add_argument("--way", action="append", choices=WAYS, help="what to measure; all of it unless said")
    parser.add_argument("--specforge", metavar="DIR", help="packages of SpecForge and its SGLang; left out without")
    arguments = parser.parse_args()
    work = arguments.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    import torch

    facts = {
        "gpu": torch.cuda.get_device_name(), "engine": f"SGLang {engine_version()}", "torch": torch.__version__,
        "cpus": os.cpu_count(), "chunk": CHUNK, "dd_mb_per_s": disk_mb_per_s(work),
        "dd_direct_mb_per_s": disk_mb_per_s(work, "oflag=direct"),
    }  # fmt: skip
    print(json.dumps(facts), flush=True)
    out = Results(arguments.out, facts)
    mixes, ways, extra = arguments.mix or MIXES, arguments.way or WAYS, arguments.engine_arg
    for index, shape in enumerate(arguments.shape or list(shapes.SHAPES)):
        endure = arguments.endure if index == 0 else 0.0
        if "extract" in ways:
            asyncio.run(measure_shape(shape, mixes, arguments.repeats, arguments.at_least, work, extra, out, endure))
        if "in-forward" in ways:
            asyncio.run(measure_in_forward(shape, work, extra, out))
        if "hugging-face" in ways:
            measure_saving(hugging_face, "Hugging Face output_hidden_states", shape, work, out)
        if "in-process" in ways:
            measure_in_process(shape, work, extra, out)
        if "specforge" in ways and arguments.specforge:
            measure_saving(specforge, "SpecForge prepare_hidden_states", shape, work, out, arguments.specforge)


if __name__ == "__main__":
    main()
