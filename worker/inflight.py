"""How many tokens are in the engine at a time, over all shards in hand: enough that it never starves, and bounded.

A row counts until its states are in the file, so a slow disk holds back the admission of rows and never the forward.
Out of memory halves the bound; it recovers slowly while all goes well.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class InFlight:
    """A budget of `limit` tokens, handed out in the order asked for. A batch larger than it is let in alone."""

    def __init__(self, limit: int) -> None:
        self.full = limit
        self.limit = limit
        self.used = 0
        self._most = 0
        self._admitted: list[tuple[int, float]] = []
        self._turn = asyncio.Lock()
        self._released = asyncio.Event()

    async def acquire(self, tokens: int) -> float:
        """Waits for room and takes it; `release` gives it back. Returns when that was, on the monotonic clock."""
        async with self._turn:
            while self.used and self.used + tokens > self.limit:
                self._released.clear()
                await self._released.wait()
            return self._admit(tokens)

    @asynccontextmanager
    async def alone(self) -> AsyncIterator[None]:
        """Waits until nothing is in flight, and lets nothing in while the block runs, whatever becomes of the bound."""
        async with self._turn:
            while self.used:
                self._released.clear()
                await self._released.wait()
            tokens = self.limit
            since = self._admit(tokens)
            try:
                yield
            finally:
                self.release(tokens, since)

    def release(self, tokens: int, since: float | None = None) -> None:
        """Gives room back: that taken at `since`, as `acquire` said; without it, the oldest of as many tokens."""
        self.used -= tokens
        for entry in self._admitted:
            if entry[0] == tokens and since in (None, entry[1]):
                self._admitted.remove(entry)
                break
        self._released.set()

    def _admit(self, tokens: int) -> float:
        self.used += tokens
        self._most = max(self._most, self.used)
        since = time.monotonic()
        self._admitted.append((tokens, since))
        return since

    def oldest(self) -> float | None:
        """Seconds since the oldest of what is in flight was let in; None with nothing in flight."""
        return time.monotonic() - self._admitted[0][1] if self._admitted else None

    def recent(self) -> int:
        """The most tokens in flight at any moment since the last call: an engine that has just died held them."""
        most, self._most = max(self._most, self.used), self.used
        return most

    def halve(self) -> None:
        """Memory ran out: half as many tokens from now on, but never none."""
        self.limit = max(1, self.limit // 2)

    def recover(self) -> None:
        """Work went well: a tenth of the full bound more, up to all of it."""
        self.limit = min(self.full, self.limit + max(1, self.full // 10))
        self._released.set()
