"""The shard file on the worker's side: laid out, compacted, sealed, and read right by the safetensors library."""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from layertap.layout import ShardLayout
from worker import shard_writer
from worker.capture.files import pwrite_all
from worker.shard_writer import ShardRows

H, K = 8, 3


def _rows(lengths: list[int]) -> ShardRows:
    total = sum(lengths)
    return ShardRows(
        np.arange(total, dtype=np.int32) + 5,
        (np.arange(total) % 2).astype(np.uint8),
        np.arange(len(lengths), dtype=np.int64) * 10,
    )


def _fill(path: Path, layout: ShardLayout) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Writes random states the way the capture does; returns them."""
    hidden = torch.randn(layout.tokens, K, H).to(torch.bfloat16)
    final = torch.randn(layout.tokens, H).to(torch.bfloat16) if layout.with_final else None
    fd = os.open(path, os.O_RDWR)
    os.pwrite(fd, hidden.view(torch.uint8).numpy().tobytes(), layout.tensors["hidden_states"].start)
    if final is not None:
        os.pwrite(fd, final.view(torch.uint8).numpy().tobytes(), layout.tensors["final_hidden_state"].start)
    os.close(fd)
    return hidden, final


@settings(deadline=None, max_examples=40)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=12),
    with_final=st.booleans(),
    data=st.data(),
)
def test_a_compacted_shard_holds_the_other_rows_unchanged(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], with_final: bool, data: st.DataObject
) -> None:
    failed = data.draw(st.sets(st.integers(0, len(lengths) - 1), max_size=len(lengths) - 1))
    final_path = tmp_path_factory.mktemp("shard") / "shard-00000.g1.safetensors"
    layout, rows = ShardLayout.of(lengths, [0, 1, 2], H, "BF16", with_final, {"layertap": "{}"}), _rows(lengths)
    part = shard_writer.lay_out(final_path, layout, rows)
    assert part.stat().st_size == layout.nbytes
    hidden, final = _fill(part, layout)
    if failed:
        layout = shard_writer.compact(part, layout, rows, failed)
    digest = shard_writer.seal(part, final_path)

    keep = [i for i in range(len(lengths)) if i not in failed]
    token_kept = np.repeat([i in keep for i in range(len(lengths))], lengths)
    read = load_file(final_path)
    assert torch.equal(read["hidden_states"], hidden[torch.from_numpy(token_kept)])
    if final is not None:
        assert torch.equal(read["final_hidden_state"], final[torch.from_numpy(token_kept)])
    else:
        assert "final_hidden_state" not in read
    assert read["input_ids"].tolist() == rows.input_ids[token_kept].tolist()
    assert read["loss_mask"].tolist() == rows.loss_mask[token_kept].tolist()
    assert read["row_ids"].tolist() == rows.row_ids[keep].tolist()
    assert read["offsets"].diff().tolist() == [lengths[i] for i in keep]
    assert final_path.stat().st_size == layout.nbytes
    assert digest == hashlib.sha256(final_path.read_bytes()).hexdigest()
    assert not part.exists()


def test_a_shard_without_room_is_refused_before_any_prefill(tmp_path: Path) -> None:
    layout = ShardLayout.of([1 << 40], [0, 1, 2], H, "BF16", True)
    with pytest.raises(OSError, match=r"No space left|File too large"):
        shard_writer.lay_out(tmp_path / "shard-00000.g1.safetensors", layout, _rows([1]))


def test_a_write_that_the_kernel_cuts_short_goes_on_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: whole(fd, data[:3], offset))
    path = tmp_path / "file"
    path.write_bytes(b"." * 14)
    with path.open("r+b") as file:
        pwrite_all(file.fileno(), b"0123456", 2)
        pwrite_all(file.fileno(), memoryview(b"abcde"), 9)
    assert path.read_bytes() == b"..0123456abcde"


_RESIDENT = """
import os, sys, threading
from pathlib import Path
from worker import shard_writer

folder, all_there = Path(sys.argv[1]), threading.Barrier(13)

def seal(i):
    for round in range(3):
        part = folder / f"{i}.part"
        part.touch()
        os.truncate(part, 20 << 20)
        shard_writer.seal(part, folder / str(i))
    all_there.wait(100)
    all_there.wait(100)

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

before = resident()
for i in range(12):
    threading.Thread(target=seal, args=(i,)).start()
all_there.wait(100)
print(resident() - before)
all_there.wait(100)
"""


def test_a_thread_that_has_sealed_a_shard_keeps_no_memory_of_it(tmp_path: Path) -> None:
    argv = [sys.executable, "-c", _RESIDENT, str(tmp_path)]
    grown = int(subprocess.run(argv, check=True, capture_output=True, timeout=120).stdout)
    assert grown < 24 << 20, f"{grown >> 20} MiB"
