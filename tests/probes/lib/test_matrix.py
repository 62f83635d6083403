from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from probes.lib import matrix as matrices
from probes.lib.checkpoint import Checkpoint, open_checkpoint
from probes.lib.files import Damaged, Meter, Unreadable
from probes.lib.floats import cast, narrow, same_rows, widen
from probes.lib.matrix import Matrix

from ...support.checkpoints import Raw, bfloat16, from_bfloat16, write_npy, write_safetensors, write_torch

ROWS = np.random.default_rng(0).normal(size=(500, 6)).astype(np.float32)


def opened(path: Path, meter: Meter | None = None) -> Checkpoint:
    return open_checkpoint(str(path), meter or Meter())


def as_type(dtype: str) -> Any:
    return bfloat16(ROWS) if dtype == "bfloat16" else ROWS.astype(dtype)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
@pytest.mark.parametrize("kind", ["safetensors", "torch"])
@pytest.mark.parametrize("chunk", [1, 100, 1 << 25])
def test_rows_on_demand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, kind: str, chunk: int) -> None:
    monkeypatch.setattr(matrices, "CHUNK", chunk)
    monkeypatch.setattr(matrices, "_GAP", 50)
    tensor = as_type(dtype)
    path = write_safetensors(tmp_path, {"w": tensor}) if kind == "safetensors" else write_torch(tmp_path / "x.pt", {"w": tensor})
    exact = from_bfloat16(tensor).reshape(ROWS.shape) if isinstance(tensor, Raw) else tensor
    with opened(path) as checkpoint:
        found = Matrix(checkpoint, "w")
        assert (found.dtype, found.rows, found.columns) == (dtype, 500, 6)
        assert np.array_equal(found.numbers(3, 9), exact[3:9])
        wanted = np.random.default_rng(1).integers(0, 500, 300)
        assert np.array_equal(found.take(wanted), exact[wanted])
        assert found.take(wanted[:0]).shape == (0, 6)
        walked = [widen(bits, dtype) for _, bits in found.chunks()]
        assert np.array_equal(np.concatenate(walked), exact)
        assert next(start for start, _ in found.chunks()) == 0


def test_only_the_rows_asked_for_are_read(tmp_path: Path) -> None:
    wide = np.zeros((1000, 30_000), np.float16)
    meter = Meter()
    with opened(write_safetensors(tmp_path, {"w": wide}), meter) as checkpoint:
        found = Matrix(checkpoint, "w")
        before = meter.bytes
        found.take(np.array([900, 3, 500, 3]))
        assert meter.bytes - before <= 4 * 60_000


@pytest.mark.parametrize("rows", [[-1], [500], [3, 1 << 40]])
def test_rows_that_are_not_there(tmp_path: Path, rows: list[int]) -> None:
    with opened(write_safetensors(tmp_path, {"w": ROWS})) as checkpoint:
        with pytest.raises(Damaged, match="rows"):
            Matrix(checkpoint, "w").take(np.array(rows))
        with pytest.raises(Damaged, match="no rows 499 to 501"):
            Matrix(checkpoint, "w").bits(499, 501)


@pytest.mark.parametrize(
    ("tensor", "reason"),
    [
        (np.zeros(3, np.float32), "not rows and columns"),
        (np.zeros((2, 2, 2), np.float32), "not rows and columns"),
        (np.zeros((2, 2), np.int8), "quantised"),
        (Raw("F8_E4M3", [2, 2], bytes(4)), "quantised"),
    ],
)
def test_what_is_no_matrix_of_floats(tmp_path: Path, tensor: Any, reason: str) -> None:
    with opened(write_safetensors(tmp_path, {"w": tensor})) as checkpoint, pytest.raises((Damaged, Unreadable), match=reason):
        Matrix(checkpoint, "w")


def test_what_cannot_be_read_in_parts(tmp_path: Path) -> None:
    with opened(write_npy(tmp_path, ROWS)) as checkpoint, pytest.raises(Unreadable, match="in parts"):
        Matrix(checkpoint, "d2t")


def test_a_file_that_shrinks(tmp_path: Path) -> None:
    with opened(write_safetensors(tmp_path, {"w": ROWS})) as checkpoint:
        found = Matrix(checkpoint, "w")
        os.truncate(tmp_path / "model.safetensors", 200)
        with pytest.raises(Damaged, match="shorter"):
            found.bits(0, 500)
        with pytest.raises(Damaged, match="shorter"):
            found.take(np.array([400]))


# Casts ---------------------------------------------------------------------------------------------------------------

SPECIAL = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1e-40, 3e38, 65504.0, 65520.0, 1 + 2**-8, 1 + 3 * 2**-8], np.float32)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
def test_casts_are_those_of_torch(dtype: str) -> None:
    numbers = np.concatenate([SPECIAL, ROWS.ravel(), (ROWS * 3e37).ravel(), (ROWS * 1e-42).ravel()])
    theirs = torch.from_numpy(numbers).to(getattr(torch, dtype))
    ours = narrow(numbers, dtype)
    assert np.array_equal(widen(ours, dtype), theirs.double().numpy(), equal_nan=True)
    back: Any = theirs.view(torch.int16).numpy().view(np.uint16) if dtype == "bfloat16" else theirs.numpy()
    finite = np.isfinite(numbers)
    assert (ours[finite] == back[finite]).all()


def test_widening_and_narrowing_again_changes_nothing() -> None:
    every = np.arange(1 << 16, dtype=np.uint16)
    numbers = widen(every, "bfloat16")
    finite = ~np.isnan(numbers)
    assert np.array_equal(narrow(numbers, "bfloat16")[finite], every[finite])
    assert np.array_equal(cast(cast(every, "bfloat16", "float32"), "float32", "bfloat16")[finite], every[finite])


def test_equality_is_of_bits() -> None:
    a = np.array([[0.0, 1], [np.nan, 1], [1, 2], [1, 2]], np.float32)
    b = np.array([[-0.0, 1], [np.nan, 1], [1, 2], [1, 2.0000002]], np.float32)
    assert same_rows(a, b).tolist() == [False, True, True, False]
