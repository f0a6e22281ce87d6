"""Lease claims a second with eight claimers, on SQLite and on Postgres, over HTTP and without it.

A claim is a whole round trip: the request checked, one transaction that leases a task, durable before it is answered.
Every claim must be answered with a task that nobody was given before; anything else ends the benchmark with an error.
"""

import http.client
import json
import os
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from statistics import quantiles
from urllib.parse import urlsplit

from benchmarks import postgres, service_process
from benchmarks.pairs import Budget, Rate, Ratio, Result, Spread, in_turn, rate, ratio
from benchmarks.service_process import Service, claim_body
from layertap.schemas.tasks import ClaimRequest
from service.app import open_context
from service.context import Context
from service.settings import Settings
from service.tasks import claims

BOUND_SECONDS = 110.0
CLAIMERS = 8
_CLAIMS_EACH = 40
_BUDGET = Budget(seconds=30, fewest=3, most=9)
_TIMEOUT = 60.0
_HTTP, _DIRECT = "over HTTP", "without HTTP"

Claim = Callable[[], str]
"""Claims once; the id of the task that was leased. Raises `RuntimeError` when it is not given one."""


class Claimers:
    """Eight workers that claim at once. `latencies` are seconds of every claim."""

    def __init__(self, claims_of: Sequence[Claim]) -> None:
        self._claims_of = claims_of
        self._taken: set[str] = set()
        self.latencies: list[float] = []

    async def run(self) -> float:
        """Seconds until each has claimed `_CLAIMS_EACH` tasks, all different from any given before."""
        start = threading.Barrier(len(self._claims_of) + 1)
        with ThreadPoolExecutor(len(self._claims_of)) as pool:
            answers = [pool.submit(_claim_many, claim, start) for claim in self._claims_of]
            start.wait(_TIMEOUT)
            began = time.perf_counter()
            claimed = [pair for answer in answers for pair in answer.result(_TIMEOUT)]
            seconds = time.perf_counter() - began
        tasks = {task for task, _ in claimed}
        if len(tasks) != len(claimed) or self._taken & tasks:
            raise RuntimeError("a task was leased twice")
        self._taken |= tasks
        self.latencies += [latency for _, latency in claimed]
        return seconds


def _claim_many(claim: Claim, start: threading.Barrier) -> list[tuple[str, float]]:
    claimed = []
    start.wait(_TIMEOUT)
    for _ in range(_CLAIMS_EACH):
        began = time.perf_counter()
        task = claim()
        claimed.append((task, time.perf_counter() - began))
    return claimed


async def measure(model: Path) -> list[Result]:
    """Rounds of the same number of claims on each database, each way."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="layertap-bench-")))
        create = stack.enter_context(postgres.running())
        every: dict[str, Claimers] = {}
        for database in ("SQLite", "Postgres"):
            for way, prepare in ((_HTTP, _over_http), (_DIRECT, _direct)):
                place = folder / f"{database}-{way.split()[0]}"
                place.mkdir()
                url = create() if database == "Postgres" else f"sqlite:///{place / 'layertap.sqlite3'}"
                every[f"{database} {way}"] = Claimers(prepare(stack, place, url))
        taken = await in_turn({name: claimers.run for name, claimers in every.items()}, _BUDGET)
    found = Result(
        name="claims",
        title=f"Lease claims with {CLAIMERS} claimers",
        ratios=[
            Ratio(f"SQLite over Postgres, {way}", ratio(taken[f"Postgres {way}"], taken[f"SQLite {way}"]))
            for way in (_HTTP, _DIRECT)
        ],
        rates=[Rate(name, rate(CLAIMERS * _CLAIMS_EACH, seconds), "claims/s") for name, seconds in taken.items()]
        + [Rate(f"{name}, 99th percentile", _percentile(claimers), "ms") for name, claimers in every.items()],
        facts={
            "claimers": CLAIMERS,
            "claims a round": CLAIMERS * _CLAIMS_EACH,
            "claims in all": sum(len(claimers.latencies) for claimers in every.values()),
            "lock errors, refused or doubled claims": 0,
        },
        seconds=taken,
    )
    return [found]


def _percentile(claimers: Claimers) -> Spread:
    slow = 1000 * quantiles(claimers.latencies, n=100)[98]
    return Spread(slow, 1000 * min(claimers.latencies), 1000 * max(claimers.latencies), len(claimers.latencies))


def _over_http(stack: ExitStack, folder: Path, url: str) -> list[Claim]:
    service = stack.enter_context(service_process.running(folder, url))
    address = urlsplit(service.url)
    found: list[Claim] = []
    for worker in _prepared(service):
        connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=_TIMEOUT)
        stack.callback(connection.close)
        found.append(_HttpClaim(connection, worker))
    return found


def _direct(stack: ExitStack, folder: Path, url: str) -> list[Claim]:
    with service_process.running(folder, url) as service:
        workers = _prepared(service)
    settings = Settings(database_url=url, storage=folder / "storage", lease_seconds=3600)
    context = open_context(settings)
    stack.callback(context.database.close)
    return [_DirectClaim(context, worker) for worker in workers]


def _prepared(service: Service) -> list[str]:
    """Workers of a service that has tasks enough for every round."""
    workers = [f"wrk_{os.urandom(8).hex()}" for _ in range(CLAIMERS)]
    for worker in workers:
        service.register(worker)
    service.planned_job(workers[0], shards=CLAIMERS * _CLAIMS_EACH * _BUDGET.most, shard_bytes=1)
    return workers


class _HttpClaim:
    def __init__(self, connection: http.client.HTTPConnection, worker: str) -> None:
        self._connection = connection
        self._worker = worker

    def __call__(self) -> str:
        body = json.dumps(claim_body(self._worker, uuid.uuid4().hex, "shard"))
        self._connection.request("POST", "/v1/tasks/claim", body, {"Content-Type": "application/json"})
        response = self._connection.getresponse()
        answer = response.read()
        if response.status != 200 or json.loads(answer)["lease"] is None:
            raise RuntimeError(f"a claim was answered {response.status}: {answer[:500]!r}")
        return str(json.loads(answer)["lease"]["task"])


class _DirectClaim:
    def __init__(self, context: Context, worker: str) -> None:
        self._context = context
        self._worker = worker

    def __call__(self) -> str:
        body = claim_body(self._worker, uuid.uuid4().hex, "shard")
        answer = claims.claim(self._context, ClaimRequest.model_validate(body))
        if answer.lease is None:
            raise RuntimeError("a claim was answered without a lease")
        return answer.lease.task
