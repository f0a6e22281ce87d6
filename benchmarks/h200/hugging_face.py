"""The look-alike, for comparison: Hugging Face `output_hidden_states` of the same shape, saved by safetensors.

`python -m benchmarks.h200.hugging_face MODEL OUT.safetensors BATCHES` prints JSON: tokens, seconds and bytes. A process
of its own, so that the GPU's memory is whole again after it.
"""

import json
import os
import sys
import time
from pathlib import Path

BATCH, LENGTH = 4, 2048


def measure(model: Path, out: Path, count: int) -> dict[str, float]:
    """Forwards of `BATCH` rows of `LENGTH` tokens, boundaries 2, L/2 and L − 3 and the final state of each saved."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModel

    config = AutoConfig.from_pretrained(model)
    with torch.device("cuda"):
        network = AutoModel.from_config(config, dtype=torch.bfloat16).eval()
    depth = config.num_hidden_layers
    rows = torch.randint(10, config.vocab_size, (count + 1, BATCH, LENGTH), device="cuda")
    seconds, nbytes = 0.0, 0
    for index, batch in enumerate(rows):
        torch.cuda.synchronize()
        began = time.monotonic()
        with torch.inference_mode():
            states = network(batch, use_cache=False, output_hidden_states=True).hidden_states
        kept = {str(k): states[k].cpu().contiguous() for k in (2, depth // 2, depth - 3, depth)}
        save_file(kept, out)
        with out.open("rb") as file:
            os.fsync(file.fileno())
        # The first warms up.
        if index:
            seconds += time.monotonic() - began
            nbytes += out.stat().st_size
        del states
    return {"tokens": count * BATCH * LENGTH, "seconds": seconds, "bytes": nbytes}


if __name__ == "__main__":
    print(json.dumps(measure(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))))
