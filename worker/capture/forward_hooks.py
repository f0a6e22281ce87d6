"""The `forward_hooks` attachment point: a hook factory that SGLang's `--forward-hooks` names.

SGLang 0.5.9 to 0.5.23 calls it in every rank's process, from `register_forward_hooks(model, specs)`: after the weights
are loaded, memory is allocated and graphs are captured, before the first request. It hands over the specification's
`config` alone, and takes back a plain forward hook, which has no keyword arguments and sees no block's entry. So the
model and its runner are looked up in the frames of the callers, where both stand, and the capture attaches hooks of its
own, exactly as from the other attachment points.
"""

import sys
from typing import Any

from worker.capture.attach import attach_from

_FRAMES = 8


class NoModelRunnerError(RuntimeError):
    """No caller holds a model runner: this release of SGLang calls hook factories from elsewhere."""


def attach_from_here(config: dict[str, Any]) -> Any:
    """Attaches to the model whose hooks are being registered. Returns a hook that does nothing, for SGLang to hold.

    Raises `NoModelRunnerError`.
    """
    attach_from("forward_hooks", _calling_runner())
    return _do_nothing


def _calling_runner() -> Any:
    model = sys._getframe(2).f_locals.get("model")
    for depth in range(3, _FRAMES):
        try:
            frame = sys._getframe(depth)
        except ValueError:
            break
        for value in frame.f_locals.values():
            if model is not None and getattr(value, "model", None) is model and hasattr(value, "model_config"):
                return value
    raise NoModelRunnerError(
        "no model runner among the callers of the hook factory; start the worker with --installer plugin or source"
    )


def _do_nothing(module: object, inputs: object, output: object) -> None:
    return None
