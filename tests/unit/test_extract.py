"""The layout of a shard's file: one at a time, at no cost to a lease that waits, and gone when the work is given up."""

import asyncio
import errno
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from fixtures_service_process import until
from leases import shard_lease

from layertap.layout import ShardLayout
from layertap.schemas.shards import Pins
from layertap.schemas.tasks import ShardSpec
from worker import extract
from worker.extract import Extraction
from worker.leases import HeldLease
from worker.prefill import StorageWriteError
from worker.shard_prefill import ShardPrefill
from worker.shard_writer import partial_path

FILE = "shard-00000.g1.safetensors"
PINS = Pins(model_hash="-", tokenizer_hash="-", chat_template_hash=None, engine_version="0.5.23", dtype="BF16")


class Keeper:
    """Notes the phases that it is told, with their deadlines."""

    def __init__(self) -> None:
        self.told: list[tuple[str, str, float]] = []

    def phase(self, held: HeldLease, phase: str, seconds: float, ledger: Path | None = None) -> None:
        self.told.append((held.lease.task, phase, seconds))


@pytest.fixture
def extraction(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Extraction:
    """Work on shards of one row, whose tokens and layout are made up."""
    tokens = SimpleNamespace(lengths=np.array([4]))
    monkeypatch.setattr(extract.TokenRows, "open", lambda folder: tokens)
    monkeypatch.setattr(extract, "_load_rows", lambda tokens, wanted: (None, []))
    layout = ShardLayout.of([4], [1], 8, "BF16", True)
    monkeypatch.setattr(Extraction, "_layout", lambda self, lease, spec, lengths: layout)
    nothing = cast(Any, None)
    return Extraction(nothing, cast(Any, Keeper()), nothing, nothing, tmp_path, 1.0, asyncio.Lock())


def _held(task: str = "task_a") -> HeldLease:
    spec = ShardSpec(
        index=0, file=FILE, bytes=1, first_row=0, rows=1, tokens=4, tokens_dir="t", dataset_sha256="-", pins=PINS
    )
    return HeldLease(shard_lease(task=task, shard=spec), "wrk_a", time.monotonic() + 600)


def _lays_out(then: Callable[[], None]) -> Callable[..., Path]:
    def lay_out(final: Path, layout: object, rows: object) -> Path:
        partial = partial_path(final)
        partial.write_bytes(b"reserved")
        then()
        return partial

    return lay_out


def test_a_layout_without_room_leaves_none_of_its_bytes(
    extraction: Extraction, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full() -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(extract.shard_writer, "lay_out", _lays_out(full))
    with pytest.raises(OSError, match="No space left"):
        asyncio.run(extraction.run(_held()))
    assert list(tmp_path.iterdir()) == []


def test_a_lease_dropped_during_its_layout_leaves_no_file(
    extraction: Extraction, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def wait() -> None:
        begun.set()
        assert go_on.wait(60)
        partial_path(tmp_path / FILE).write_bytes(b"more")

    monkeypatch.setattr(extract.shard_writer, "lay_out", _lays_out(wait))

    async def scenario() -> None:
        work = asyncio.create_task(extraction.run(_held()))
        assert await asyncio.to_thread(begun.wait, 60)
        work.cancel()
        await asyncio.wait({work}, timeout=60)
        assert work.cancelled()
        go_on.set()
        await asyncio.to_thread(until, lambda: not list(tmp_path.iterdir()))

    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_waiting_for_its_turn_to_lay_out_is_no_part_of_a_layouts_deadline(extraction: Extraction) -> None:
    async def scenario() -> None:
        async with extraction.layouts:
            work = asyncio.create_task(extraction.run(_held()))
            await asyncio.sleep(0.1)
            _, phase, seconds = cast(Any, extraction.keeper).told[-1]
            assert phase != "layout"
            # As long as others may take, each of them inside its own deadline.
            assert seconds >= 4 * extract.LAYOUT_SECONDS
            work.cancel()
            await asyncio.wait({work})

    asyncio.run(scenario())


def test_a_file_whose_removal_hangs_holds_nothing_up(
    extraction: Extraction, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = threading.Event()
    unlink = Path.unlink

    def hang(path: Path, missing_ok: bool = False) -> None:
        # The kernel holds a file's removal up while a write to it does not come back.
        assert go_on.wait(60)
        unlink(path, missing_ok)

    async def fail(work: ShardPrefill) -> None:
        raise StorageWriteError(errno.ETIMEDOUT)

    monkeypatch.setattr(extract, "_REMOVE_S", 0.05)
    monkeypatch.setattr(ShardPrefill, "run", fail)
    monkeypatch.setattr(extract.shard_writer, "lay_out", _lays_out(lambda: None))
    monkeypatch.setattr(Path, "unlink", hang)

    async def scenario() -> None:
        with pytest.raises(StorageWriteError):
            await extraction.run(_held())
        assert partial_path(tmp_path / FILE).exists()
        go_on.set()
        await asyncio.to_thread(until, lambda: not list(tmp_path.iterdir()))

    asyncio.run(asyncio.wait_for(scenario(), 60))
