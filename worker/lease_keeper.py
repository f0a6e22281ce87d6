"""Keeps leases alive from a small process of its own, so that no busy interpreter ever costs a lease.

The worker says on standard input which leases it holds; events go to standard output, a JSON document a line each. A
lease is renewed only while its work advances (the ledger, which the capture writes) or while a named phase is inside
its deadline: alive but stuck is not alive. The process ends with its worker.
"""

import json
import os
import select
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from layertap.transport import may_have_proxy
from worker.capture.session import Ledger, LedgerError
from worker.pace import Window
from worker.service_api import LeaseLostError, error_of, transient

TICK_S = 0.25
REPORT_S = 1.0
"""Work that advances is reported this often, which renews the lease too; other work renews at a third of it."""


@dataclass
class Held:
    """A lease being kept. Times are on this machine's monotonic clock, which all its processes share."""

    task: str
    worker: str
    generation: int
    secret: str
    lease_seconds: float
    valid_until: float
    next_renewal: float
    stall_seconds: float
    phase: str = ""
    phase_deadline: float = 0.0
    ledger: Ledger | None = None
    tokens: int = -1
    rows: int = 0
    advanced_at: float = 0.0
    reported: tuple[int, int] = (0, -1)
    stuck: bool = False
    speed: Window = field(default_factory=Window)


def observe(held: Held, now: float) -> None:
    """Looks at the ledger: progress since the last look moves `advanced_at`."""
    if held.ledger is None:
        return
    rows, tokens = held.ledger.progress()
    held.speed.add(now, tokens)
    if tokens != held.tokens:
        held.rows, held.tokens, held.advanced_at = rows, tokens, now


def may_renew(held: Held, now: float) -> bool:
    """The rule: inside the phase's deadline, or captured tokens advanced within `stall_seconds`."""
    if now < held.phase_deadline:
        return True
    return held.ledger is not None and now - held.advanced_at < held.stall_seconds


def due(held: Held, now: float) -> bool:
    """Whether it is time for a heartbeat: a third of the lease has passed, or there is progress to report."""
    third = held.lease_seconds / 3
    news = (held.rows, held.tokens) != held.reported and held.tokens >= 0
    return now >= held.next_renewal or (news and now >= held.next_renewal - third + min(REPORT_S, third))


class Keeper:
    """Renews every held lease at a third of its length, or sooner when there is progress to report; `handle` takes the
    worker's messages.
    """

    def __init__(self, http: httpx.Client) -> None:
        self._http = http
        self._held: dict[str, Held] = {}

    def handle(self, message: dict[str, Any]) -> None:
        """One message of the worker: `hold`, `phase` or `drop`."""
        now = time.monotonic()
        task = message["task"]
        match message["op"]:
            case "hold":
                self._held[task] = Held(
                    task=task,
                    worker=message["worker"],
                    generation=message["generation"],
                    secret=message["secret"],
                    lease_seconds=message["lease_seconds"],
                    valid_until=message["valid_until"],
                    next_renewal=now + message["lease_seconds"] / 3,
                    stall_seconds=message["stall_seconds"],
                )
                self._phase(self._held[task], message, now)
            case "phase" if task in self._held:
                self._phase(self._held[task], message, now)
            case "drop":
                self._held.pop(task, None)

    def tick(self) -> None:
        """Renews what is due and says what changed."""
        now = time.monotonic()
        for held in list(self._held.values()):
            observe(held, now)
            if not due(held, now):
                continue
            held.next_renewal = now + held.lease_seconds / 3
            if may_renew(held, now):
                held.stuck = False
                self._renew(held)
            elif not held.stuck:
                held.stuck = True
                _say(event="stuck", task=held.task, phase=held.phase, tokens=held.tokens)

    def _phase(self, held: Held, message: dict[str, Any], now: float) -> None:
        held.phase = message["phase"]
        held.phase_deadline = now + message["deadline_seconds"]
        held.advanced_at = now
        if message.get("ledger"):
            held.speed.clear()
            try:
                held.ledger = Ledger.open(Path(message["ledger"]))
            except (OSError, LedgerError):
                held.ledger = None

    def _renew(self, held: Held) -> None:
        sent = time.monotonic()
        speed = held.speed.rate()
        body = {
            "worker": held.worker,
            "generation": held.generation,
            "secret": held.secret,
            "rows_done": held.rows,
            "tokens_done": max(held.tokens, 0),
            "phase": held.phase,
            "tokens_per_second": None if speed is None else round(speed, 1),
        }
        try:
            response = self._http.post(f"/v1/tasks/{held.task}/heartbeat", json=body)
        except httpx.TransportError:
            held.next_renewal = sent + 0.5
            return
        if response.is_success:
            held.reported = (held.rows, held.tokens)
            held.lease_seconds = float(response.json()["lease_seconds"])
            held.valid_until = sent + held.lease_seconds
            _say(event="renewed", task=held.task, valid_until=held.valid_until)
        elif transient(response):
            held.next_renewal = sent + 0.5
        else:
            self._held.pop(held.task, None)
            error = error_of(response)
            lost = isinstance(error, LeaseLostError)
            _say(event="refused", task=held.task, lost=lost, reason=str(error))


def _say(**event: object) -> None:
    sys.stdout.write(json.dumps(event) + "\n")
    sys.stdout.flush()


def main() -> None:
    """Reads messages until standard input closes."""
    url, token = os.environ["LAYERTAP_KEEPER_SERVICE"], os.environ.get("LAYERTAP_TOKEN")
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    pending = b""
    os.set_blocking(sys.stdin.fileno(), False)
    proxy = may_have_proxy(httpx.URL(url).host)
    with httpx.Client(base_url=url, headers=headers, timeout=5.0, trust_env=proxy) as http:
        keeper = Keeper(http)
        _say(event="ready")
        while True:
            readable, _, _ = select.select([sys.stdin], [], [], TICK_S)
            if readable:
                data = os.read(sys.stdin.fileno(), 1 << 16)
                if not data:
                    return
                *lines, pending = (pending + data).split(b"\n")
                for line in lines:
                    keeper.handle(json.loads(line))
            keeper.tick()


if __name__ == "__main__":
    main()
