"""The engine's command line and environment, from the worker's settings. Pure.

Only prefill is wanted, so what serves decoding or hides a forward from its hooks is switched off: prefix caching (a
cached prefix is never recomputed), prefill graphs (hooks do not fire in a replay), and fusions that leave states
partial.
"""

import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any, Literal, Self

from layertap.schemas.workers import ModelFacts
from worker.capture import scattered
from worker.patch.installer import Applied, InstallerName

Strategy = Literal["hooks", "collect"]
"""How the capture reads the residual stream: by hooks on the blocks, or by the model's own collection."""

DEFAULT_POOL_BYTES = 2 << 30
"""Pinned host memory for states on their way to storage."""
_CPU_CHUNK, _GPU_CHUNK = 1024, 8192
_CPU_CACHE_TOKENS = 32768
_DTYPE_NAMES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
_WATCHDOG_SECONDS = 3600
"""SGLang's own watchdog, set on purpose far longer than ours: it kills without keeping evidence."""


@dataclass(frozen=True)
class EngineSpec:
    """What one engine is to be; `dtype` is the safetensors name of the dtype that the job was planned with.

    0 for tokens leaves the number to the device.
    """

    model_path: str
    dtype: str
    device: str
    engine_version: str
    tensor_parallel: int = 1
    chunked_prefill_size: int = 0
    max_total_tokens: int = 0
    extra_args: tuple[str, ...] = ()
    pool_bytes: int = DEFAULT_POOL_BYTES
    installer: InstallerName | None = "plugin"
    strategy: Strategy = "hooks"
    patch_dir: str | None = None

    @classmethod
    def of(cls, facts: ModelFacts, device: str, **more: Any) -> Self:
        """The engine that serves this model on that device, as its jobs were planned; `more` are further fields."""
        pins = facts.pins
        return cls(facts.path, pins.dtype, device, pins.engine_version, **more)


def chunk_tokens(asked: int, device: str) -> int:
    """Tokens of one prefill chunk: what was asked for, else what suits the device."""
    return asked or (_GPU_CHUNK if device == "cuda" else _CPU_CHUNK)


_LONG_NAMES = {
    "pipeline_parallel_size": "pp_size",
    "data_parallel_size": "dp_size",
    "tensor_parallel_size": "tp_size",
    "attention_data_parallel_size": "attn_dp_size",
    "attention_context_parallel_size": "attn_cp_size",
}
_WORKERS_OWN = {
    "tp_size": ", and set --tensor-parallel",
    "model_path": ": the model is the job's, see --model",
    "host": ": the worker starts the engine on this machine alone",
    "port": ": the worker picks a free one",
    "api_key": ": the worker makes one",
    "max_queued_requests": ", and bound what is sent by --max-inflight-tokens",
}
"""Server arguments that the worker cannot do without choosing itself, and what to do instead."""


def asked(extra_args: Iterable[str]) -> dict[str, str | Literal[True]]:
    """The server arguments by name, `tp_size` for `--tp-size`; True for a switch. The last of two equal ones wins."""
    words = [word for argument in extra_args for word in argument.split("=", 1)]
    found: dict[str, str | Literal[True]] = {}
    for word, following in zip_longest(words, words[1:], fillvalue=""):
        name = word.removeprefix("--").replace("-", "_")
        if word.startswith("--"):
            found[_LONG_NAMES.get(name, name)] = True if following.startswith("--") else following or True
    return found


def refusal(extra_args: Iterable[str]) -> str | None:
    """Why an engine with these arguments cannot be captured, or None where nothing speaks against it."""
    arguments = asked(extra_args)
    for given in arguments:
        for name, remedy in _WORKERS_OWN.items():
            # SGLang takes the beginning of a name for the whole.
            if name.startswith(given):
                return f"--engine-arg=--{given.replace('_', '-')}: leave it out{remedy}"
    why = scattered.refusal(arguments)
    return None if why is None else f"--engine-arg={why}"


