from __future__ import annotations

import io
import os
import pickle
import zipfile
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from probes.lib import pickles
from probes.lib.checkpoint import Checkpoint, open_checkpoint
from probes.lib.files import Damaged, Meter, Unreadable
from probes.lib.matrix import Matrix

from ...support.checkpoints import bfloat16, from_bfloat16, write_sharded_torch, write_torch

IDS = np.array([3, 4, 9, 12])
WEIGHTS = np.arange(20, dtype=np.float32).reshape(5, 4) / 7


def opened(path: Path, meter: Meter | None = None) -> Checkpoint:
    return open_checkpoint(str(path), meter or Meter())


def rezip(path: Path, change: dict[str, bytes | None], compression: int = zipfile.ZIP_STORED) -> None:
    """Write an archive of torch anew, with some members changed or left out."""
    with zipfile.ZipFile(path) as file:
        members = {name: file.read(name) for name in file.namelist()}
    top = next(iter(members)).split("/")[0]
    for name, data in change.items():
        if data is None:
            del members[f"{top}/{name}"]
        else:
            members[f"{top}/{name}"] = data
    with zipfile.ZipFile(path, "w", compression) as file:
        for name, data in members.items():
            file.writestr(name, data)


@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize(
    "array",
    [
        IDS, IDS.astype(np.int32), IDS.astype(np.int16), IDS.astype(np.uint8), IDS > 4, WEIGHTS, WEIGHTS.astype(np.float16),
        WEIGHTS.astype(np.float64), np.zeros((0, 3), np.float32), np.array(5),
    ],
)  # fmt: skip
def test_every_type_as_torch_writes_it(tmp_path: Path, array: Any, old: bool) -> None:
    with opened(write_torch(tmp_path / "x.pt", {"a": array}, old=old)) as checkpoint:
        assert checkpoint.kind == "torch"
        entry = checkpoint.entry("a")
        assert (entry.dtype, entry.shape) == (array.dtype.name, array.shape)
        read = checkpoint.read("a")
        assert read.dtype == array.dtype
        assert np.array_equal(read, array)


@pytest.mark.parametrize("old", [False, True])
def test_bfloat16_becomes_float32(tmp_path: Path, old: bool) -> None:
    raw = bfloat16(WEIGHTS)
    with opened(write_torch(tmp_path / "x.bin", {"w": raw}, old=old)) as checkpoint:
        assert checkpoint.entry("w").dtype == "bfloat16"
        assert np.array_equal(checkpoint.read("w"), from_bfloat16(raw).reshape(5, 4))


def test_torch_that_tells_places_only_of_fake_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_torch(tmp_path / "x.pt", {"d2t": IDS, "w": bfloat16(WEIGHTS)})
    monkeypatch.setattr(torch, "__version__", "2.10.0+cu128")
    meter = Meter()
    with opened(path, meter) as checkpoint:
        assert np.array_equal(checkpoint.read("d2t"), IDS)
        assert Matrix(checkpoint, "w").numbers(1, 2).tolist() == [from_bfloat16(bfloat16(WEIGHTS[1])).tolist()]


def test_views_and_transposed_tensors(tmp_path: Path) -> None:
    whole = torch.from_numpy(WEIGHTS.copy())
    torch.save({"t": whole.t(), "part": whole[2:4], "column": whole[:, 1]}, tmp_path / "x.pt")
    with opened(tmp_path / "x.pt") as checkpoint:
        assert np.array_equal(checkpoint.read("t"), WEIGHTS.T)
        assert np.array_equal(checkpoint.read("part"), WEIGHTS[2:4])
        assert np.array_equal(checkpoint.read("column"), WEIGHTS[:, 1])
        assert np.array_equal(Matrix(checkpoint, "part").numbers(1, 2), WEIGHTS[3:4])
        with pytest.raises(Unreadable, match="cannot be read in parts"):
            Matrix(checkpoint, "t")


def test_a_tensor_larger_than_what_is_stored_is_refused(tmp_path: Path) -> None:
    torch.save({"a": torch.zeros(1).expand(1 << 40)}, tmp_path / "x.pt")
    with pytest.raises(Damaged, match="more numbers than are stored"):
        opened(tmp_path / "x.pt")


def test_what_is_found_in_nested_files(tmp_path: Path) -> None:
    content = OrderedDict(
        epoch=3, name="run", model=OrderedDict(d2t=IDS, deeper={"w": WEIGHTS}), extra={"ids": [1, 2]}, none=None
    )
    with opened(write_torch(tmp_path / "x.pt", content)) as checkpoint:
        assert checkpoint.names() == ["d2t", "deeper.w", "extra.ids"]
        assert checkpoint.read("extra.ids").tolist() == [1, 2]


