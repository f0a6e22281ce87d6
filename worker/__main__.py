"""`python -m worker`: one worker process, which owns one engine."""

import asyncio
import fcntl
import logging
import os
import signal
import sys
from pathlib import Path

from layertap.children import adopt_orphans
from worker.engine.engine import EngineStopError, end_marked
from worker.engine.gpus import visible
from worker.engine.spec import chunk_tokens, refusal
from worker.models import ModelError, discover
from worker.patch.choice import choose, restore_abandoned
from worker.patch.package import PatchError, find_package
from worker.service_api import ServiceError, ServiceUnreachableError
from worker.settings import Settings, read_settings
from worker.worker import StorageMismatchError, Worker

logger = logging.getLogger("worker")


class DeviceError(Exception):
    """The GPUs that the engine is to have are not there."""


def main() -> int:
    """The exit code is 0 after a graceful stop, 1 after a failure, 2 for bad settings."""
    settings = read_settings(sys.argv[1:])
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    adopt_orphans()
    lock = _lock(settings.run_dir)
    if lock is None:
        logger.error("another worker uses %s; give each worker a --run-dir of its own", settings.run_dir)
        return 2
    # Before anything that may take long or refuse: what a killed worker left behind goes first.
    try:
        ended = end_marked(settings.run_dir.resolve())
    except EngineStopError as error:
        logger.error("%s", error)
        return 1
    if ended:
        logger.warning("ended %d processes of an engine that an earlier worker left behind", ended)
    try:
        restore_abandoned(find_package(), settings.patch_dir)
        _check_engine_arguments(settings)
        device = _device(settings)
        models = discover(settings.model)
    except (PatchError, ModelError, DeviceError) as error:
        logger.error("%s", error)
        return 2
    if not models:
        logger.error("no model to offer; name at least one with --model DIR")
        return 2
    worker = Worker(settings, models, device, chunk_tokens(settings.chunked_prefill_size, device))
    try:
        asyncio.run(_run(worker))
    except (StorageMismatchError, ServiceError, ServiceUnreachableError) as error:
        logger.error("%s", error)
        return 1
    finally:
        os.close(lock)
    return 0


async def _run(worker: Worker) -> None:
    loop = asyncio.get_running_loop()
    for sig in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(sig, worker.stop)
    await worker.run()


def _lock(run_dir: Path) -> int | None:
    """Locks the run directory for this process's life; None if another worker has it."""
    run_dir.mkdir(parents=True, exist_ok=True)
    fd = os.open(run_dir / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    return fd


def _check_engine_arguments(settings: Settings) -> None:
    if (why := refusal(settings.engine_arg)) is not None:
        raise PatchError(why)
    installer = choose(settings.installer, find_package())
    if installer == "forward_hooks" and any(word.startswith("--forward-hooks") for word in settings.engine_arg):
        raise PatchError(
            "--engine-arg=--forward-hooks cannot be used beside the capture's own hooks; "
            "leave it out, or use another --installer"
        )


def _device(settings: Settings) -> str:
    names = visible(os.environ)
    device = settings.device
    if device == "auto":
        device = "cuda" if Path("/dev/nvidiactl").exists() and names != [] else "cpu"
    if device == "cuda" and names is not None and len(names) < settings.tensor_parallel:
        raise DeviceError(
            f"CUDA_VISIBLE_DEVICES names {len(names)} GPUs, --tensor-parallel needs {settings.tensor_parallel}: "
            "name as many, or unset it"
        )
    return device


if __name__ == "__main__":
    sys.exit(main())
