"""The Python client: the same verbs as the command line, over HTTP.

    with layertap.Client() as client:
        dataset = client.upload_dataset("conversations.jsonl")
        job = client.create_job(dataset.id, model="SmolLM2-135M-Instruct", preset="eagle3")
        client.wait(job.id)
        client.pull(job.id, "out")

Every method raises `layertap.errors.ApiError` when the service refuses, and `ConnectionFailedError` when it can't be
reached within a bounded number of tries.
"""

import os
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import httpx

from layertap import manifest as manifests
from layertap.errors import ConnectionFailedError, LayertapError
from layertap.follow import follow
from layertap.pull import PullProgress, PullReport, pull
from layertap.schemas.common import Health, Page, Schema
from layertap.schemas.datasets import Dataset, RowProblem
from layertap.schemas.incidents import Incident
from layertap.schemas.jobs import MIB, Final, Job, JobCreate, JobState, LossMask, Overflow, Preset
from layertap.schemas.shards import Manifest, Shard
from layertap.schemas.workers import Model, Worker
from layertap.transport import Transport, backoff, parsed, problem_of

_UPLOAD_CHUNK = 256 * 1024
_UPLOAD_TRIES = 5

S = TypeVar("S", bound=Schema)


class Client:
    """A connection to one service; close it, or use it as a context manager. Safe to share between threads.

    `url` defaults to the environment's LAYERTAP_URL, else http://127.0.0.1:8178; `token` to LAYERTAP_TOKEN. `timeout`
    is in seconds and counts for each step of a request; `tries` bounds how often a request whose connection breaks is
    sent.
    """

    def __init__(self, url: str | None = None, token: str | None = None, timeout: float = 30.0, tries: int = 6) -> None:
        self._transport = Transport(url, token, timeout, tries)

    @property
    def url(self) -> str:
        """The service's address."""
        return self._transport.url

    def upload_dataset(
        self, path: str | os.PathLike[str], name: str | None = None, on_progress: Callable[[int], None] | None = None
    ) -> Dataset:
        """Streams a JSONL file to the service; `on_progress` gets the bytes sent so far.

        Lines that can't be used are counted in `bad_rows` and listed by `errors(dataset.id)`. An upload that breaks off
        is not repeated, since the service may have it already.
        """
        path = Path(path)
        for attempt in range(_UPLOAD_TRIES):
            try:
                response = self._transport.http.post(
                    "/v1/datasets",
                    params={"name": name or path.name},
                    content=_chunks(path, on_progress),
                    headers={"content-type": "application/jsonl", "content-length": str(path.stat().st_size)},
                )
            except OSError as e:
                raise LayertapError(f"{path} can't be read ({e.strerror}); name a JSONL file") from None
            except httpx.TransportError as e:
                if not isinstance(e, httpx.ConnectError) or attempt == _UPLOAD_TRIES - 1:
                    raise self._transport.unreachable(e) from e
                time.sleep(backoff(attempt))
                continue
            if not response.is_success:
                raise problem_of(response)
            return parsed(Dataset, response)
        raise AssertionError("the loop above returns or raises")

    def create_job(
        self,
        dataset: str,
        model: str,
        layers: Sequence[int] | None = None,
        preset: Preset | str | None = None,
        *,
        final: Final | str = Final.POST_NORM,
        max_tokens: int | None = None,
        overflow: Overflow | str = Overflow.TRUNCATE,
        loss_mask: LossMask | str = LossMask.ASSISTANT,
        shard_bytes: int = 1024 * MIB,
        metadata: Mapping[str, str] | None = None,
        idempotency_key: str | None = None,
    ) -> Job:
        """Asks for the hidden states of `model` over `dataset` at the boundaries `layers`, or those of `preset`.

        The settings are those of `layertap.schemas.jobs.JobCreate`; the service judges them. The same `idempotency_key`
        never makes a second job; by default each call has its own, so that a lost answer does not double the job.
        """
        body = {
            "dataset": dataset,
            "model": model,
            "layers": None if layers is None else list(layers),
            "preset": preset,
            "final": final,
            "max_tokens": max_tokens,
            "overflow": overflow,
            "loss_mask": loss_mask,
            "shard_bytes": shard_bytes,
            "metadata": dict(metadata or {}),
        }
        # Only what differs from the defaults travels, so an older service is not asked about newer settings.
        body = {name: value for name, value in body.items() if value != JobCreate.model_fields[name].default}
        headers = {"idempotency-key": idempotency_key or uuid.uuid4().hex}
        return parsed(
            Job, self._transport.send("POST", "/v1/jobs", repeatable=True, json=_plain(body), headers=headers)
        )

    def job(self, job: str) -> Job:
        """The job as it is now."""
        return parsed(Job, self._transport.send("GET", f"/v1/jobs/{_segment(job)}", repeatable=True))

    def jobs(self, state: JobState | str | None = None, page_size: int = 100) -> Iterator[Job]:
        """All jobs, newest first, fetched a page at a time."""
        return self._pages(Job, "/v1/jobs", {"state": str(state)} if state else {}, page_size)

    def wait(self, job: str, timeout: float | None = None, on_update: Callable[[Job], None] | None = None) -> Job:
        """Waits for the job to end and returns it, whether it succeeded or not; `on_update` sees every change.

        Raises `WaitTimeoutError` after `timeout` seconds; the job itself goes on.
        """
        latest: Job | None = None
        for latest in self.follow(job, timeout):
            if on_update is not None:
                on_update(latest)
        assert latest is not None
        return latest

    def follow(self, job: str, timeout: float | None = None) -> Iterator[Job]:
        """The job as it is now and after each change, until it has ended. Raises as `wait` does."""
        return follow(self._transport, _segment(job), timeout)

    def cancel(self, job: str) -> Job:
        """Asks the job to stop; shards already committed stay."""
        return parsed(Job, self._transport.send("POST", f"/v1/jobs/{_segment(job)}/cancel", repeatable=True))

    def retry(self, job: str) -> Job:
        """Queues again what failed of the job. Sent once only: a repeated retry would be refused."""
        return parsed(Job, self._transport.send("POST", f"/v1/jobs/{_segment(job)}/retry", repeatable=False))

    def delete(self, name: str) -> None:
        """Deletes a job (`job_…`) with its shards, or a data set (`ds_…`)."""
        self._transport.send("DELETE", f"/v1/{_collection(name)}/{_segment(name)}", repeatable=True)

    def datasets(self, page_size: int = 100) -> Iterator[Dataset]:
        """All data sets, newest first."""
        return self._pages(Dataset, "/v1/datasets", {}, page_size)

    def dataset(self, dataset: str) -> Dataset:
        """One data set."""
        return parsed(Dataset, self._transport.send("GET", f"/v1/datasets/{_segment(dataset)}", repeatable=True))

    def errors(self, name: str, page_size: int = 100) -> Iterator[RowProblem]:
        """The rows of a job (`job_…`) or a data set (`ds_…`) that have no hidden states, and why."""
        return self._pages(RowProblem, f"/v1/{_collection(name)}/{_segment(name)}/errors", {}, page_size)

    def shards(self, job: str, page_size: int = 100) -> Iterator[Shard]:
        """The job's committed shards, by index."""
        return self._pages(Shard, f"/v1/jobs/{_segment(job)}/shards", {}, page_size)

    def manifest(self, job: str) -> Manifest:
        """The manifest of a job that has ended."""
        return manifests.parse(self.manifest_bytes(job), f"the manifest of {job}")

    def manifest_bytes(self, job: str) -> bytes:
        """The manifest exactly as the service wrote it."""
        return self._transport.send("GET", f"/v1/jobs/{_segment(job)}/manifest", repeatable=True).content

    def models(self) -> Iterator[Model]:
        """The models that jobs may name."""
        return self._pages(Model, "/v1/models", {}, 100)

    def workers(self) -> Iterator[Worker]:
        """The workers that the service knows."""
        return self._pages(Worker, "/v1/workers", {}, 100)

    def incidents(self, job: str | None = None, worker: str | None = None, page_size: int = 100) -> Iterator[Incident]:
        """What went wrong with engines, newest first, without the evidence; only what hit `job`, or `worker`'s."""
        wanted = {"job": job, "worker": worker}
        params = {name: _segment(value) for name, value in wanted.items() if value is not None}
        return self._pages(Incident, "/v1/incidents", params, page_size)

    def incident(self, incident: str) -> Incident:
        """One incident with its evidence."""
        return parsed(Incident, self._transport.send("GET", f"/v1/incidents/{_segment(incident)}", repeatable=True))

    def ready(self) -> Health:
        """Whether the service can do its work now. Raises `ApiError` (503) when it can't."""
        return parsed(Health, self._transport.send("GET", "/readyz", repeatable=False))

    def pull(
        self,
        job: str,
        directory: str | os.PathLike[str],
        jobs: int = 4,
        on_progress: Callable[[PullProgress], None] | None = None,
    ) -> PullReport:
        """Downloads the job's shards and manifest into `directory`; see `layertap.pull.pull`."""
        return pull(self._transport, _segment(job), self.manifest_bytes(job), directory, jobs, on_progress)

    def close(self) -> None:
        """Closes every connection."""
        self._transport.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _pages(self, model: type[S], path: str, params: Mapping[str, str], page_size: int) -> Iterator[S]:
        after: str | None = None
        while True:
            query: dict[str, Any] = {**params, "limit": page_size, **({"after": after} if after else {})}
            page = parsed(Page[model], self._transport.send("GET", path, repeatable=True, params=query))  # type: ignore[valid-type]
            yield from page.data
            if not page.has_more:
                return
            if page.last_id is None or page.last_id == after:
                raise ConnectionFailedError(f"{self.url}{path} says it has more but names no next page")
            after = page.last_id


def _chunks(path: Path, on_progress: Callable[[int], None] | None) -> Iterator[bytes]:
    sent = 0
    with path.open("rb") as file:
        while chunk := file.read(_UPLOAD_CHUNK):
            yield chunk
            sent += len(chunk)
            if on_progress is not None:
                on_progress(sent)


def _plain(body: Mapping[str, Any]) -> dict[str, Any]:
    return {name: str(value) if isinstance(value, str) else value for name, value in body.items()}


def _segment(name: str) -> str:
    """`name` as one segment of a path. Raises `LayertapError` for what can't be an identifier."""
    if not name or not all(c.isalnum() or c in "_-" for c in name) or not name.isascii():
        raise LayertapError(f"{name!r} is no id; ids look like job_… and ds_…, `layertap status` lists the jobs")
    return name


def _collection(name: str) -> str:
    return "datasets" if name.startswith("ds_") else "jobs"