@pytest.mark.parametrize(
    ("file", "name"), [("d2t.pt", "d2t"), ("5f3a.pt", "d2t"), ("t2d.pt", "t2d"), ("token_freq.pt", "counts")]
)
def test_a_tensor_that_is_the_whole_file(tmp_path: Path, file: str, name: str) -> None:
    with opened(write_torch(tmp_path / file, IDS)) as checkpoint:
        assert checkpoint.names() == [name]
        assert np.array_equal(checkpoint.read(name), IDS)


@pytest.mark.parametrize("make", [dict, Counter])
def test_counts_by_token_id(tmp_path: Path, make: Any) -> None:
    torch.save(make({5: 7, 0: 2}), tmp_path / "token_freq.pt")
    with opened(tmp_path / "token_freq.pt") as checkpoint:
        assert checkpoint.read("counts").tolist() == [2, 0, 0, 0, 0, 7]


@pytest.mark.parametrize("counts", [{1 << 40: 1}, {-1: 1}, {1: "many"}, {1: 1 << 80}])
def test_counts_that_are_none(tmp_path: Path, counts: dict[int, Any]) -> None:
    torch.save(counts, tmp_path / "token_freq.pt")
    with pytest.raises(Damaged):
        opened(tmp_path / "token_freq.pt")


def test_shards_are_opened_when_they_are_needed(tmp_path: Path) -> None:
    folder = write_sharded_torch(tmp_path / "c", [{"w": WEIGHTS}, {"d2t": IDS}])
    next(folder.glob("*00001*")).unlink()
    with opened(folder) as checkpoint:
        assert checkpoint.kind == "torch-sharded"
        assert checkpoint.peek("d2t") is None
        assert np.array_equal(checkpoint.read("d2t"), IDS)
        with pytest.raises(Unreadable, match="No such file"):
            checkpoint.read("w")


def test_large_tensors_are_not_read_before_they_are_asked_for(tmp_path: Path) -> None:
    large = np.ones((1000, 1000), np.float32)
    meter = Meter()
    with opened(write_torch(tmp_path / "pytorch_model.bin", {"lm_head.weight": large, "d2t": IDS}), meter) as checkpoint:
        assert checkpoint.entry("lm_head.weight").shape == (1000, 1000)
        assert np.array_equal(checkpoint.read("d2t"), IDS)
        assert Matrix(checkpoint, "lm_head.weight").bits(500, 501).shape == (1, 1000)
    assert meter.bytes < 100_000


# Hostile -------------------------------------------------------------------------------------------------------------


class Calls:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.marker),)


@pytest.mark.parametrize("old", [False, True])
def test_nothing_in_a_pickle_is_called(tmp_path: Path, old: bool) -> None:
    torch.save({"d2t": Calls(tmp_path / "called")}, tmp_path / "x.pt", _use_new_zipfile_serialization=not old)
    with pytest.raises(Unreadable, match="refused"):
        opened(tmp_path / "x.pt")
    (tmp_path / "plain.pt").write_bytes(pickle.dumps({"d2t": Calls(tmp_path / "called")}))
    with pytest.raises((Unreadable, Damaged)):
        opened(tmp_path / "plain.pt")
    assert not (tmp_path / "called").exists()


def test_an_older_torch_is_not_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_torch(tmp_path / "x.pt", {"d2t": IDS})
    monkeypatch.setattr(torch, "__version__", "2.9.1+cu128")
    monkeypatch.setattr(torch, "load", lambda *_, **__: pytest.fail("it was loaded"))
    with pytest.raises(Unreadable, match=r"torch 2\.9\.1") as caught:
        opened(path)
    assert "weights_only=True" in (caught.value.hint or "")


def test_without_torch_there_is_a_way_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_torch(tmp_path / "x.pt", {"d2t": IDS})
    monkeypatch.setitem(__import__("sys").modules, "torch", None)
    with pytest.raises(Unreadable, match="no torch to read it") as caught:
        opened(path)
    assert "save_file" in (caught.value.hint or "")


@pytest.mark.parametrize("size", [0, 3, 40, 300, 700, 900, 1100])
def test_cut_files(tmp_path: Path, size: int) -> None:
    data = write_torch(tmp_path / "x.pt", {"d2t": IDS, "w": WEIGHTS}).read_bytes()
    (tmp_path / "x.pt").write_bytes(data[:size])
    with pytest.raises((Damaged, Unreadable)):
        opened(tmp_path / "x.pt")


