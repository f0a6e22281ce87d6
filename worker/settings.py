"""The worker's settings, read in one place: environment variables `LAYERTAP_*`, overridden by command-line flags."""

import sys
from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationError
from pydantic_settings import BaseSettings, CliApp, SettingsConfigDict

from worker.engine.spec import DEFAULT_POOL_BYTES
from worker.in_hand import MOST_LANES


class Settings(BaseSettings):
    """Everything an operator may set. Tokens are counted before padding, sizes in bytes, times in seconds."""

    model_config = SettingsConfigDict(
        env_prefix="LAYERTAP_",
        cli_parse_args=False,
        cli_kebab_case=True,
        cli_prog_name="python -m worker",
        extra="ignore",
    )

    service: str = Field("http://127.0.0.1:8178", description="address of the service")
    token: str | None = Field(None, description="bearer token of the service")
    storage: Path = Field(Path(".layertap/storage"), description="storage root, the same that the service sees")
    run_dir: Path = Field(Path(".layertap/worker"), description="logs, sessions and other files of this worker alone")
    model: list[Path] = Field(
        default_factory=list, description="model folder, or folder of model folders, that jobs may name; repeatable"
    )

    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="where the engine runs")
    tensor_parallel: int = Field(1, ge=1, le=64, description="engine ranks that share one model")
    chunked_prefill_size: int = Field(0, ge=0, description="tokens a forward prefills at the most; 0: by device")
    max_total_tokens: int = Field(0, ge=0, description="tokens the engine's KV cache holds; 0: by device")
    engine_arg: list[str] = Field(
        default_factory=list, description="further SGLang server argument, as --name=value; repeatable"
    )
    installer: Literal["auto", "plugin", "forward_hooks", "source"] = Field(
        "auto", description="how the capture enters SGLang; auto: the first that the installed release offers"
    )
    strategy: Literal["auto", "hooks", "collect"] = Field(
        "auto", description="how states are read; auto: by hooks, or by the model's own collection where hooks fail"
    )
    patch_dir: Path | None = Field(
        None, description="where `source` keeps journal and backup; by default below ~/.local/state/layertap"
    )
    launch_quiet: float = Field(600, gt=0, description="seconds a launch may show neither log, disk reads nor memory")
    check_timeout: float = Field(900, gt=0, description="seconds the first prefill of a fresh engine may take")
    launch_timeout: float = Field(7200, gt=0, description="seconds an engine may take until it serves")
    stall_timeout: float = Field(
        300, gt=0, description="seconds without a captured token after which work counts as stuck"
    )
    row_timeout: float = Field(
        1800, gt=0, description="seconds one request of rows may take; longer than the stall time-out"
    )

    max_inflight_tokens: int = Field(0, ge=0, description="tokens in the engine at a time; 0: by device")
    pool_bytes: int = Field(
        DEFAULT_POOL_BYTES,
        ge=64 << 20,
        description="pinned host memory for states on their way to storage, rounded down to a power of two",
    )
    shard_lanes: int = Field(
        0,
        ge=0,
        le=MOST_LANES,
        description="shards in hand at a time, some prefilled while others are sealed; 0: by device",
    )
    poll_interval: float = Field(1.0, gt=0, le=2.0, description="seconds between control polls")
    stop_timeout: float = Field(60, gt=0, description="seconds that a graceful stop may take")


def read_settings(arguments: list[str]) -> Settings:
    """The settings from the environment and `arguments`; prints what is wrong and exits with 2 where they are bad."""
    try:
        return CliApp.run(Settings, cli_args=arguments, cli_exit_on_error=True)
    except ValidationError as error:
        for problem in error.errors():
            flag = "--" + "-".join(str(part) for part in problem["loc"]).replace("_", "-")
            print(f"python -m worker: {flag}: {problem['msg']}", file=sys.stderr)
        sys.exit(2)
