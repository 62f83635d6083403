from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from probes.lib.checkpoint import Checkpoint, open_checkpoint
from probes.lib.files import Damaged, Meter, Unreadable

from ...support.checkpoints import (
    Raw,
    bfloat16,
    from_bfloat16,
    safetensors,
    write_npy,
    write_npz,
    write_safetensors,
    write_sharded,
)

D2T = np.array([3, 3, 5])
T2D = np.arange(9) > 5
BOTH: dict[str, Any] = {"d2t": D2T, "t2d": T2D}


def opened(path: Path | str) -> Checkpoint:
    return open_checkpoint(str(path), Meter())


def make_single(folder: Path) -> Path:
    return write_safetensors(folder, BOTH)


def make_single_file(folder: Path) -> Path:
    return write_safetensors(folder, BOTH, name="drafter.safetensors") / "drafter.safetensors"


def make_other_name(folder: Path) -> Path:
    return write_safetensors(folder, BOTH, name="drafter.safetensors")


def make_blob(folder: Path) -> Path:
    return write_safetensors(folder, BOTH, name="0a1b2c") / "0a1b2c"


def make_sharded(folder: Path) -> Path:
    return write_sharded(folder, [{"w": D2T}, {"d2t": D2T}, {"t2d": T2D}])


def make_index(folder: Path) -> Path:
    return make_sharded(folder) / "model.safetensors.index.json"


def make_npy(folder: Path) -> Path:
    return write_npy(folder, D2T, T2D)


def make_npy_file(folder: Path) -> Path:
    return write_npy(folder, D2T, T2D) / "d2t.npy"


def make_sized_npy(folder: Path) -> Path:
    write_npy(folder, D2T, T2D)
    for name in ("d2t", "t2d"):
        (folder / f"{name}.npy").rename(folder / f"{name}-32000.npy")
    return folder


def make_npz(folder: Path) -> Path:
    return write_npz(folder / "m.npz", **BOTH)


def make_stored_npz(folder: Path) -> Path:
    return write_npz(folder / "m.npz", compressed=False, **BOTH)


def make_npz_folder(folder: Path) -> Path:
    return make_npz(folder).parent


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (make_single, "safetensors"),
        (make_single_file, "safetensors"),
        (make_other_name, "safetensors"),
        (make_blob, "safetensors"),
        (make_sharded, "safetensors-sharded"),
        (make_index, "safetensors-sharded"),
        (make_npy, "npy"),
        (make_npy_file, "npy"),
        (make_sized_npy, "npy"),
        (make_npz, "npz"),
        (make_stored_npz, "npz"),
        (make_npz_folder, "npz"),
    ],
)
def test_every_kind_gives_the_same_tensors(tmp_path: Path, make: Callable[[Path], Path], kind: str) -> None:
    with opened(make(tmp_path / "c")) as checkpoint:
        assert checkpoint.kind == kind
        assert checkpoint.reason
        assert {"d2t", "t2d"} <= set(checkpoint.names())
        for name, array in BOTH.items():
            entry = checkpoint.entry(name)
            assert (entry.dtype, entry.shape) == (array.dtype.name, array.shape)
            read = checkpoint.read(name)
            assert read.dtype == array.dtype
            assert np.array_equal(read, array)
        assert Path(checkpoint.folder) == tmp_path / "c"


