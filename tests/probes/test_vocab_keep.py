from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from probes import vocab_keep
from probes.lib import npy
from probes.vocab_keep import Params, Result
from remote_diag.findings import Finding, status
from remote_diag.paths import shipped_probes
from remote_diag.probe import load
from remote_diag.testing import Leave, RecordingContext

from ..support.checkpoints import bfloat16, mask, offsets, write_npy, write_npz, write_safetensors
from ..support.cli import rdiag

V, D = 500, 60
RANDOM = np.random.default_rng(3)
A = np.sort(RANDOM.choice(V, D, replace=False)).astype(np.int64)
B = np.sort(np.concatenate([A[:-4], np.setdiff1d(np.arange(V), A)[-4:]])).astype(np.int64)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    content: dict[str, Any] = {"d2t": offsets(A), "t2d": mask(A, V), "lm_head.weight": bfloat16(np.ones((D, 4)))}
    return write_safetensors(tmp_path / "models" / "drafter", content, vocab_size=V, draft_vocab_size=D)


def run(tmp_path: Path, source: Path, **more: Any) -> tuple[Result, list[Finding]]:
    context = RecordingContext(tmp_path / "scratch")
    result = vocab_keep.run(Params(**{"source": str(source), "out": str(tmp_path / "kept"), **more}), context)
    load(shipped_probes() / "vocab_keep.py").result_adapter.validate_json(
        json.dumps(dataclasses.asdict(result), allow_nan=False), strict=True
    )
    return result, context.findings


def test_what_numpy_reads_back(tmp_path: Path, source: Path) -> None:
    result, findings = run(tmp_path, source)
    d2t, t2d = np.load(tmp_path / "kept" / "d2t.npy"), np.load(tmp_path / "kept" / "t2d.npy")
    assert (d2t.dtype, t2d.dtype) == (np.int64, np.bool_)
    assert np.array_equal(d2t + np.arange(D), A)
    assert np.array_equal(t2d, mask(A, V))
    assert sorted(os.listdir(tmp_path / "kept")) == sorted(result.files_written)
    assert status(findings) == "ok"
    assert (result.draft_vocab_size, result.target_vocab_size, result.ascending, result.cheaper) == (D, V, True, None)
    assert str(tmp_path / "kept" / "d2t.npy") in (findings[0].action or "")


def test_t2d_is_made_where_there_is_none(tmp_path: Path) -> None:
    unsorted = A[::-1].copy()
    write_safetensors(tmp_path / "src", {"d2t": offsets(unsorted)}, vocab_size=V, draft_vocab_size=D)
    result, findings = run(tmp_path, tmp_path / "src")
    assert np.array_equal(np.load(tmp_path / "kept" / "t2d.npy"), mask(A, V))
    assert result.ascending is False
    assert {finding.code: finding.level for finding in findings}["rows-not-ascending"] == "degraded"


@pytest.mark.parametrize(("weight", "cheaper"), [(1, True), (300, False)])
def test_what_it_costs(tmp_path: Path, source: Path, weight: int, cheaper: bool) -> None:
    counts = np.zeros(V, np.int64)
    counts[A], counts[np.setdiff1d(B, A)] = 100, weight
    write_npz(tmp_path / "b.npz", d2t=offsets(B), t2d=mask(B, V), freq=counts)
    result, _ = run(tmp_path, source, mapping=str(tmp_path / "b.npz"))
    total = counts.sum()
    assert result.coverage_kept == pytest.approx(counts[A].sum() / total)
    assert result.coverage_other == pytest.approx(counts[B].sum() / total)
    assert result.coverage_lost == pytest.approx((counts[B].sum() - counts[A].sum()) / total)
    assert result.cheaper is cheaper
    assert result.rows_kept == int((A != B).sum())
    assert result.counts_name == "freq"


def test_what_would_override_it(tmp_path: Path, source: Path) -> None:
    write_npy(source, offsets(B), mask(B, V))
    write_npy(tmp_path / "data" / "same", offsets(A), mask(A, V))
    (tmp_path / "train" / "cache" / "vocab_mapping").mkdir(parents=True)
    (tmp_path / "train" / "cache" / "vocab_mapping" / "0123.pt").write_bytes(b"broken")
    result, findings = run(tmp_path, source, look_in=(str(tmp_path / "data" / "same"), str(tmp_path / "train")))
    found = {Path(cache.path).relative_to(tmp_path).as_posix(): cache.same for cache in result.caches}
    assert found == {
        "models/drafter/d2t.npy": False, "data/same/d2t.npy": True, "train/cache/vocab_mapping/0123.pt": None,
    }  # fmt: skip
    told = [(finding.level, finding.subject) for finding in findings if finding.code == "mapping-would-override"]
    assert told == [
        ("degraded", str(source / "d2t.npy")), ("unknown", str(tmp_path / "train" / "cache" / "vocab_mapping" / "0123.pt")),
    ]  # fmt: skip


def test_refusals_leave_nothing(tmp_path: Path, source: Path) -> None:
    write_npy(tmp_path / "other", offsets(B), mask(B, V + 1))
    with pytest.raises(Leave, match="a target of 501 tokens"):
        run(tmp_path, source, mapping=str(tmp_path / "other"))
    write_npy(tmp_path / "bad", offsets(A), mask(B, V))
    with pytest.raises(Leave, match="stand for different tokens"):
        run(tmp_path, tmp_path / "bad")
    write_npy(tmp_path / "low", np.arange(50) * 2)
    with pytest.raises(Leave, match=r"ambiguous|how many tokens"):
        run(tmp_path, tmp_path / "low")
    assert not (tmp_path / "kept").exists()
    (tmp_path / "kept").mkdir()
    with pytest.raises(Leave, match="exists already"):
        run(tmp_path, source)


@pytest.mark.parametrize("bad", [{"source": ""}, {"out": "a\0"}, {"mapping": ""}, {"look_in": ("",)}])
def test_parameters_that_cannot_be(bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="must be"):
        Params(**{"source": "s", "out": "o", **bad})


@pytest.mark.parametrize("shape", [(0,), (1,), (163_840,), (3, 4), (10**18,)])
@pytest.mark.parametrize("dtype", ["<i8", "|b1", "<f4"])
def test_headers_are_those_of_numpy(shape: tuple[int, ...], dtype: str) -> None:
    import io

    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(file, {"descr": dtype, "fortran_order": False, "shape": shape})
    header = npy.make_header(dtype, shape)
    assert len(header) % 64 == 0
    # numpy may leave room for the array to grow; the padding behind the dict says nothing.
    assert header[10:].split(b"}")[0] == file.getvalue()[10:].split(b"}")[0]
    assert npy.read_header(lambda offset, count: header[offset : offset + count]).shape == shape


def test_the_command(tmp_path: Path, source: Path) -> None:
    write_npy(tmp_path / "b", offsets(B), mask(B, V))
    arguments = ("vocab-keep", str(source), "--mapping", str(tmp_path / "b"), "--out")
    ran = rdiag(*arguments, str(tmp_path / "kept"), home=tmp_path)
    assert (ran.code, ran.err) == (0, "")
    assert ran.out.splitlines()[0] == "local: vocab-keep: ok - the mapping of 60 rows is written"
    ran = rdiag(*arguments, str(tmp_path / "more"), "--look-in", str(tmp_path / "b"), "--json", home=tmp_path)
    assert (ran.code, [cache["same"] for cache in ran.json["result"]["caches"]]) == (1, [False])
