"""SpecForge's offline hidden-state generator, for comparison: its own script, over the SGLang that it pins.

`python -m benchmarks.h200.specforge MODEL OUT_DIR BATCHES` prints JSON: tokens, seconds and bytes. Needs on the path,
before the engine's packages: `specforge` 0.2.0, its `scripts/prepare_hidden_states.py` and SGLang 0.5.14. Files are not
flushed to the disk, as it leaves them.
"""

import faulthandler
import functools
import json
import os
import socket
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.h200.hugging_face import BATCH, LENGTH

LIMIT_S = 240
"""The process ends with a traceback and a failure after that long, whatever it waits for."""


def stand_in() -> None:
    """Names that SGLang 0.5.14 imports and sglang-kernel 0.4.5 lacks: for FP8 and grouped experts, never called."""
    import sgl_kernel
    import torch

    for name in ("fp8_blockwise_scaled_mm", "moe_fused_gate"):
        if not hasattr(sgl_kernel, name):
            setattr(sgl_kernel, name, None)
    if not hasattr(torch.ops.sgl_kernel, "moe_fused_gate"):
        # SGLang gives it a fake implementation at import, which needs a declared operator.
        torch.library.define("sgl_kernel::moe_fused_gate", "(Tensor x) -> Tensor")


def one_rank() -> None:
    """What torchrun would set for a single process."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    found = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ.update(found)


def arguments(script: Any, model: Path, extra: list[str]) -> Any:
    """The script's own defaults but for the batch, the attention backend and room for the weights."""
    flags = {
        "--target-model-path": model, "--data-path": "unused", "--batch-size": BATCH, "--max-length": LENGTH,
        "--sglang-attention-backend": "triton", "--sglang-mem-fraction-static": 0.8,
    }  # fmt: skip
    sys.argv = ["prepare_hidden_states.py", *(str(part) for pair in flags.items() for part in pair), *extra]
    parsed = script.parse_args()
    parsed.num_io_threads = parsed.num_io_threads or os.cpu_count() or 1
    return parsed


def measure(model: Path, out: Path, count: int, extra: list[str]) -> dict[str, float]:
    """Batches of `BATCH` rows of `LENGTH` tokens: boundaries 2, L/2 and L − 3 and the final state, a file a row."""
    stand_in()
    one_rank()
    import prepare_hidden_states as script
    import torch
    from transformers import AutoConfig

    parsed = arguments(script, model, extra)
    config = AutoConfig.from_pretrained(model)
    depth = config.num_hidden_layers
    script.init_distributed(timeout=parsed.dist_timeout, tp_size=1)
    # Random weights; everything else of the engine is the script's choice.
    script.load_offline_capture = functools.partial(script.load_offline_capture, load_format="dummy")
    # A layer's output is the next one's boundary.
    target = script.build_target_model(parsed, config, [1, depth // 2 - 1, depth - 4])

    def generate(first: int, batches: int) -> float:
        """Seconds until the last file is written."""
        rows = torch.randint(10, config.vocab_size, (batches, BATCH, LENGTH))
        ones = torch.ones_like(rows[0])
        loader = [{"input_ids": batch, "attention_mask": ones, "loss_mask": ones} for batch in rows]
        torch.cuda.synchronize()
        began = time.monotonic()
        with script.HiddenStatesGenerator(
            target, num_io_threads=parsed.num_io_threads, io_queue_size=parsed.io_queue_size,
            file_group_size=parsed.file_group_size,
        ) as generator:  # fmt: skip
            generator.generate(loader, output_path=str(out), start_idx=first, samples_per_dp=batches * BATCH)
        return time.monotonic() - began

    # The first warms up.
    generate(0, 1)
    for file in out.rglob("*.ckpt"):
        file.unlink()
    seconds = generate(BATCH, count)
    files = list(out.rglob("*.ckpt"))
    if len(files) != count * BATCH:
        raise RuntimeError(f"{len(files)} files of {count * BATCH} rows")
    return {"tokens": count * BATCH * LENGTH, "seconds": seconds, "bytes": sum(file.stat().st_size for file in files)}


if __name__ == "__main__":
    faulthandler.dump_traceback_later(LIMIT_S, exit=True)
    found = measure(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
    print(json.dumps(found), flush=True)
    # Neither the engine's threads nor the process group are waited for.
    os._exit(0)
