"""The reader: right rows, no copies, clear refusals."""

import copy
import multiprocessing
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fixtures_client import Folder, build

import layertap
from layertap.errors import FormatError, MissingExtraError, ShardError
from layertap.reader import Extraction, Row


def _same(row: Row, folder: Folder) -> None:
    wanted = folder.rows[row.row_id].tensors
    assert set(row) == set(wanted)
    for name, array in wanted.items():
        assert row[name].dtype == array.dtype
        np.testing.assert_array_equal(row[name], array)


def test_rows_come_in_ascending_order_of_row_id_whatever_the_shards_order(pulled: Folder) -> None:
    rows = layertap.open(pulled.path)
    assert [row.row_id for row in rows] == sorted(pulled.rows) == rows.row_ids.tolist()
    assert len(rows) == len(pulled.rows)
    for row in rows:
        _same(row, pulled)


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
@pytest.mark.parametrize("with_final", [True, False])
def test_every_dtype_reads_back_exactly(tmp_path: Path, dtype: str, with_final: bool) -> None:
    folder = build(tmp_path / "d", [[0, 1, 2]], dtype=dtype, with_final=with_final)
    rows = layertap.open(folder.path)
    for row in rows:
        _same(row, folder)
        assert (row.final_hidden_state is not None) == with_final


def test_shapes_and_dtypes_are_the_promised_ones(pulled: Folder) -> None:
    row = layertap.open(pulled.path).by_row_id(9)
    s = 3 + 9 % 7
    assert (row.input_ids.shape, row.input_ids.dtype) == ((s,), np.int64)
    assert (row.loss_mask.shape, row.loss_mask.dtype) == ((s,), np.uint8)
    assert row.hidden_states.shape == (s, 3, 16)
    assert row.final_hidden_state is not None
    assert row.final_hidden_state.shape == (s, 16)
    assert row.hidden_states.dtype.name == "bfloat16"


def test_a_boundary_is_named_by_its_number(pulled: Folder) -> None:
    row = layertap.open(pulled.path)[0]
    np.testing.assert_array_equal(row.boundary(5), row["hidden_states"][:, 1])
    with pytest.raises(KeyError, match="2, 5, 8"):
        row.boundary(3)


def test_positions_count_from_either_end_and_take_numpy_integers(pulled: Folder) -> None:
    rows = layertap.open(pulled.path)
    assert rows[-1].row_id == 31
    assert rows[np.int64(0)].row_id == 0
    for outside in (len(rows), -len(rows) - 1):
        with pytest.raises(IndexError, match="8 rows"):
            rows[outside]


def test_a_row_that_is_not_there_says_where_to_look(pulled: Folder) -> None:
    rows = layertap.open(pulled.path)
    for absent in (1, 32, -1):
        with pytest.raises(KeyError, match="layertap errors job_01TEST"):
            rows.by_row_id(absent)
    with pytest.raises(KeyError, match="hidden_states"):
        rows[0]["hidden"]


def test_arrays_are_views_on_the_map_and_read_only(pulled: Folder) -> None:
    rows = layertap.open(pulled.path)
    row = rows.by_row_id(4)
    again = rows.by_row_id(4)
    for name, array in row.items():
        assert not array.flags.owndata
        assert np.shares_memory(array, again[name])
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1


def test_torch_tensors_share_the_memory_and_never_reach_the_file(pulled: Folder) -> None:
    torch = pytest.importorskip("torch")
    before = pulled.shard_paths[0].read_bytes()
    row = layertap.open(pulled.path).by_row_id(4)
    tensors = row.torch()
    assert tensors["hidden_states"].dtype is torch.bfloat16
    assert tensors["input_ids"].dtype is torch.int64
    assert tensors["loss_mask"].dtype is torch.uint8
    np.testing.assert_array_equal(tensors["hidden_states"].float().numpy(), row.hidden_states.astype(np.float32))
    tensors["input_ids"][0] = -5
    assert row.input_ids[0] == -5
    assert pulled.shard_paths[0].read_bytes() == before


def test_without_torch_the_error_says_so(pulled: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(MissingExtraError, match="torch is not installed"):
        layertap.open(pulled.path)[0].torch()


def test_open_shards_are_bounded_and_rows_outlive_them(tmp_path: Path) -> None:
    folder = build(tmp_path / "d", [[i] for i in range(12)])
    rows = Extraction(folder.path, max_open=2)
    before = len(os.listdir("/proc/self/fd"))
    first = rows[0]
    for row in rows:
        _same(row, folder)
    del row
    # Two shards in the cache, and that of `first`, which a live row keeps.
    assert len(os.listdir("/proc/self/fd")) <= before + 3
    _same(first, folder)


def test_opening_reads_the_manifest_only(pulled: Folder) -> None:
    for path in pulled.shard_paths:
        path.unlink()
    rows = layertap.open(pulled.path)
    assert len(rows) == 8
    assert rows.manifest.job == "job_01TEST"


def test_a_missing_shard_is_named_with_the_remedy(pulled: Folder) -> None:
    pulled.shard_paths[2].unlink()
    with pytest.raises(
        ShardError, match=r"shard-00002\.g1\.safetensors is missing; run `layertap pull job_01TEST"
    ) as e:
        layertap.open(pulled.path)[0]
    assert e.value.files == ("shard-00002.g1.safetensors",)
    assert pickle.loads(pickle.dumps(e.value)).files == e.value.files


def test_a_short_shard_is_refused_before_it_is_mapped(pulled: Folder) -> None:
    with pulled.shard_paths[1].open("r+b") as file:
        file.truncate(5000)
    with pytest.raises(ShardError, match=r"shard-00001.*5,000 bytes instead of"):
        layertap.open(pulled.path).by_row_id(0)


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"\xff" * 8 + data[8:],
        lambda data: (2**40).to_bytes(8, "little") + data[8:],
        lambda data: data[:8] + b"[" + data[9:],
        lambda data: data.replace(b'"U8"', b'"U9"', 1),
        lambda data: data.replace(b'"input_ids"', b'"input_idz"', 1),
        lambda data: data.replace(b'"data_offsets":[0,', b'"data_offsets":[9,', 1),
    ],
)
def test_a_damaged_header_is_a_shard_error(pulled: Folder, damage: Any) -> None:
    path = pulled.shard_paths[0]
    data = path.read_bytes()
    broken = damage(data)
    assert broken != data
    assert len(broken) == len(data)
    path.write_bytes(broken)
    with pytest.raises(ShardError, match=r"shard-00000.*again"):
        layertap.open(pulled.path)[0]


