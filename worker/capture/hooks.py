"""The `hooks` strategy: forward hooks on the blocks and the final norm, reading the residual stream by themselves.

Attached once, after the model is loaded. They return nothing, so nothing that the model computes or returns changes; a
forward with none of our rows costs one look at its request ids.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn

from worker.capture import addressing, residual
from worker.capture.rid import unmask


class UnsupportedModelError(RuntimeError):
    """The model's structure offers no place to read the residual stream; the message says what was looked for."""


class Sink(Protocol):
    """Takes the states of one forward."""

    def __call__(
        self, found: list[addressing.Piece], states: dict[int, torch.Tensor], final: torch.Tensor | None
    ) -> None:
        """`states[k]` is boundary k of every batch row, [N, H]; `final` the final hidden state, [N, H], if wanted."""


@dataclass(frozen=True)
class Stack:
    """The stack of blocks inside a model: the module whose forward runs them, the blocks, and the final norm."""

    inner: nn.Module
    blocks: nn.ModuleList
    norm: nn.Module


def find_stack(model: nn.Module) -> Stack:
    """The language model's stack. Multimodal wrappers nest it; the longest list of blocks beside a norm is it.

    Raises `UnsupportedModelError` when no module has both `layers` and `norm`.
    """
    candidates = [
        module
        for module in model.modules()
        if isinstance(getattr(module, "layers", None), nn.ModuleList)
        and isinstance(getattr(module, "norm", None), nn.Module)
    ]
    if not candidates:
        raise UnsupportedModelError(f"{type(model).__name__} has no module with both `layers` and `norm`")
    inner = max(candidates, key=lambda module: len(module.layers))  # type: ignore[arg-type]
    blocks, norm = inner.layers, inner.norm
    assert isinstance(blocks, nn.ModuleList)
    assert isinstance(norm, nn.Module)
    return Stack(inner, blocks, norm)


@dataclass
class _Forward:
    found: list[addressing.Piece]
    tokens: int
    blocks: frozenset[int]
    last: bool
    final: bool
    states: dict[int, torch.Tensor] = field(default_factory=dict)
    final_state: torch.Tensor | None = None


class HookCapture:
    """Owns the hooks on one rank's model. `sink` is called on the writing rank only, elsewhere it is None."""

    def __init__(self, stack: Stack, sink: Sink | None) -> None:
        self._stack = stack
        self._sink = sink
        self._layers = len(stack.blocks)
        self._current: _Forward | None = None
        self._handles: list[Any] = []

    def attach(self) -> None:
        """Registers the hooks. Raises `UnsupportedModelError` if a block's forward lacks the arguments they read."""
        inner_batch = _arguments(self._stack.inner, {"forward_batch"})
        self._handles.append(
            self._stack.inner.register_forward_pre_hook(
                lambda module, args, kwargs: self._begin(inner_batch(args, kwargs)["forward_batch"]), with_kwargs=True
            )
        )
        for index, block in enumerate(self._stack.blocks):
            read = _arguments(block, {"hidden_states", "forward_batch"})
            self._handles.append(block.register_forward_pre_hook(self._block_hook(index, read), with_kwargs=True))
        self._handles.append(self._stack.norm.register_forward_hook(self._at_norm))
        self._handles.append(self._stack.inner.register_forward_hook(self._end))

    def detach(self) -> None:
        """Removes every hook."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _begin(self, batch: Any) -> None:
        self._current = None
        if not batch.forward_mode.is_extend() or batch.forward_mode.name != "EXTEND" or not batch.rids:
            return
        seq_lens = batch.extend_seq_lens_cpu
        if seq_lens is None or len(seq_lens) != len(batch.rids):
            return
        found = addressing.pieces(batch.rids, batch.extend_prefix_lens_cpu, seq_lens)
        if not found:
            return
        bits, final = addressing.wanted(found)
        boundaries = unmask(bits)
        self._current = _Forward(
            found,
            sum(seq_lens),
            frozenset(k for k in boundaries if k < self._layers),
            self._layers in boundaries,
            final,
        )

    def _block_hook(self, index: int, read: Callable[..., dict[str, Any]]) -> Callable[..., None]:
        def at_entry(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            forward = self._current
            if forward is not None and index in forward.blocks:
                forward.states[index] = residual.stream_at_entry(read(args, kwargs))

        return at_entry

    def _at_norm(self, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        forward = self._current
        if forward is None or not (forward.last or forward.final):
            return
        stream, normed = residual.stream_at_norm(inputs, output)
        if forward.last:
            forward.states[self._layers] = stream
        if forward.final:
            forward.final_state = normed

    def _end(self, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        forward, self._current = self._current, None
        if forward is None or self._sink is None:
            return
        every = [*forward.states.values(), *([] if forward.final_state is None else [forward.final_state])]
        if any(len(state) != forward.tokens for state in every):
            # Padded or scattered rows have no known place: they are left unwritten, and the worker sees them missing.
            return
        self._sink(forward.found, forward.states, forward.final_state)


def _arguments(module: nn.Module, needed: set[str]) -> Callable[..., dict[str, Any]]:
    parameters = list(inspect.signature(module.forward).parameters)
    missing = needed - set(parameters)
    if missing:
        raise UnsupportedModelError(f"{type(module).__name__}.forward takes no {' or '.join(sorted(missing))}")

    def by_name(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        return dict(zip(parameters, args, strict=False)) | kwargs

    return by_name
