"""The capture on one rank's model: hooks that read the residual stream and return nothing of their own.

Attached once, after the model is loaded. Nothing that the model computes or returns changes; a forward with none of our
rows costs one look at its request ids.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn

from worker.capture import addressing, residual, sources
from worker.capture.addressing import Piece
from worker.capture.collection import Collection
from worker.capture.head import Head
from worker.capture.rid import Reading
from worker.capture.sources import Source, State
from worker.capture.stack import Stack, UnsupportedModelError, arguments


class Sink(Protocol):
    """Takes the states of one forward."""

    def states(
        self, piece_states: Callable[[Piece], list[torch.Tensor]], found: list[Piece], final: torch.Tensor | None
    ) -> None:
        """`piece_states` gives the states that a piece asks for, of every batch row, each [N, H]; `final` [N, H]."""

    def log_probabilities(self, piece: Piece, found: list[float] | None) -> None:
        """What the head makes of a self-check row's final hidden state; None where the model offers no head."""


@dataclass
class _Forward:
    batch: Any
    found: list[Piece]
    tokens: int
    wanted: frozenset[State]
    final: bool
    states: dict[State, torch.Tensor] = field(default_factory=dict)
    final_state: torch.Tensor | None = None


class ModelCapture:
    """Owns the hooks on one rank's model. `sink` is called on the writing rank only, elsewhere it is None.

    `hooks` False leaves the blocks alone, but for the entry of the first: states come from the model's own collection.
    """

    def __init__(self, stack: Stack, head: Head, sink: Sink | None, hooks: bool = True) -> None:
        self._stack = stack
        self._head = head
        self._sink = sink
        self._hooks = hooks
        self._layers = len(stack.blocks)
        self._collection = Collection(stack)
        self._current: _Forward | None = None
        self._handles: list[Any] = []
        if not hooks and not self._collection.offered:
            raise UnsupportedModelError(f"{type(stack.inner).__name__} collects no states by itself")

    @property
    def collects(self) -> bool:
        """Whether the model offers its own collection."""
        return self._collection.offered

    def attach(self) -> None:
        """Registers the hooks. Raises `UnsupportedModelError` if a block's forward lacks the arguments they read."""
        stack, keep = self._stack, self._handles.append
        batch_of = arguments(stack.inner, {"forward_batch"})
        keep(
            stack.inner.register_forward_pre_hook(
                lambda module, args, kwargs: self._begin(batch_of(args, kwargs)["forward_batch"]), with_kwargs=True
            )
        )
        for index, block in enumerate(stack.blocks):
            if index == 0 or self._hooks:
                read = arguments(block, {"hidden_states", "forward_batch"})
                keep(block.register_forward_pre_hook(self._at_entry(index, read), with_kwargs=True))
            if self._hooks:
                keep(block.register_forward_hook(self._at_exit(index + 1)))
        keep(stack.norm.register_forward_hook(self._at_norm))
        keep(stack.inner.register_forward_hook(self._end))

    def detach(self) -> None:
        """Removes every hook."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _asked(self, piece: Piece) -> tuple[State, ...]:
        return sources.of(piece, self._layers, self._hooks, self.collects)

    def _begin(self, batch: Any) -> None:
        self._current = None
        # Still on if the forward before this one raised.
        self._collection.switch_off()
        if not batch.forward_mode.is_extend() or batch.forward_mode.name != "EXTEND" or not batch.rids:
            return
        seq_lens = batch.extend_seq_lens_cpu
        if seq_lens is None or len(seq_lens) != len(batch.rids):
            return
        found = addressing.pieces(batch.rids, batch.extend_prefix_lens_cpu, seq_lens)
        if not found:
            return
        wanted = sources.wanted(found, self._layers, self._hooks, self.collects)
        self._current = _Forward(batch, found, sum(seq_lens), wanted, any(piece.rid.final for piece in found))
        inner = sorted(k for source, k in wanted if source is Source.COLLECT and 0 < k < self._layers)
        if inner and self.collects:
            self._collection.switch_on(inner)

    def _at_entry(self, index: int, read: Callable[..., dict[str, Any]]) -> Callable[..., None]:
        # What comes before the first block has no other reading.
        here = [(Source.HOOKS, index)] if index else [(Source.HOOKS, 0), (Source.COLLECT, 0)]

        def at_entry(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            forward = self._current
            if forward is not None and any(state in forward.wanted for state in here):
                stream = residual.stream_at_entry(read(args, kwargs))
                forward.states |= dict.fromkeys(here, stream)

        return at_entry

    def _at_exit(self, boundary: int) -> Callable[..., None]:
        whole, bare = (Source.EXITS, boundary), (Source.BARE, boundary)

        def at_exit(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
            forward = self._current
            if forward is None or whole not in forward.wanted:
                return
            stream = forward.states[whole] = residual.stream_at_exit(output, forward.batch)
            if bare in forward.wanted:
                forward.states[bare] = residual.bare_at_exit(output, stream)

        return at_exit

    def _at_norm(self, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        forward = self._current
        if forward is None:
            return
        last = [(Source.HOOKS, self._layers), (Source.COLLECT, self._layers)]
        normed_again = (Source.NORMED, self._layers)
        if not forward.final and not any(state in forward.wanted for state in last):
            return
        stream, normed = residual.stream_at_norm(inputs, output)
        forward.states |= dict.fromkeys(last, stream)
        if forward.final:
            forward.final_state = normed
        if normed_again in forward.wanted:
            before = forward.states.get((Source.EXITS, self._layers), stream)
            # Not through the module's call, which would run this hook again.
            again = self._stack.norm.forward(before.clone())
            forward.states[normed_again] = again[0] if isinstance(again, tuple) else again

    def _end(self, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> Any:
        forward, self._current = self._current, None
        if forward is None:
            return None
        plain, collected = self._collection.take(output)
        forward.states |= {(Source.COLLECT, k): state for k, state in collected.items()}
        self._consult_head(forward)
        self._hand_over(forward)
        return plain

    def _consult_head(self, forward: _Forward) -> None:
        normed = forward.states.get((Source.NORMED, self._layers))
        for piece in forward.found:
            if piece.rid.reading is Reading.CHECK and normed is not None:
                rows = slice(piece.start, piece.start + piece.count)
                found = self._head.log_probabilities(normed[rows], forward.batch.input_ids[rows], forward.batch)
                if self._sink is not None:
                    self._sink.log_probabilities(piece, found)

    def _hand_over(self, forward: _Forward) -> None:
        if self._sink is None:
            return
        every = [*forward.states.values(), *([] if forward.final_state is None else [forward.final_state])]
        if any(len(state) != forward.tokens for state in every):
            # Padded or scattered rows have no known place: they are left unwritten, and the worker sees them missing.
            return
        whole = [piece for piece in forward.found if self._has(forward, piece)]
        self._sink.states(lambda piece: [forward.states[s] for s in self._asked(piece)], whole, forward.final_state)

    def _has(self, forward: _Forward, piece: Piece) -> bool:
        final = not piece.rid.final or forward.final_state is not None
        return final and all(state in forward.states for state in self._asked(piece))