def test_files_are_closed(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for make in (make_single, make_sharded, make_npy, make_npz):
        with opened(make(tmp_path / make.__name__)) as checkpoint:
            checkpoint.read("d2t")
            assert len(os.listdir("/proc/self/fd")) > before
        assert len(os.listdir("/proc/self/fd")) == before


def test_files_are_closed_when_opening_fails(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for name in ("x.safetensors", "x.npz"):
        (tmp_path / name).write_bytes(b"not what its name says, by far")
        with pytest.raises(Damaged):
            opened(tmp_path / name)
    write_npy(tmp_path / "pair", D2T)
    (tmp_path / "pair" / "t2d.npy").symlink_to("missing")
    with pytest.raises(Unreadable):
        opened(tmp_path / "pair")
    assert len(os.listdir("/proc/self/fd")) == before


def test_only_the_shards_asked_for_are_opened(tmp_path: Path) -> None:
    folder = make_sharded(tmp_path / "c")
    next(folder.glob("model-00001*")).unlink()
    meter = Meter()
    with open_checkpoint(str(folder), meter) as checkpoint:
        assert checkpoint.peek("d2t") is None
        checkpoint.read("d2t")
        assert checkpoint.peek("d2t") is not None
        assert checkpoint.peek("t2d") is None
    assert [Path(file).name for file in meter.files] == [
        "model.safetensors.index.json",
        "model-00002-of-00003.safetensors",
    ]


def test_a_whole_file_comes_before_an_index(tmp_path: Path) -> None:
    folder = make_sharded(tmp_path / "c")
    write_safetensors(folder, {"d2t": D2T + 1})
    with opened(folder) as checkpoint:
        assert checkpoint.kind == "safetensors"
        assert np.array_equal(checkpoint.read("d2t"), D2T + 1)


def test_links_of_a_download_cache(tmp_path: Path) -> None:
    blobs = write_safetensors(tmp_path / "blobs", BOTH, name="abc123")
    snapshot = tmp_path / "snapshots" / "1"
    snapshot.mkdir(parents=True)
    (snapshot / "model.safetensors").symlink_to(os.path.relpath(blobs / "abc123", snapshot))
    with opened(snapshot) as checkpoint:
        assert np.array_equal(checkpoint.read("d2t"), D2T)


def test_bfloat16_is_read_exactly(tmp_path: Path) -> None:
    raw = bfloat16(np.array([1.0, -2.5, 131_072.0, 257.0, 0.0]))
    with opened(write_safetensors(tmp_path, {"x": raw})) as checkpoint:
        assert checkpoint.entry("x").dtype == "bfloat16"
        assert np.array_equal(checkpoint.read("x"), from_bfloat16(raw))
        assert checkpoint.read("x").tolist() == [1.0, -2.5, 131_072.0, 256.0, 0.0]


def test_a_type_that_numpy_lacks_is_refused_when_read(tmp_path: Path) -> None:
    with opened(write_safetensors(tmp_path, {"x": Raw("F8_E4M3", [4], b"1234"), "d2t": D2T})) as checkpoint:
        assert checkpoint.entry("x").shape == (4,)
        assert np.array_equal(checkpoint.read("d2t"), D2T)
        with pytest.raises(Unreadable, match="F8_E4M3"):
            checkpoint.read("x")


def test_other_byte_and_element_orders(tmp_path: Path) -> None:
    matrix = np.arange(6, dtype=">i4").reshape(2, 3)
    write_npz(tmp_path / "m.npz", big=D2T.astype(">i8"), f=np.asfortranarray(matrix), c=matrix)
    with opened(tmp_path / "m.npz") as checkpoint:
        assert np.array_equal(checkpoint.read("big"), D2T)
        assert checkpoint.read("big").dtype == np.dtype("i8")
        assert np.array_equal(checkpoint.read("f"), matrix)
        assert np.array_equal(checkpoint.read("c"), matrix)


def test_truth_values_are_zero_or_one(tmp_path: Path) -> None:
    with opened(write_safetensors(tmp_path, {"t2d": Raw("BOOL", [3], b"\x00\x02\x01")})) as checkpoint, pytest.raises(
        Damaged, match="other than 0 and 1"
    ):
        checkpoint.read("t2d")


@pytest.mark.parametrize("place", ["../x.safetensors", "/etc/passwd", "a/b", "", "..", ".", "a\0b", 5, None, ["x"]])
def test_an_index_does_not_lead_elsewhere(tmp_path: Path, place: object) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"d2t": place}}))
    with pytest.raises(Damaged, match="not the name of a file"):
        opened(tmp_path)