@pytest.mark.parametrize("size", [1, 10, 200, 400, 500])
def test_cut_files_of_the_old_kind(tmp_path: Path, size: int) -> None:
    data = write_torch(tmp_path / "x.pt", {"d2t": IDS, "w": WEIGHTS}, old=True).read_bytes()
    (tmp_path / "x.pt").write_bytes(data[:size])
    with pytest.raises((Damaged, Unreadable)):
        opened(tmp_path / "x.pt")


def test_a_file_that_shrinks_while_it_is_read(tmp_path: Path) -> None:
    path = write_torch(tmp_path / "x.pt", {"w": np.ones((1000, 100), np.float32)})
    with opened(path) as checkpoint:
        matrix = Matrix(checkpoint, "w")
        os.truncate(path, 4096)
        with pytest.raises(Damaged, match="shorter"):
            matrix.bits(0, 1000)
        with pytest.raises(Damaged):
            checkpoint.read("w")


def test_members_that_are_compressed(tmp_path: Path) -> None:
    path = write_torch(tmp_path / "x.pt", {"d2t": np.zeros(1000, np.int64)})
    rezip(path, {}, zipfile.ZIP_DEFLATED)
    with pytest.raises(Damaged, match="is compressed"):
        opened(path)


@pytest.mark.parametrize("data", [b"", b"12345678", bytes(8 * 5)])
def test_a_tensor_whose_member_has_another_size(tmp_path: Path, data: bytes) -> None:
    path = write_torch(tmp_path / "x.pt", {"d2t": IDS})
    rezip(path, {"data/0": data})
    with pytest.raises(Damaged):
        opened(path)


def test_a_tensor_without_its_member(tmp_path: Path) -> None:
    path = write_torch(tmp_path / "x.pt", {"d2t": IDS})
    rezip(path, {"data/0": None})
    with pytest.raises(Damaged):
        opened(path)


def test_a_flipped_bit_is_found(tmp_path: Path) -> None:
    path = write_torch(tmp_path / "x.pt", {"d2t": IDS})
    data = bytearray(path.read_bytes())
    data[data.index(IDS.tobytes())] ^= 1
    path.write_bytes(data)
    with opened(path) as checkpoint, pytest.raises(Damaged, match="CRC"):
        checkpoint.read("d2t")


def test_numbers_of_a_big_endian_machine(tmp_path: Path) -> None:
    path = write_torch(tmp_path / "x.pt", {"d2t": IDS})
    rezip(path, {"byteorder": b"big"})
    with pytest.raises(Unreadable, match="big-endian"):
        opened(path)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_archives_that_torch_save_did_not_write(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("a.txt", "text")
    with pytest.raises(Damaged, match=r"no data\.pkl"):
        opened(path)
    torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), path)
    with pytest.raises(Unreadable, match="TorchScript"):
        opened(path)


@pytest.mark.parametrize("old", [False, True])
def test_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old: bool) -> None:
    path = write_torch(tmp_path / "x.pt", {"d2t": IDS}, old=old)
    monkeypatch.setattr(pickles, "MAX_OLD", 100)
    monkeypatch.setattr(pickles, "MAX_PICKLE", 100)
    with pytest.raises((Damaged, Unreadable), match="cannot be read in parts" if old else "a pickle of"):
        opened(path)


def test_more_tensors_than_anything_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pickles, "MAX_TENSORS", 3)
    with pytest.raises(Damaged, match="more than 3 tensors"):
        opened(write_torch(tmp_path / "x.pt", {str(number): IDS for number in range(4)}))


def test_other_things_named_pt(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo.pt")
    with pytest.raises(Unreadable, match="named pipe"):
        opened(tmp_path / "fifo.pt")
    (tmp_path / "lfs.pt").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    with pytest.raises(Unreadable, match="Git LFS"):
        opened(tmp_path / "lfs.pt")
    (tmp_path / "text.pt").write_text("not a pickle at all")
    with pytest.raises((Damaged, Unreadable)):
        opened(tmp_path / "text.pt")


def test_sparse_and_quantised_tensors(tmp_path: Path) -> None:
    torch.save({"a": torch.eye(3).to_sparse()}, tmp_path / "x.pt")
    with pytest.raises(Unreadable, match="sparse"):
        opened(tmp_path / "x.pt")


def test_an_old_file_that_promises_more_than_it_has(tmp_path: Path) -> None:
    path = write_torch(tmp_path / "x.pt", {"d2t": IDS}, old=True)
    buffer = io.BytesIO(path.read_bytes().replace(b"K\x04", b"K\x40"))
    path.write_bytes(buffer.getvalue())
    with pytest.raises(Damaged):
        opened(path)
