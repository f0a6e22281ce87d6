"""The `plugin` attachment point: SGLang's plugin framework calls `register` in every process of the engine.

The capture is attached right after `ModelRunner.load_model`, whose weights may still be on their way then.
"""

from typing import Any

from worker.capture.installed import active, show_stacks_on_signal

_LOAD_MODEL = "sglang.srt.model_executor.model_runner.ModelRunner.load_model"


def register() -> None:
    """Entry point of the group `sglang.srt.plugins`."""
    if not active("plugin"):
        return
    show_stacks_on_signal()
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(_LOAD_MODEL, _after_load, HookType.AFTER)


def _after_load(result: object, runner: Any, *args: object, **kwargs: object) -> None:
    from worker.capture.attach import attach_from

    attach_from("plugin", runner)