@pytest.mark.parametrize("index", ["{}", '{"weight_map": []}', "[]", "nonsense", '{"weight_map": {"a": "b", "a": "c"}}'])
def test_broken_indexes(tmp_path: Path, index: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(Damaged):
        opened(tmp_path)


def test_an_index_and_its_shards_must_agree(tmp_path: Path) -> None:
    folder = make_sharded(tmp_path / "c")
    next(folder.glob("model-00002*")).write_bytes(safetensors({"other": D2T}))
    with opened(folder) as checkpoint, pytest.raises(Damaged, match="the index promises"):
        checkpoint.read("d2t")


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    folder = make_sharded(tmp_path / "c")
    next(folder.glob("model-00002*")).unlink()
    with opened(folder) as checkpoint, pytest.raises(Unreadable, match=r"model-00002-of-00003\.safetensors: No such file"):
        checkpoint.read("d2t")


def test_arrays_of_objects_are_never_unpickled(tmp_path: Path) -> None:
    np.save(tmp_path / "d2t.npy", np.array([1, 2], dtype=object))
    np.savez(tmp_path / "m.npz", d2t=np.array([1, 2], dtype=object))
    for name in ("d2t.npy", "m.npz"):
        with opened(tmp_path / name) as checkpoint, pytest.raises(Damaged, match="pickle"):
            checkpoint.entry("d2t")


@pytest.mark.parametrize("change", [-1, 1, -200])
def test_an_npy_of_another_length(tmp_path: Path, change: int) -> None:
    np.save(tmp_path / "d2t.npy", np.arange(100))
    size = (tmp_path / "d2t.npy").stat().st_size
    os.truncate(tmp_path / "d2t.npy", size + change)
    with opened(tmp_path) as checkpoint, pytest.raises(Damaged, match=f"{size + change} bytes, its header needs {size}"):
        checkpoint.read("d2t")


def test_a_file_that_shrinks_after_its_header_was_read(tmp_path: Path) -> None:
    folder = make_single(tmp_path / "c")
    with opened(folder) as checkpoint:
        os.truncate(folder / "model.safetensors", 100)
        with pytest.raises(Damaged, match="shorter while"):
            checkpoint.read("d2t")


def refusal(path: Path) -> tuple[str, str]:
    with pytest.raises(Unreadable) as caught:
        opened(path)
    return caught.value.reason, caught.value.hint or ""


def test_folders_that_hold_too_little_or_too_much(tmp_path: Path) -> None:
    assert "no checkpoint" in refusal(tmp_path)[0]
    (tmp_path / "epoch_3").mkdir()
    assert "epoch_3" in refusal(tmp_path)[1]
    write_npz(tmp_path / "x.npz", **BOTH)
    write_npz(tmp_path / "y.npz", **BOTH)
    assert "several" in refusal(tmp_path)[0]
    assert "x.npz, y.npz" in refusal(tmp_path)[1]
    write_safetensors(tmp_path, BOTH, name="model-00001-of-00002.safetensors")
    write_safetensors(tmp_path, BOTH, name="model-00002-of-00002.safetensors")
    assert "no index" in refusal(tmp_path)[0]


def test_files_of_no_known_kind(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"hello")
    assert "no kind" in refusal(tmp_path / "x")[0]
    (tmp_path / "x").write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    assert "git lfs pull" in refusal(tmp_path / "x")[1]
    np.save(tmp_path / "t2d.npy", T2D)
    assert "d2t.npy" in refusal(tmp_path / "t2d.npy")[1]


@pytest.mark.parametrize("name", ["model.safetensors", "d2t.npy", "m.npz", "model.safetensors.index.json", "other"])
def test_a_named_pipe_blocks_nothing(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name)
    assert "named pipe" in refusal(tmp_path / name)[0]


def test_names_on_the_disk_may_be_any_bytes(tmp_path: Path) -> None:
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9 $(touch x)\n"))
    with opened(make_single(folder)) as checkpoint:
        assert np.array_equal(checkpoint.read("d2t"), D2T)
