"""What an engine is started with: nothing of the worker's own settings, and everything that only prefill needs."""

from dataclasses import replace
from pathlib import Path

import pytest

from worker.engine.spec import EngineSpec, command, environment, refusal, version_tuple
from worker.patch.installer import UNPATCHED, Applied

SPEC = EngineSpec(
    model_path="/models/m",
    dtype="BF16",
    device="cpu",
    tensor_parallel=1,
    chunked_prefill_size=0,
    max_total_tokens=0,
    extra_args=("--context-length=512",),
    pool_bytes=1 << 20,
    engine_version="0.5.23",
)
PATCHED = Applied(installer="plugin", plugins=("layertap_capture",), environment={"LAYERTAP_INSTALLER": "plugin"})


def test_the_workers_own_settings_stay_with_the_worker() -> None:
    worker = {"LAYERTAP_TOKEN": "s3cret", "LAYERTAP_RUN_DIR": "/data", "LAYERTAP_INSTALLER": "plugin", "PATH": "/bin"}
    env = environment(SPEC, worker, Path("/run/engine-1"), UNPATCHED)
    assert env["PATH"] == "/bin"
    assert env["LAYERTAP_ENGINE_DIR"] == "/run/engine-1"
    assert not {"LAYERTAP_TOKEN", "LAYERTAP_RUN_DIR", "LAYERTAP_INSTALLER"} & set(env)


def test_a_list_of_no_gpus_stays_one() -> None:
    env = environment(SPEC, {"CUDA_VISIBLE_DEVICES": ""}, Path("/run"), PATCHED)
    assert env["CUDA_VISIBLE_DEVICES"] == ""
    assert "SGLANG_CPU_OMP_THREADS_BIND" not in env


def test_other_plugins_of_the_operator_are_kept() -> None:
    env = environment(SPEC, {"SGLANG_PLUGINS": "theirs"}, Path("/run"), PATCHED)
    assert env["SGLANG_PLUGINS"].split(",") == ["theirs", "layertap_capture", "layertap_cpu"]
    assert env["LAYERTAP_INSTALLER"] == "plugin"


def test_nothing_hides_a_token_from_the_capture() -> None:
    words = command(SPEC, 1, "key", PATCHED)
    assert {"--disable-radix-cache", "--skip-server-warmup"} <= set(words)
    gpu = command(replace(SPEC, device="cuda"), 1, "key", PATCHED)
    assert gpu[gpu.index("--cuda-graph-backend-prefill") + 1] == "disabled"
    older = command(replace(SPEC, device="cuda", engine_version="0.5.16"), 1, "key", PATCHED)
    assert "--cuda-graph-backend-prefill" not in older
    assert {"--disable-cuda-graph", "--enforce-disable-flashinfer-allreduce-fusion"} <= set(older)


def test_an_operators_argument_comes_last_and_wins() -> None:
    assert command(SPEC, 1, "key", UNPATCHED)[-1] == "--context-length=512"


@pytest.mark.parametrize(
    ("version", "numbers"), [("0.5.23", (0, 5, 23)), ("0.5.16.post1", (0, 5, 16)), ("1.0rc2", (1, 0)), ("dev", ())]
)
def test_versions_compare_by_their_numbers(version: str, numbers: tuple[int, ...]) -> None:
    assert version_tuple(version) == numbers


@pytest.mark.parametrize(
    "arguments",
    [
        ["--tp-size=2"],
        ["--tensor-parallel-size", "2"],
        ["--tp", "2"],
        ["--model-path=/other"],
        ["--host=0.0.0.0"],
        ["--port", "30000"],
        ["--api-key=known"],
        ["--max-queued-requests=8"],
        ["--enable-dp-attention"],
        ["--attn-dp-size=2"],
        ["--attention-data-parallel-size", "2"],
        ["--nnodes=2"],
        ["--max-queued=8"],
        ["--pp-size=2"],
        ["--pp-size", "2"],
        ["--enable-two-batch-overlap"],
        ["--dp-size=4"],
    ],
)
def test_an_argument_that_the_worker_sets_or_cannot_capture_under_is_refused_with_the_remedy(
    arguments: list[str],
) -> None:
    why = refusal(["--mem-fraction-static=0.3", *arguments])
    assert why is not None
    assert why.startswith("--engine-arg=--")


@pytest.mark.parametrize("arguments", [[], ["--pp-size=1"], ["--quantization=fp8"], ["--dp-size", "1"]])
def test_other_arguments_are_let_through(arguments: list[str]) -> None:
    assert refusal(arguments) is None
