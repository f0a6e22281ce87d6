"""Plants wrong readings for tests: put on PYTHONPATH, this makes the capture of a real engine read states wrongly.

It acts in the processes of an engine only, as the file named by `TEST_PLANTED` says at each forward; no file, no fault.
"""

import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from types import ModuleType
from typing import Any

PLANTED = os.environ.get("TEST_PLANTED", "")


def planted() -> str:
    """The fault that is planted now, or nothing."""
    try:
        with open(PLANTED) as file:
            return file.read().strip()
    except OSError:
        return ""


def _spoil_residual(module: ModuleType) -> None:
    at_entry, at_norm = module.stream_at_entry, module.stream_at_norm

    def stream_at_entry(arguments: Any) -> Any:
        stream = at_entry(arguments)
        if planted() == "residual left out":
            return arguments["hidden_states"].clone()
        return stream

    def stream_at_norm(inputs: Any, output: Any) -> Any:
        stream, normed = at_norm(inputs, output)
        return (stream, stream.clone()) if planted() == "pre-norm for post-norm" else (stream, normed)

    module.stream_at_entry, module.stream_at_norm = stream_at_entry, stream_at_norm


def _spoil_capture(module: ModuleType) -> None:
    kept: list[Any] = []
    end, begin = module.ModelCapture._end, module.ModelCapture._begin
    hooks = module.Source.HOOKS

    def spoiled_begin(self: Any, batch: Any) -> None:
        begin(self, batch)
        if planted() == "rows swapped" and self._current is not None and len(self._current.found) > 1:
            first, second, *others = self._current.found
            swapped = [replace(first, rid=second.rid), replace(second, rid=first.rid)]
            self._current.found = [*swapped, *others]

    def spoiled_end(self: Any, *args: Any) -> Any:
        forward, layers = self._current, self._layers
        if forward is not None:
            states = forward.states
            match planted():
                case "off by one":
                    for k in range(1, layers):
                        if (hooks, k) in states:
                            states[hooks, k] = states.get((hooks, k + 1), states[hooks, k])
                case "last layer missed":
                    for source in {source for source, k in states if k == layers}:
                        if source is hooks and (hooks, layers - 1) in states:
                            states[hooks, layers] = states[hooks, layers - 1] + 0
                case "stale buffer":
                    old = kept[0] if kept else dict(states)
                    kept[:] = [dict(states)]
                    for state, stale in old.items():
                        if state in states and len(stale) >= forward.tokens:
                            states[state] = stale[: forward.tokens]
                case "not finite":
                    for state in states.values():
                        state[0, 0] = float("nan")
        return end(self, *args)

    module.ModelCapture._begin, module.ModelCapture._end = spoiled_begin, spoiled_end


_SPOIL = {"worker.capture.residual": _spoil_residual, "worker.capture.model_capture": _spoil_capture}


class _Finder(importlib.abc.MetaPathFinder):
    """Lets the modules above load as ever, and spoils them right after."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in _SPOIL:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_and_spoil(module: ModuleType) -> None:
                execute(module)
                _SPOIL[name](module)

            spec.loader.exec_module = exec_and_spoil  # type: ignore[method-assign]
        return spec


if PLANTED and os.environ.get("LAYERTAP_ENGINE_DEVICE"):
    sys.meta_path.insert(0, _Finder())
