"""Leases in the worker's hand: kept alive by the keeper process, and dropped the moment they are no longer ours.

A lease whose time has run out unrenewed fences the work: nothing more is sent until the service has confirmed it. So an
unreachable service is waited for, and a lost lease costs no more than the work in hand.
"""

import asyncio
import json
import logging
import os
import sys
import time
from pathlib import Path
from typing import Any

from layertap.schemas.tasks import Held, HeldTask, Lease
from worker import tied

logger = logging.getLogger(__name__)

COMMIT_PHASE = "commit"
_START_TIMEOUT_S = 30.0
_STOP_TIMEOUT_S = 5.0


class HeldLease:
    """One lease in hand. `drop` ends it from outside; the work notices through `dropped`."""

    def __init__(self, lease: Lease, worker: str, valid_until: float) -> None:
        self.lease = lease
        self.proof = Held(worker=worker, generation=lease.generation, secret=lease.secret)
        self.dropped = asyncio.Event()
        self.drop_reason = ""
        self.lost = False
        self.committing = False
        self._valid_until = valid_until
        self._renewed = asyncio.Event()

    def renewed(self, valid_until: float) -> None:
        """The service confirmed the lease until then, on the monotonic clock."""
        self._valid_until = valid_until
        self._renewed.set()

    def drop(self, reason: str, lost: bool) -> None:
        """The lease is to be given up; `lost` when the service no longer counts it as ours.

        Not while it is being committed: a committed task is no longer held either, so only the commit's own answer
        tells the one from the other.
        """
        if not self.committing and not self.dropped.is_set():
            self.drop_reason, self.lost = reason, lost
            self.dropped.set()

    async def confirmed(self) -> None:
        """Returns while the lease is known to hold; otherwise waits for its renewal or, cancelled, for its end."""
        while time.monotonic() >= self._valid_until:
            self._renewed.clear()
            await self._renewed.wait()


class LeaseKeeper:
    """Owns the keeper process and every lease in hand."""

    def __init__(self, worker: str, service: str, token: str | None, stall_seconds: float) -> None:
        self._worker = worker
        self._service = service
        self._token = token
        self._stall_seconds = stall_seconds
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task[None] | None = None
        self._ready = asyncio.Event()
        self.held: dict[str, HeldLease] = {}
        self.failed = asyncio.Event()

    async def start(self) -> None:
        """Starts the keeper process. Raises `TimeoutError` if it does not come up."""
        env = os.environ | {"LAYERTAP_KEEPER_SERVICE": self._service}
        if self._token:
            env["LAYERTAP_TOKEN"] = self._token
        self._process = await asyncio.create_subprocess_exec(
            *tied.command(os.getpid(), [sys.executable, "-m", "worker.lease_keeper"]),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=env,
            # Ctrl-C reaches the whole foreground group; the leases must be kept while the worker finishes.
            start_new_session=True,
        )
        self._reader = asyncio.create_task(self._read())
        async with asyncio.timeout(_START_TIMEOUT_S):
            await self._ready.wait()

    async def stop(self) -> None:
        """Ends the keeper process."""
        if self._process is None:
            return
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            async with asyncio.timeout(_STOP_TIMEOUT_S):
                await self._process.wait()
        except TimeoutError:
            self._process.kill()
            await self._process.wait()
        if self._reader is not None:
            await self._reader

    def hold(self, lease: Lease, sent_at: float, phase: str, deadline_seconds: float) -> HeldLease:
        """Takes a fresh lease, claimed by a message sent at `sent_at`, into keeping."""
        valid_until = sent_at + lease.lease_seconds
        held = HeldLease(lease, self._worker, valid_until)
        self.held[lease.task] = held
        self._tell(
            op="hold",
            task=lease.task,
            worker=self._worker,
            generation=lease.generation,
            secret=lease.secret,
            lease_seconds=lease.lease_seconds,
            valid_until=valid_until,
            stall_seconds=self._stall_seconds,
            phase=phase,
            deadline_seconds=deadline_seconds,
        )
        return held

    def phase(self, held: HeldLease, phase: str, deadline_seconds: float, ledger: Path | None = None) -> None:
        """The work entered a phase that may take `deadline_seconds`, or, with a ledger, as long as that advances."""
        held.committing = phase == COMMIT_PHASE
        extra = {} if ledger is None else {"ledger": str(ledger)}
        self._tell(op="phase", task=held.lease.task, phase=phase, deadline_seconds=deadline_seconds, **extra)

    def let_go(self, held: HeldLease) -> None:
        """The work on this lease has ended, one way or another."""
        if self.held.get(held.lease.task) is held:
            del self.held[held.lease.task]
            self._tell(op="drop", task=held.lease.task)

    def in_hand(self) -> list[HeldTask]:
        """What a control poll names."""
        return [HeldTask(task=held.lease.task, generation=held.lease.generation) for held in self.held.values()]

    def _tell(self, **message: Any) -> None:
        if self._process is not None and self._process.stdin is not None and not self.failed.is_set():
            self._process.stdin.write(json.dumps(message).encode() + b"\n")

    async def _read(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            self._event(json.loads(line))
        self.failed.set()
        for held in list(self.held.values()):
            held.drop("the keeper process ended", lost=False)

    def _event(self, event: dict[str, Any]) -> None:
        if event["event"] == "ready":
            self._ready.set()
            return
        held = self.held.get(event["task"])
        if held is None:
            return
        match event["event"]:
            case "renewed":
                held.renewed(event["valid_until"])
            case "refused":
                if not held.committing:
                    logger.warning("lease of %s refused: %s", event["task"], event["reason"])
                held.drop(event["reason"], lost=True)
            case "stuck":
                logger.error("%s makes no progress in phase %s", event["task"], event["phase"])
                held.drop(f"no progress in phase {event['phase']}", lost=False)