def test_a_row_in_two_shards_is_refused(tmp_path: Path) -> None:
    folder = build(tmp_path / "d", [[0, 1], [1, 2]])
    with pytest.raises(ShardError, match="repeats row 1"):
        layertap.open(folder.path)[0]


def test_an_unknown_format_version_is_refused(pulled: Folder) -> None:
    pulled.rewrite_manifest(format_version=2)
    with pytest.raises(FormatError, match="format_version 2"):
        layertap.open(pulled.path)


def test_fields_of_a_newer_service_are_ignored(pulled: Folder) -> None:
    pulled.rewrite_manifest(colour="green")
    assert len(layertap.open(pulled.path)) == 8


@pytest.mark.parametrize("name", ["../shard", "/etc/passwd", "a/b", "", ".hidden", "a\nb", "manifest.json"])
def test_a_file_name_that_is_not_plain_is_refused(pulled: Folder, name: str) -> None:
    shards = [shard.model_dump() | {"file": name} for shard in pulled.manifest.shards[:1]]
    pulled.rewrite_manifest(shards=shards)
    with pytest.raises(FormatError, match="not a plain shard name"):
        layertap.open(pulled.path)


def test_a_folder_without_manifest_says_that_the_pull_did_not_finish(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="layertap pull JOB"):
        layertap.open(tmp_path)


@pytest.mark.parametrize("text", ["", "[]", "{", '{"format_version": 1}'])
def test_a_broken_manifest_is_a_format_error(pulled: Folder, text: str) -> None:
    (pulled.path / "manifest.json").write_text(text)
    with pytest.raises(FormatError, match=r"manifest\.json"):
        layertap.open(pulled.path)


def test_a_job_without_rows_is_an_empty_sequence(tmp_path: Path) -> None:
    rows = layertap.open(build(tmp_path / "d", [], complete=False).path)
    assert len(rows) == 0
    assert list(rows) == []
    assert not rows.complete
    rows.verify()


def test_verify_names_every_wrong_shard(pulled: Folder) -> None:
    rows = layertap.open(pulled.path)
    seen: list[int] = []
    rows.verify(seen.append)
    assert seen[-1] == sum(shard.bytes for shard in pulled.manifest.shards)
    flipped = bytearray(pulled.shard_paths[0].read_bytes())
    flipped[-1] ^= 1
    pulled.shard_paths[0].write_bytes(flipped)
    pulled.shard_paths[2].unlink()
    with pytest.raises(ShardError, match="2 of 3 shards") as e:
        rows.verify()
    assert e.value.files == ("shard-00000.g1.safetensors", "shard-00002.g1.safetensors")


def test_a_pickled_extraction_opens_its_own_files(pulled: Folder) -> None:
    rows = layertap.open(pulled.path)
    assert rows[0].row_id == 0
    for twin in (pickle.loads(pickle.dumps(rows)), copy.copy(rows)):
        _same(twin[3], pulled)


def _read_in_child(rows: Extraction, queue: Any) -> None:
    queue.put([float(row.hidden_states.astype(np.float32).sum()) for row in rows])


@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork.*:DeprecationWarning")
def test_child_processes_read_the_same_rows(pulled: Folder, method: str) -> None:
    rows = layertap.open(pulled.path)
    mine = [float(row.hidden_states.astype(np.float32).sum()) for row in rows]
    context = multiprocessing.get_context(method)
    queue = context.SimpleQueue()
    child = context.Process(target=_read_in_child, args=(rows, queue))
    child.start()
    child.join(60)
    assert child.exitcode == 0
    assert queue.get() == mine


class Tensors:
    """What a trainer wraps around the reader."""

    def __init__(self, rows: Extraction) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.rows[index].torch()


def _alone(batch: list[dict[str, Any]]) -> dict[str, Any]:
    return batch[0]


def test_a_torch_data_loader_with_workers_reads_every_row(pulled: Folder) -> None:
    torch_data = pytest.importorskip("torch.utils.data")
    rows = layertap.open(pulled.path)
    loader = torch_data.DataLoader(Tensors(rows), batch_size=1, num_workers=2, collate_fn=_alone)
    loaded = list(loader)
    assert len(loaded) == len(rows)
    for tensors, row in zip(loaded, rows, strict=True):
        np.testing.assert_array_equal(tensors["hidden_states"].float().numpy(), row.hidden_states.astype(np.float32))


def test_importing_layertap_loads_neither_torch_nor_the_command_line() -> None:
    heavy = "{'torch', 'typer', 'rich', 'httpx', 'pydantic', 'numpy'}"
    code = f"import sys, layertap; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def test_reading_needs_no_torch(pulled: Folder) -> None:
    code = "import sys, layertap; print(layertap.open(sys.argv[1])[0].hidden_states.sum(), 'torch' in sys.modules)"
    command = [sys.executable, "-c", code, str(pulled.path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split()[-1] == "False"
