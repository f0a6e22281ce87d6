"""A probe: a few rows through the engine and their states read back, without service, lease or shard.

The checks at the start of an engine use it, and so do tests that hold a GPU's values against a reference.
"""

import asyncio
import os
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import ml_dtypes
import numpy as np
import numpy.typing as npt

from layertap.layout import ShardLayout
from worker.capture.report import take_log_probabilities
from worker.capture.rid import Reading, Rid, mask
from worker.capture.session import Ledger, Session, publish, sessions_dir, withdraw
from worker.engine.client import EngineDownError, EngineRefusedError
from worker.engine.engine import Engine

_WRITE_TIMEOUT_S = 60.0
_DTYPES = {"BF16": np.dtype(ml_dtypes.bfloat16), "F16": np.dtype(np.float16), "F32": np.dtype(np.float32)}

States = npt.NDArray[np.generic]


class ProbeError(Exception):
    """The engine or the capture did not deliver; the message says which and how."""


@dataclass(frozen=True)
class Probed:
    """One row's states in the model's dtype: `hidden_states` [S, K, H], `final_hidden_state` [S, H].

    For a row of the self-check, `log_probabilities` are the engine's, and `head` what the head made of the states.
    """

    hidden_states: States
    final_hidden_state: States
    nonfinite: int
    log_probabilities: list[float] = field(default_factory=list)
    head: list[float] | None = None


async def probe(
    engine: Engine,
    rows: Sequence[npt.NDArray[np.int32]],
    boundaries: Sequence[int],
    reading: Reading = Reading.HOOKS,
) -> list[Probed]:
    """Prefills rows [S_i] in one list and returns their states at `boundaries`. Raises `ProbeError`.

    With `Reading.CHECK` the K states are those of `sources.of_check`, and `boundaries` merely their number as a range.
    """
    report = engine.reports[0]
    layout = ShardLayout.of([len(row) for row in rows], boundaries, report.hidden_size, report.dtype, True)
    rid = Rid(mask(list(boundaries)), True, f"probe_{secrets.token_hex(6)}", 1, 0, 0, reading)
    ledger = Ledger.create(sessions_dir(engine.directory) / f"{rid.session}.ledger", layout.lengths)
    file = engine.directory / f"{rid.session}.bin"
    fd = os.open(file, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        os.posix_fallocate(fd, 0, layout.nbytes)
        publish(engine.directory, rid.session, Session.at(file, ledger, layout))
        rids = [str(replace(rid, row=index)) for index in range(len(rows))]
        log_probabilities: list[list[float]] = [[] for _ in rows]
        try:
            if reading is Reading.CHECK:
                log_probabilities = await engine.client.log_probabilities(rids, list(rows))
            else:
                await engine.client.prefill_all(rids, list(rows))
        except (EngineDownError, EngineRefusedError) as error:
            raise ProbeError(f"the engine could not prefill {len(rows)} rows: {error}") from error
        await _arrive(ledger)
        found = _read(fd, layout, ledger)
        if reading is not Reading.CHECK:
            return found
        heads = [take_log_probabilities(engine.directory, rid.session, index) for index in range(len(rows))]
        return [
            replace(probed, log_probabilities=engines, head=head)
            for probed, engines, head in zip(found, log_probabilities, heads, strict=True)
        ]
    finally:
        ledger.close_session()
        withdraw(engine.directory, rid.session)
        os.close(fd)
        file.unlink()


async def _arrive(ledger: Ledger) -> None:
    """Returns once every row is in the file."""
    deadline = time.monotonic() + _WRITE_TIMEOUT_S
    while (whole := ledger.progress()[0]) < len(ledger.lengths):
        if ledger.errno or time.monotonic() > deadline:
            raise ProbeError(
                f"the capture wrote {whole} of {len(ledger.lengths)} rows, {ledger.progress()[1]} of "
                f"{ledger.lengths.sum()} tokens (errno {ledger.errno})"
            )
        await asyncio.sleep(0.005)


def _read(fd: int, layout: ShardLayout, ledger: Ledger) -> list[Probed]:
    whole = {}
    for name in ("hidden_states", "final_hidden_state"):
        place = layout.tensors[name]
        data = os.pread(fd, place.nbytes, place.start)
        whole[name] = np.frombuffer(data, _DTYPES[place.dtype]).reshape(place.shape)
    ends = layout.offsets
    return [
        Probed(
            whole["hidden_states"][ends[i] : ends[i + 1]],
            whole["final_hidden_state"][ends[i] : ends[i + 1]],
            int(ledger.nonfinite[i]),
        )
        for i in range(len(layout.lengths))
    ]
