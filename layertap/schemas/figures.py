"""How fast the work goes and what holds it up, as workers report it: of one worker, or of one job.

"Now" is over the last ten seconds or so. Shares are between 0 and 1. A null means that it is not known: no GPU, no
pinned memory on a CPU engine, or nothing measured yet.
"""

from typing import Annotated

from pydantic import Field

from layertap.schemas.common import Schema

MOST = 1e15
"""Largest rate that is taken, so that sums of them stay numbers."""
Rate = Annotated[float, Field(ge=0, le=MOST, allow_inf_nan=False, strict=True)]
Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False, strict=True)]


class Figures(Schema):
    """What goes on now.

    `tokens_per_second` and `bytes_per_second` count what is written. `plain_share` is those tokens over the plain
    prefill that the engine managed at its start, a rough figure that may exceed 1. `pool_fill`: share of the pinned
    memory that is taken. `writer_wait`: share of time in which the forward stood still for the writer. `gpu_use`: share
    of time in which the busiest of the worker's GPUs was in use.
    """

    tokens_per_second: Rate
    bytes_per_second: Rate
    plain_share: Rate | None = None
    pool_fill: Share | None = None
    writer_wait: Share | None = None
    gpu_use: Share | None = None


class WorkerFigures(Figures):
    """The same of one worker's engine, and more.

    `tokens_per_second_mean`: since the engine came up, over the time in which rows were in it.
    `plain_tokens_per_second`: prefill without capture, measured at its start. `writer_busy`: time that the
    writers spent writing over the time that went by, 1 also where several wrote all the time. `queued_runs`: pieces of
    forwards that wait for them.
    """

    tokens_per_second_mean: Rate | None = None
    plain_tokens_per_second: Rate | None = None
    writer_busy: Share | None = None
    queued_runs: Annotated[int, Field(ge=0, le=2**53)] = 0
