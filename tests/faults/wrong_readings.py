"""Wrong readings for tests: what makes the capture of a real engine read states wrongly.

As the file named by `TEST_PLANTED` says at each forward; no file, no fault.
"""

import os
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


SPOIL = {"worker.capture.residual": _spoil_residual, "worker.capture.model_capture": _spoil_capture}
