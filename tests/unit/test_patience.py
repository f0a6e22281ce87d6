"""Calls that hang: nobody waits for them longer than said, and nothing else stands still meanwhile."""

import asyncio
import subprocess
import sys
import threading
import time

import pytest

from worker.patience import Newest, within


def test_a_call_that_comes_back_gives_what_it_returns_or_raises() -> None:
    assert asyncio.run(within(60, divmod, 7, 2)) == (3, 1)
    with pytest.raises(ZeroDivisionError):
        asyncio.run(within(60, divmod, 7, 0))


def test_a_call_that_hangs_is_given_up_in_time(gate: threading.Event) -> None:
    with pytest.raises(TimeoutError, match=r"no answer within 0\.05 s"):
        asyncio.run(within(0.05, gate.wait))


def test_a_call_that_hangs_does_not_keep_the_process() -> None:
    code = """
import asyncio, time
from worker.patience import within
try:
    asyncio.run(within(0.05, time.sleep, 3600))
except TimeoutError:
    print("given up")
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert run.stdout == "given up\n"


def test_what_was_found_stands_while_a_call_hangs_and_is_asked_no_second_time(gate: threading.Event) -> None:
    calls: list[float] = []

    def look() -> int:
        calls.append(time.monotonic())
        if len(calls) == 2:
            gate.wait(60)
        return len(calls)

    async def scenario() -> list[int]:
        newest = Newest(look, 0, 0.05)
        found = [await newest.find() for _ in range(3)]
        assert len(calls) == 2
        gate.set()
        await asyncio.sleep(0.1)
        return [*found, await newest.find(), await newest.find()]

    assert asyncio.run(scenario()) == [1, 1, 1, 2, 3]


def test_what_was_found_stands_where_a_call_fails(caplog: pytest.LogCaptureFixture) -> None:
    answers = iter([1, OSError("full"), OSError("full"), 4])

    def look() -> int:
        answer = next(answers)
        if isinstance(answer, OSError):
            raise answer
        return answer

    async def scenario() -> list[int]:
        newest = Newest(look, 0, 60)
        return [await newest.find() for _ in range(4)]

    assert asyncio.run(scenario()) == [1, 1, 1, 4]
    # Said once, not at every look.
    assert len([record for record in caplog.records if "full" in record.getMessage()]) == 1


def test_a_machine_without_a_thread_to_spare_is_an_error_of_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    async def scenario() -> None:
        newest = Newest(lambda: 1, 0, 60)
        assert await newest.find() == 1
        monkeypatch.setattr(threading.Thread, "start", start)
        with pytest.raises(OSError, match="can't start new thread"):
            await within(60, divmod, 7, 2)
        assert await newest.find() == 1

    asyncio.run(scenario())
