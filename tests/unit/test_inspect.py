"""Figures of a pulled job against figures computed the plain way."""

import sys
from pathlib import Path

import numpy as np
import pytest
from fixtures_client import Folder, build

import layertap
from layertap.errors import MissingExtraError
from layertap.inspect import summarize
from layertap.picture import draw


def test_norms_are_those_of_all_tokens_when_they_fit_the_sample(pulled: Folder) -> None:
    summary = summarize(layertap.open(pulled.path))
    states = np.concatenate([row.tensors["hidden_states"] for row in pulled.rows.values()]).astype(np.float64)
    final = np.concatenate([row.tensors["final_hidden_state"] for row in pulled.rows.values()]).astype(np.float64)
    assert [norms.place for norms in summary.norms] == ["2", "5", "8", "final"]
    for norms, vectors in zip(summary.norms, [*states.transpose(1, 0, 2), final], strict=True):
        lengths = np.linalg.norm(vectors, axis=1)
        assert norms.mean == pytest.approx(lengths.mean())
        assert norms.minimum == pytest.approx(lengths.min())
        assert norms.maximum == pytest.approx(lengths.max())
        assert norms.non_finite == 0
    assert summary.sampled_tokens == summary.tokens == len(states)
    masks = np.concatenate([row.tensors["loss_mask"] for row in pulled.rows.values()])
    assert summary.supervised_tokens == masks.sum()


def test_the_sample_is_bounded_and_spread_over_the_job(tmp_path: Path) -> None:
    folder = build(tmp_path / "d", [list(range(100)), list(range(100, 200))])
    summary = summarize(layertap.open(folder.path), sample_tokens=100)
    assert 50 <= summary.sampled_tokens <= 100
    assert summary.tokens == folder.manifest.tokens
    assert len(summary.lengths) == 200


def test_a_sample_smaller_than_a_row_still_has_one(pulled: Folder) -> None:
    assert summarize(layertap.open(pulled.path), sample_tokens=1).sampled_rows == 1


def test_non_finite_values_are_counted_and_left_out_of_the_norms(pulled: Folder) -> None:
    row = layertap.open(pulled.path).by_row_id(4)
    data = bytearray(pulled.shard_paths[0].read_bytes())
    start = bytes(data).index(row.hidden_states.tobytes())
    data[start : start + 4] = b"\x80\x7f\xc0\x7f"
    pulled.shard_paths[0].write_bytes(data)
    summary = summarize(layertap.open(pulled.path))
    assert [norms.non_finite for norms in summary.norms] == [2, 0, 0, 0]
    assert np.isfinite(summary.norms[0].maximum)


def test_an_empty_job_has_a_summary_too(tmp_path: Path) -> None:
    summary = summarize(layertap.open(build(tmp_path / "d", []).path))
    assert (summary.rows, summary.tokens, summary.norms) == (0, 0, [])
    assert summary.length_quantiles() == {}


def test_the_picture_is_a_png(pulled: Folder, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    rows = layertap.open(pulled.path)
    draw(summarize(rows), rows.manifest, tmp_path / "p.png")
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_the_error_says_what_to_install(
    pulled: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    rows = layertap.open(pulled.path)
    with pytest.raises(MissingExtraError, match=r"layertap\[plot\]"):
        draw(summarize(rows), rows.manifest, tmp_path / "p.png")
