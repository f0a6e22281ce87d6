"""A snapshot as Prometheus metrics, in base units. Pure. What each means to an operator is in docs/operations.md."""

from collections.abc import Iterable, Iterator
from typing import TypeVar

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

from layertap.schemas.incidents import IncidentKind
from layertap.schemas.jobs import JobState
from layertap.schemas.tasks import TaskKind
from layertap.schemas.workers import WorkerState
from service.figures import standing
from service.leases import TaskState
from service.metrics.repository import Snapshot

T = TypeVar("T")

_NOW = {
    "tokens_per_second": ("tokens_per_second", "Tokens a second whose states were written, over the last 10 s"),
    "bytes_per_second": ("bytes_per_second", "Bytes a second of states written, over the last 10 s"),
    "plain_ratio": ("plain_share", "Tokens a second as a share of plain prefill, measured when the engine started"),
    "pool_fill_ratio": ("pool_fill", "Share of the pinned memory that is taken"),
    "writer_wait_ratio": ("writer_wait", "Share of time in which the forward stood still for the writer"),
    "gpu_use_ratio": ("gpu_use", "Share of time in which the busiest of its GPUs was in use"),
}
"""Metric's name, less its beginning: the field of the figures, and what it says."""
_WORKER = {
    **_NOW,
    "mean_tokens_per_second": (
        "tokens_per_second_mean",
        "Tokens a second since the engine came up, over the time in which rows were in it",
    ),
    "plain_tokens_per_second": (
        "plain_tokens_per_second",
        "Tokens a second of plain prefill, measured when the engine started",
    ),
    "writer_busy_ratio": ("writer_busy", "Share of time in which the writer was writing"),
    "writer_queue_runs": ("queued_runs", "Pieces of forwards that wait for the writer"),
}
_JOB = {
    "planned_rows": ("rows_total", "Rows in the plan"),
    "done_rows": ("rows_done", "Rows written"),
    "failed_rows": ("row_errors", "Rows without hidden states"),
    "planned_tokens": ("tokens_total", "Tokens in the plan"),
    "done_tokens": ("tokens_done", "Tokens written"),
    "planned_bytes": ("bytes_total", "Bytes in the plan"),
    "planned_shards": ("shards_total", "Shards in the plan"),
    "done_shards": ("shards_done", "Shards committed"),
    "mean_tokens_per_second": ("tokens_per_second", "Tokens a second since the job began to run"),
    "left_seconds": ("eta_seconds", "Seconds until the job is done, at its mean speed"),
}


def text(snapshot: Snapshot) -> bytes:
    """The snapshot in Prometheus' text format."""
    return generate_latest(_Once(snapshot))


class _Once(Collector):
    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot

    def collect(self) -> Iterator[Metric]:
        """Every metric of the snapshot."""
        found = self._snapshot
        yield _by("jobs", "Jobs by state", "state", {state: found.jobs.get(state, 0) for state in JobState})
        tasks = GaugeMetricFamily(
            "layertap_tasks", "Tasks of jobs that are not over, by kind and state", labels=["kind", "state"]
        )
        for task in TaskKind:
            for state in TaskState:
                tasks.add_metric([task, state], found.tasks.get((task, state), 0))
        yield tasks
        yield _by("workers", "Workers by state", "state", {state: found.workers.get(state, 0) for state in WorkerState})
        incidents = CounterMetricFamily("layertap_incidents", "Incidents ever reported, by kind", labels=["kind"])
        for kind in sorted({kind.value for kind in IncidentKind} | set(found.incidents)):
            incidents.add_metric([kind], found.incidents.get(kind, 0))
        yield incidents
        yield from self._workers()
        yield from self._jobs()

    def _workers(self) -> Iterator[Metric]:
        info = GaugeMetricFamily(
            "layertap_worker_info", "1 for each worker", labels=["worker", "host", "version", "model", "state"]
        )
        seen = GaugeMetricFamily(
            "layertap_worker_seen_timestamp_seconds", "When the worker was heard of last", labels=["worker"]
        )
        for row in self._snapshot.present:
            info.add_metric([row.id, row.host, row.version, row.loaded_model or "", row.state], 1)
            seen.add_metric([row.id], row.seen_at.timestamp())
        yield from (info, seen)
        figures = [(row.id, told) for row in self._snapshot.present if (told := standing(row)) is not None]
        yield from _gauges("worker", _WORKER, figures)

    def _jobs(self) -> Iterator[Metric]:
        info = GaugeMetricFamily(
            "layertap_job_info", "1 for each job that is being worked on", labels=["job", "model", "state"]
        )
        for job in self._snapshot.at_work:
            info.add_metric([job.id, job.model, job.state], 1)
        yield info
        yield from _gauges("job", _JOB, [(job.id, job.progress) for job in self._snapshot.at_work])
        now = [(job.id, job.progress.now) for job in self._snapshot.at_work if job.progress.now is not None]
        yield from _gauges("job", _NOW, now)


def _by(name: str, says: str, label: str, values: dict[T, int]) -> Metric:
    family = GaugeMetricFamily(f"layertap_{name}", says, labels=[label])
    for value, count in values.items():
        family.add_metric([str(value)], count)
    return family


def _gauges(what: str, table: dict[str, tuple[str, str]], things: Iterable[tuple[str, object]]) -> Iterator[Metric]:
    """One gauge a line of the table, with a value for each thing that has one."""
    found = list(things)
    for name, (field, says) in table.items():
        family = GaugeMetricFamily(f"layertap_{what}_{name}", says, labels=[what])
        for identity, thing in found:
            if (value := getattr(thing, field)) is not None:
                family.add_metric([identity], value)
        yield family
