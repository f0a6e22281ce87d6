"""What people write first, for comparison: an SGLang plugin that calls `torch.save` in the forward.

Registered through an entry point that the benchmark makes for the time of one engine; acts while `switch` is there.
"""

import os
from pathlib import Path
from typing import Any

ENTRY_POINT = "layertap_bench_naive"
FOLDER_VARIABLE = "BENCH_NAIVE_DIR"
"""Not one of Layertap's own, which an engine is not given."""


def install(site: Path) -> None:
    """Makes a distribution in `site` whose entry point is this module's `register`."""
    info = site / "layertap_bench_naive-0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: layertap-bench-naive\nVersion: 0\n")
    (info / "entry_points.txt").write_text(f"[sglang.srt.plugins]\n{ENTRY_POINT} = benchmarks.h200.naive:register\n")


def switch(folder: Path) -> Path:
    """The file that switches saving on."""
    return folder / "on"


def register() -> None:
    """Entry point: hooks the blocks before boundaries 2, L/2 and L − 3, and saves at the end of each forward."""
    if not os.environ.get(FOLDER_VARIABLE):
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register("sglang.srt.model_executor.model_runner.ModelRunner.load_model", _attach, HookType.AFTER)


def _attach(result: object, runner: Any, *args: object, **kwargs: object) -> None:
    import torch

    from worker.capture.residual import stream_at_entry
    from worker.capture.stack import arguments

    folder = Path(os.environ[FOLDER_VARIABLE])
    inner = runner.model.model
    depth = len(inner.layers)
    states: dict[object, Any] = {}
    count = 0
    on = False

    def at_start(module: Any, inputs: Any) -> None:
        nonlocal on
        on = switch(folder).exists()

    def at_entry(k: int, read: Any) -> Any:
        def hook(module: Any, args: Any, kwargs: Any) -> None:
            if on:
                states[k] = stream_at_entry(read(args, kwargs))

        return hook

    def at_end(module: Any, inputs: Any, output: Any) -> None:
        nonlocal count
        if on:
            states["final"] = output
            torch.save({name: value.cpu() for name, value in states.items()}, folder / f"{count % 4}.pt")
            count += 1

    inner.register_forward_pre_hook(at_start)
    for k in (2, depth // 2, depth - 3):
        read = arguments(inner.layers[k], {"hidden_states", "forward_batch"})
        inner.layers[k].register_forward_pre_hook(at_entry(k, read), with_kwargs=True)
    inner.register_forward_hook(at_end)
