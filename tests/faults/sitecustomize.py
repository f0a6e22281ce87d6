"""Engines of tests: on PYTHONPATH, this has them start sooner, and misbehave as the file named in the environment says.

It acts in the processes of an engine only. Faults are for as long as `TEST_ENGINE_FAULT` names a file that exists:
`{"at": …, "do": …}`. `patched_only` spares engines without the capture, `strategy` those that capture in another way;
`token` and `tokens` want a row with that token, or of that length; `once` takes the file away as the fault strikes.
"""

import contextlib
import gc
import json
import multiprocessing
import multiprocessing.popen_fork
import os
import signal
import subprocess
import sys
import time
from types import ModuleType
from typing import Any

import wrong_readings
from spoil import spoil

FAULT = os.environ.get("TEST_ENGINE_FAULT", "")
_ORPHAN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"


def fault(at: str) -> dict[str, Any] | None:
    """The fault that is switched on for this place, if any."""
    try:
        with open(FAULT) as file:
            wanted: dict[str, Any] = json.load(file)
    except OSError:
        return None
    unpatched = not os.environ.get("LAYERTAP_INSTALLER")
    if wanted["at"] != at or (unpatched and (wanted.get("patched_only") or wanted.get("strategy"))):
        return None
    if wanted.get("strategy") not in (None, os.environ.get("LAYERTAP_STRATEGY")):
        return None
    return wanted


def strike(wanted: dict[str, Any]) -> None:
    """Takes the file of a fault away that is to strike once."""
    if wanted.get("once"):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(FAULT)


def commit(wanted: dict[str, Any]) -> None:
    """Does what the fault says."""
    strike(wanted)
    match wanted["do"]:
        case "spin":
            while True:
                pass
        case "sleep":
            time.sleep(3600)
        case "die":
            os._exit(3)
        case "segfault":
            os.kill(os.getpid(), signal.SIGSEGV)
        case "raise":
            raise RuntimeError("a fault of the test")
        case "orphan":
            subprocess.Popen([sys.executable, "-c", _ORPHAN], start_new_session=True)
        case "orphan-and-die":
            subprocess.Popen([sys.executable, "-c", _ORPHAN], start_new_session=True)
            os._exit(3)
        case "spin-kernel":
            import torch

            torch.cuda._sleep(1 << 46)
            torch.cuda.synchronize()


def _spoil_runner(module: ModuleType) -> None:
    runner = module.ModelRunner
    load, forward = runner.load_model, runner.forward

    def load_model(self: Any, *args: Any, **kwargs: Any) -> Any:
        if wanted := fault("load"):
            commit(wanted)
        return load(self, *args, **kwargs)

    def spoiled_forward(self: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
        wanted = fault("forward")
        token = wanted.get("token") if wanted else None
        if wanted and (token is None or bool((forward_batch.input_ids == token).any())):
            commit(wanted)
        return forward(self, forward_batch, *args, **kwargs)

    runner.load_model, runner.forward = load_model, spoiled_forward


def _spoil_capture(module: ModuleType) -> None:
    end = module.ModelCapture._end

    def spoiled_end(self: Any, *args: Any) -> Any:
        if (wanted := fault("capture")) and self._current is not None:
            if wanted["do"] == "nan":
                _poison(wanted, self._current)
            else:
                commit(wanted)
        return end(self, *args)

    module.ModelCapture._end = spoiled_end


def _poison(wanted: dict[str, Any], forward: Any) -> None:
    """Makes the states of the rows that the fault wants not finite."""
    for piece in forward.found:
        if wanted.get("tokens") in (None, piece.count):
            strike(wanted)
            for state in forward.states.values():
                state[piece.start : piece.start + piece.count] = float("nan")


def _spoil_server(module: ModuleType) -> None:
    startup = module.Server.startup

    async def spoiled_startup(self: Any, *args: Any, **kwargs: Any) -> None:
        if wanted := fault("port"):
            commit(wanted)
        await startup(self, *args, **kwargs)

    module.Server.startup = spoiled_startup


_SPOIL = {
    "sglang.srt.model_executor.model_runner": _spoil_runner,
    "worker.capture.model_capture": _spoil_capture,
    "uvicorn.server": _spoil_server,
}


def _fork_the_detokenizer() -> None:
    """Has a server fork the process that turns tokens into text, where SGLang spawns it.

    A prefill by token ids never reaches it, and its imports are a third of what a start costs. The scheduler is spawned
    as ever.
    """
    spawn = multiprocessing.Process._Popen

    def popen(process: Any) -> Any:
        if process._target.__name__ != "run_detokenizer_process":
            return spawn(process)
        run = process._target

        def alone(*args: Any) -> None:
            # Else it would hold the server's ends of pipes open, by which the server learns that a scheduler has died.
            os.closerange(3, os.sysconf("SC_OPEN_MAX"))
            run(*args)

        process._target = alone
        return multiprocessing.popen_fork.Popen(process)

    multiprocessing.Process._Popen = staticmethod(popen)


if os.environ.get("LAYERTAP_ENGINE_DEVICE"):
    # More than a tenth of the time that SGLang takes to import would go into looking for garbage.
    gc.set_threshold(100_000)
    _fork_the_detokenizer()
    if FAULT:
        spoil(_SPOIL)
    if wrong_readings.PLANTED:
        spoil(wrong_readings.SPOIL)
