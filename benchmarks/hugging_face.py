"""Extraction against Hugging Face's `output_hidden_states=True` on the same rows, cores and boundaries.

Hugging Face is given every ease: the bare model without logits, its default (SDPA) attention, rows sorted by length
before they are padded, one file at the end, and neither fsync nor sha256, which an extraction does.
"""

import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.engine import Passes, threads
from benchmarks.pairs import Budget, Rate, Ratio, Result, Run, in_turn, rate, ratio
from benchmarks.rows import Ids

AIM = 3.0
_TOKENS = 3200
_BUDGET = Budget(seconds=200, fewest=3, most=9)
_VARIANTS = [("bfloat16", 1), ("bfloat16", 8), ("float32", 1), ("float32", 8)]


class HuggingFace:
    """The model in one dtype; a pass leaves the same tensors as an extraction in one safetensors file."""

    def __init__(self, model: Path, dtype: str, layers: list[int], folder: Path) -> None:
        import torch
        from transformers import AutoModel
        from transformers.utils import logging

        logging.disable_progress_bar()
        torch.set_num_threads(threads())
        self._model = AutoModel.from_pretrained(model, dtype=getattr(torch, dtype), local_files_only=True).eval()
        self._layers = layers
        self._file = folder / f"{dtype}.safetensors"

    def extract(self, rows: Sequence[Ids], batch_rows: int) -> float:
        """Seconds for the states of all rows in bf16, `batch_rows` at a time, saved."""
        import torch
        from safetensors.torch import save_file

        order = sorted(range(len(rows)), key=lambda i: len(rows[i]))
        batches = [order[start : start + batch_rows] for start in range(0, len(order), batch_rows)]
        began = time.perf_counter()
        hidden: dict[int, Any] = {}
        final: dict[int, Any] = {}
        with torch.inference_mode():
            for batch in batches:
                for i, states, last in self._forward([rows[i] for i in batch], batch):
                    hidden[i], final[i] = states, last
        in_order = range(len(rows))
        whole = {
            "hidden_states": torch.cat([hidden[i] for i in in_order]),
            "final_hidden_state": torch.cat([final[i] for i in in_order]),
        }
        save_file(whole, self._file)
        return time.perf_counter() - began

    def _forward(self, rows: Sequence[Ids], numbers: Sequence[int]) -> Iterator[tuple[int, Any, Any]]:
        import torch

        longest = max(len(row) for row in rows)
        ids = torch.zeros((len(rows), longest), dtype=torch.long)
        mask = torch.zeros_like(ids)
        for place, row in enumerate(rows):
            ids[place, : len(row)] = torch.from_numpy(row.astype("int64"))
            mask[place, : len(row)] = 1
        padded = {} if len(rows) == 1 else {"attention_mask": mask}
        out = self._model(input_ids=ids, output_hidden_states=True, use_cache=False, **padded)
        for place, (number, row) in enumerate(zip(numbers, rows, strict=True)):
            states = torch.stack([out.hidden_states[k][place, : len(row)] for k in self._layers], dim=1)
            yield number, states.to(torch.bfloat16), out.last_hidden_state[place, : len(row)].to(torch.bfloat16)


async def measure(model: Path, every: Passes) -> Result:
    """Rounds of an extraction and four Hugging Face passes: bf16 and float32, one row and eight padded rows a time."""
    passes = every.some(_TOKENS, 8)
    runs: dict[str, Run] = {"extraction": passes.extract}
    with passes.paused():
        loaded = {dtype: HuggingFace(model, dtype, passes.layers, passes.folder) for dtype, _ in _VARIANTS}
        for hugging_face in loaded.values():
            hugging_face.extract(passes.rows[:2], 2)
    for dtype, batch_rows in _VARIANTS:
        runs[_key(dtype, batch_rows)] = partial(_pass, passes, loaded[dtype], batch_rows)
    taken = await in_turn(runs, _BUDGET)
    return Result(
        name="hugging_face",
        title="Extraction against Hugging Face output_hidden_states",
        ratios=[
            Ratio(f"extraction over {key}, tokens a second", ratio(taken[key], taken["extraction"]), AIM)
            for key in (_key(*variant) for variant in _VARIANTS)
        ],
        rates=[Rate(name, rate(passes.tokens, seconds), "tokens/s") for name, seconds in taken.items()],
        facts={
            "model": model.name,
            "rows": len(passes.rows),
            "tokens": passes.tokens,
            "threads of torch and of the engine": threads(),
        },
        seconds=taken,
    )


async def _pass(passes: Passes, hugging_face: HuggingFace, batch_rows: int) -> float:
    with passes.paused():
        return hugging_face.extract(passes.rows, batch_rows)


def _key(dtype: str, batch_rows: int) -> str:
    return f"Hugging Face {dtype}, batch {batch_rows}"
