"""The canary: one short row through a fresh engine before any real work, which also warms it up.

It proves that the hooks fire, that every asked state arrives, is finite, and that no two boundaries are the same
buffer. An engine that fails it is refused.
"""

import asyncio
import os
import time
from pathlib import Path

import numpy as np

from layertap.layout import ShardLayout
from layertap.schemas.workers import ModelFacts
from worker.capture.rid import Rid, mask
from worker.capture.session import Ledger, Session, publish, sessions_dir, withdraw
from worker.engine.client import EngineDownError, EngineRefusedError
from worker.engine.engine import Engine

_TOKENS = 24
_TASK = "task_canary"
_WRITE_TIMEOUT_S = 60.0


class CanaryError(Exception):
    """The engine serves, but the capture does not deliver; the message says what is wrong."""


async def check(engine: Engine, facts: ModelFacts) -> None:
    """Prefills the canary. Raises `CanaryError`."""
    report = engine.reports[0]
    if (report.num_layers, report.hidden_size) != (facts.num_layers, facts.hidden_size):
        raise CanaryError(
            f"config.json says {facts.num_layers} blocks of hidden size {facts.hidden_size}, "
            f"the engine has {report.num_layers} of {report.hidden_size}"
        )
    tokens = min(_TOKENS, facts.max_row_tokens)
    boundaries = sorted({0, facts.num_layers // 2, facts.num_layers})
    layout = ShardLayout.of([tokens], boundaries, report.hidden_size, report.dtype, True)
    rid = Rid(mask(boundaries), True, _TASK, 1, 0, 0)
    ledger = Ledger.create(sessions_dir(engine.directory) / f"{rid.session}.ledger", [tokens])
    file = engine.directory / "canary.bin"
    _reserve(file, layout.nbytes)
    places = layout.tensors
    publish(
        engine.directory,
        rid.session,
        Session(
            str(file),
            str(ledger.path),
            places["hidden_states"].start,
            layout.hidden_token_bytes,
            places["final_hidden_state"].start,
            layout.final_token_bytes,
        ),
    )
    try:
        await _prefill(engine, rid, _row(tokens, facts.vocab_size), ledger)
        _examine(ledger, layout, file)
    finally:
        ledger.close_session()
        withdraw(engine.directory, rid.session)
        file.unlink()


async def _prefill(engine: Engine, rid: Rid, row: np.ndarray, ledger: Ledger) -> None:
    try:
        (aborted,) = await engine.client.prefill([str(rid)], [row])
    except (EngineDownError, EngineRefusedError) as error:
        raise CanaryError(f"the engine could not prefill {len(row)} tokens: {error}") from error
    if aborted is not None:
        raise CanaryError(f"the engine aborted the canary: {aborted}")
    deadline = time.monotonic() + _WRITE_TIMEOUT_S
    while not ledger.complete(0):
        if ledger.errno or time.monotonic() > deadline:
            raise CanaryError(
                f"the capture wrote {ledger.written[0]} of {ledger.lengths[0]} tokens (errno {ledger.errno})"
            )
        await asyncio.sleep(0.01)


def _examine(ledger: Ledger, layout: ShardLayout, file: Path) -> None:
    if ledger.nonfinite[0]:
        raise CanaryError(f"{ledger.nonfinite[0]} of {ledger.lengths[0]} tokens hold a NaN or an infinity")
    place = layout.tensors["hidden_states"]
    raw = np.fromfile(file, np.uint8, place.nbytes, offset=place.start)
    states = raw.reshape(layout.tokens, len(layout.boundaries), -1)
    for first in range(len(layout.boundaries)):
        for second in range(first):
            if np.array_equal(states[:, first], states[:, second]):
                a, b = layout.boundaries[second], layout.boundaries[first]
                raise CanaryError(f"boundaries {a} and {b} are the same bytes: the capture reads one buffer twice")


def _row(tokens: int, vocab_size: int) -> np.ndarray:
    return (np.arange(tokens, dtype=np.int64) * 7919 % max(2, vocab_size - 1)).astype(np.int32)


def _reserve(file: Path, nbytes: int) -> None:
    fd = os.open(file, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        os.posix_fallocate(fd, 0, nbytes)
    finally:
        os.close(fd)