def version_tuple(version: str) -> tuple[int, ...]:
    """The leading numbers of a version, for comparison."""
    numbers: list[int] = []
    for part in version.split("."):
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        if not digits:
            break
        numbers.append(int(digits))
    return tuple(numbers)


def command(spec: EngineSpec, port: int, api_key: str, applied: Applied) -> list[str]:
    """The server's command line. The last of two equal flags wins, so `extra_args` can override all but the patch."""
    flags = {
        "--model-path": spec.model_path,
        "--host": "127.0.0.1",
        "--port": str(port),
        "--api-key": api_key,
        "--device": spec.device,
        "--dtype": _DTYPE_NAMES[spec.dtype],
        "--tp-size": str(spec.tensor_parallel),
        "--chunked-prefill-size": str(chunk_tokens(spec.chunked_prefill_size, spec.device)),
        "--watchdog-timeout": str(_WATCHDOG_SECONDS),
    }
    switches = ["--skip-tokenizer-init", "--skip-server-warmup", "--disable-radix-cache"]
    cache_tokens = spec.max_total_tokens or (_CPU_CACHE_TOKENS if spec.device == "cpu" else 0)
    if cache_tokens:
        flags["--max-total-tokens"] = str(cache_tokens)
    if spec.device == "cpu":
        flags |= {"--attention-backend": "torch_native", "--mem-fraction-static": "0.1"}
        # An idle scheduler spins; on a CPU engine it would take the core that others need.
        switches.append("--sleep-on-idle")
    else:
        switches.append("--disable-cuda-graph")
        version = version_tuple(spec.engine_version)
        if version >= (0, 5, 16):
            switches.append("--enforce-disable-flashinfer-allreduce-fusion")
        if version >= (0, 5, 22):
            flags["--cuda-graph-backend-prefill"] = "disabled"
    words = [word for pair in flags.items() for word in pair]
    return [sys.executable, "-m", "sglang.launch_server", *words, *switches, *spec.extra_args, *applied.arguments]


def environment(spec: EngineSpec, base: Mapping[str, str], engine_dir: Path, applied: Applied) -> dict[str, str]:
    """The engine's environment: what the worker inherited, what switches the capture on, and the mark of its processes.

    The worker's own settings stay with the worker: its token is a secret, and its `LAYERTAP_INSTALLER` would patch an
    engine that is to run unpatched.
    """
    env = {name: value for name, value in base.items() if not name.startswith("LAYERTAP_")}
    env |= applied.environment
    plugins = [base.get("SGLANG_PLUGINS"), *applied.plugins, "layertap_cpu"]
    env |= {
        "LAYERTAP_ENGINE_DIR": str(engine_dir),
        "LAYERTAP_POOL_BYTES": str(spec.pool_bytes),
        "LAYERTAP_STRATEGY": spec.strategy,
        "LAYERTAP_ENGINE_DEVICE": spec.device,
        # Asked for its health SGLang would run a forward, and log that it hangs: first forwards are the warm-up's.
        "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "false",
        # SGLang sets process titles, which would wipe the mark from /proc/PID/environ.
        "SPT_NOENV": "1",
        "SGLANG_PLUGINS": ",".join(filter(None, plugins)),
        "HF_HUB_OFFLINE": base.get("HF_HUB_OFFLINE", "1"),
    }
    if spec.device == "cpu":
        # Threads that spin while they wait for each other starve whatever else the machine does.
        env.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        if spec.tensor_parallel > 1:
            env.setdefault("SGLANG_CPU_OMP_THREADS_BIND", _cpu_binding(spec.tensor_parallel))
    # An empty list of GPUs, of the operator's own, means none and must stay.
    return env


def _cpu_binding(ranks: int) -> str:
    cpus = sorted(os.sched_getaffinity(0))
    share = max(1, len(cpus) // ranks)
    return "|".join(",".join(str(c) for c in cpus[r * share : (r + 1) * share] or cpus[-1:]) for r in range(ranks))
