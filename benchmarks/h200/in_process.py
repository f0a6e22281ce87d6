"""SGLang's in-process engine instead of its HTTP server: whether requests would cost less that way. No capture.

`python -m benchmarks.h200.in_process MIX,MIX… TOKENS CHUNK SERVER_ARGUMENTS…` prints JSON: the seconds that the rows of
each mix took.
"""

import json
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import numpy as np

from benchmarks.h200 import shapes
from benchmarks.h200.local import plain
from worker.engine.engine import Engine


def measure(mixes: list[str], tokens: int, chunk: int, arguments: list[str]) -> dict[str, float]:
    """Prefills the same rows as the HTTP server is given, in the same batches, as many at a time."""
    import sglang
    from sglang.srt.server_args import prepare_server_args

    engine = sglang.Engine(server_args=prepare_server_args(arguments))
    try:
        prefill = _prefill_through(engine)

        async def run(mix: str, count: int) -> float:
            standing_in = SimpleNamespace(client=SimpleNamespace(prefill=prefill))
            return await plain(cast(Engine, standing_in), shapes.rows(shapes.lengths(mix, count)), chunk)

        engine.loop.run_until_complete(run("sharegpt", 60_000))
        return {mix: engine.loop.run_until_complete(run(mix, tokens)) for mix in mixes}
    finally:
        engine.shutdown()


def _prefill_through(engine: Any) -> Callable[..., Any]:
    async def prefill(rids: list[str], rows: list[np.ndarray]) -> None:
        await engine.async_generate(
            input_ids=[row.tolist() for row in rows], rid=rids,
            sampling_params={"max_new_tokens": 0, "temperature": 0.0},
        )  # fmt: skip

    return prefill


if __name__ == "__main__":
    mixes, tokens, chunk, *arguments = sys.argv[1:]
    print(json.dumps(measure(mixes.split(","), int(tokens), int(chunk), arguments)))
