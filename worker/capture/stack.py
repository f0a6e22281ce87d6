"""The stack of blocks inside a model: where the capture finds what it reads."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn


class UnsupportedModelError(RuntimeError):
    """The model's structure offers no place to read the residual stream; the message says what was looked for."""


@dataclass(frozen=True)
class Stack:
    """The module whose forward runs the blocks, the blocks, and the final norm."""

    inner: nn.Module
    blocks: nn.ModuleList
    norm: nn.Module


def find_stack(model: nn.Module) -> Stack:
    """The language model's stack. Multimodal wrappers nest it; the longest list of blocks beside a norm is it.

    Raises `UnsupportedModelError` when no module has both `layers` and `norm`.
    """
    found: Stack | None = None
    for module in model.modules():
        blocks, norm = getattr(module, "layers", None), getattr(module, "norm", None)
        if not isinstance(blocks, nn.ModuleList) or not isinstance(norm, nn.Module):
            continue
        if found is None or len(blocks) > len(found.blocks):
            found = Stack(module, blocks, norm)
    if found is None:
        raise UnsupportedModelError(f"{type(model).__name__} has no module with both `layers` and `norm`")
    return found


def arguments(module: nn.Module, needed: set[str]) -> Callable[..., dict[str, Any]]:
    """Reads a call's arguments by name. Raises `UnsupportedModelError` if the module's forward takes not all needed."""
    parameters = list(inspect.signature(module.forward).parameters)
    missing = needed - set(parameters)
    if missing:
        raise UnsupportedModelError(f"{type(module).__name__}.forward takes no {' or '.join(sorted(missing))}")

    def by_name(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        return dict(zip(parameters, args, strict=False)) | kwargs

    return by_name
