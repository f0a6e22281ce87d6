"""What workers reported of their engines: which of it still holds, and what it says of one job. Pure."""

from collections.abc import Iterable, Sequence

from layertap.schemas.figures import MOST, Figures, WorkerFigures
from layertap.schemas.workers import WorkerState
from service.db.models import Worker


def standing(worker: Worker) -> WorkerFigures | None:
    """The worker's latest figures; None where it reported none, or is not there any more."""
    if worker.figures is None or not WorkerState(worker.state).present:
        return None
    # A replica of a newer version may have stored more.
    return WorkerFigures.model_validate(worker.figures, extra="ignore")


def of_job(speeds: Sequence[float | None], token_bytes: float, workers: Sequence[WorkerFigures]) -> Figures | None:
    """What goes on in a job whose shards in hand report these speeds (tokens a second) on these workers.

    `token_bytes` are bytes a token. None while no shard has a speed.
    """
    known = [speed for speed in speeds if speed is not None]
    if not known:
        return None
    tokens = min(sum(known), MOST)
    plain = [worker.plain_tokens_per_second for worker in workers]
    return Figures(
        tokens_per_second=round(tokens, 1),
        bytes_per_second=round(min(tokens * token_bytes, MOST)),
        plain_share=round(min(tokens / sum(filter(None, plain)), MOST), 3) if plain and all(plain) else None,
        pool_fill=_mean(worker.pool_fill for worker in workers),
        writer_wait=_mean(worker.writer_wait for worker in workers),
        gpu_use=_mean(worker.gpu_use for worker in workers),
    )


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return round(sum(known) / len(known), 3) if known else None
