from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from probes.lib.files import Damaged, File, Meter, Unreadable
from probes.lib.safetensors import MAX_HEADER, Tensor, read_header

from ...support.checkpoints import safetensors, safetensors_file

GOOD = safetensors({"d2t": np.arange(4), "t2d": np.ones(9, bool)})


def header_of(path: Path, data: bytes) -> dict[str, Tensor]:
    path.write_bytes(data)
    with File(str(path), Meter()) as file:
        return read_header(file)


def entry(dtype: object = "I64", shape: object = (2,), offsets: object = (0, 16), **more: object) -> dict[str, Any]:
    return {"x": {"dtype": dtype, "shape": shape, "data_offsets": offsets}, **more}


def test_files_of_the_library_are_read_as_it_reads_them(tmp_path: Path) -> None:
    arrays: dict[str, Any] = {
        "model.d2t": np.arange(7),
        "t2d": np.arange(11) % 2 == 0,
        "w": np.zeros((3, 5), np.float16),
        "empty": np.zeros((0, 4), np.int32),
        "scalar": np.array(2.5, np.float32),
    }
    path = tmp_path / "f.safetensors"
    save_file(arrays, path, metadata={"format": "pt"})
    data = path.read_bytes()
    tensors = header_of(path, data)
    assert set(tensors) == set(arrays)
    for name, array in arrays.items():
        tensor = tensors[name]
        assert tensor.shape == array.shape
        assert data[tensor.offset : tensor.offset + tensor.size] == array.tobytes()


def test_a_file_without_tensors(tmp_path: Path) -> None:
    assert header_of(tmp_path / "f", safetensors_file({})) == {}


def test_a_type_of_the_future_does_not_hide_the_others(tmp_path: Path) -> None:
    header = {**entry(), "y": {"dtype": "F2", "shape": [64], "data_offsets": [16, 32]}}
    assert set(header_of(tmp_path / "f", safetensors_file(header, bytes(32)))) == {"x", "y"}


TWO = {"dtype": "U8", "shape": [8]}
HOSTILE: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "not a safetensors"),
    "eight bytes": (bytes(8), "not a safetensors"),
    "text": (b"hello world, this is no tensor", "not a safetensors"),
    "length beyond the file": (safetensors_file(entry(), bytes(16), length=1 << 20), "cut"),
    "length of 2**64-1": (safetensors_file(entry(), bytes(16), length=(1 << 64) - 1), "cut"),
    "length beyond the cap": (struct.pack("<Q", MAX_HEADER + 1) + b"{" + b" " * (MAX_HEADER + 8), "more than"),
    "not JSON": (safetensors_file(b"{no json at all}"), "not JSON"),
    "an array": (safetensors_file(b"{}", b"")[:8] + b"[]", "no header"),
    "bad UTF-8": (safetensors_file(b'{"\xff\xfe": 1}'), "not UTF-8"),
    "nested deeply": (safetensors_file(b'{"x": ' + b"[" * 100_000), "too deeply"),
    "a number of 100,000 digits": (safetensors_file(b'{"x": ' + b"7" * 100_000 + b"}"), "digits"),
    "a name twice": (
        safetensors_file(b'{"d2t":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"d2t":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}', b"x"),
        "twice",
    ),
    "entry is a number": (safetensors_file({"x": 5}), "missing"),
    "no dtype": (safetensors_file({"x": {"shape": [1], "data_offsets": [0, 8]}}, bytes(8)), "missing"),
    "dtype is a list": (safetensors_file(entry(["I64"]), bytes(16)), "dtype"),
    "negative dimension": (safetensors_file(entry(shape=[-2]), bytes(16)), "shape"),
    "dimension is a float": (safetensors_file(entry(shape=[2.0]), bytes(16)), "shape"),
    "dimension is true": (safetensors_file(entry(shape=[True, 2]), bytes(16)), "shape"),
    "dimension of 2**64": (safetensors_file(entry(shape=[1 << 64]), bytes(16)), "shape"),
    "20 dimensions": (safetensors_file(entry(shape=[1] * 20), bytes(8)), "shape"),
    "shape lies": (safetensors_file(entry(shape=[3]), bytes(16)), "does not take"),
    "shape overflows": (safetensors_file(entry(shape=[1 << 62, 4]), bytes(16)), "does not take"),
    "nothing of 2**62": (safetensors_file(entry("U8", [1 << 62, 4], [0, 0])), "does not take"),
    "offsets reversed": (safetensors_file(entry(offsets=[16, 0]), bytes(16)), "data_offsets"),
    "offsets negative": (safetensors_file(entry(offsets=[-16, 0]), bytes(16)), "data_offsets"),
    "three offsets": (safetensors_file(entry(offsets=[0, 8, 16]), bytes(16)), "data_offsets"),
    "offsets beyond the file": (safetensors_file(entry(), bytes(10)), "cut: 6 bytes"),
    "bytes at the end": (safetensors_file(entry(), bytes(20)), "4 bytes follow"),
    "overlap": (
        safetensors_file({"x": {**TWO, "data_offsets": [0, 8]}, "y": {**TWO, "data_offsets": [4, 12]}}, bytes(12)),
        "overlaps",
    ),
    "the same bytes twice": (
        safetensors_file({"x": {**TWO, "data_offsets": [0, 8]}, "y": {**TWO, "data_offsets": [0, 8]}}, bytes(8)),
        "overlaps",
    ),
    "hole": (
        safetensors_file({"x": {**TWO, "data_offsets": [0, 8]}, "y": {**TWO, "data_offsets": [9, 17]}}, bytes(17)),
        "hole",
    ),
    "hole at the beginning": (safetensors_file({"x": {**TWO, "data_offsets": [1, 9]}}, bytes(9)), "hole"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_headers(tmp_path: Path, case: str) -> None:
    data, said = HOSTILE[case]
    with pytest.raises(Damaged) as caught:
        header_of(tmp_path / "f", data)
    # Not in the whole message: the path in it names the case.
    assert said in caught.value.reason
    assert str(caught.value).startswith(f"{tmp_path}/f: ")


def test_a_placeholder_is_told_from_damage(tmp_path: Path) -> None:
    with pytest.raises(Unreadable, match="Git LFS") as caught:
        header_of(tmp_path / "f", b"version https://git-lfs.github.com/spec/v1\noid sha256:12\nsize 3\n")
    assert "git lfs pull" in (caught.value.hint or "")


def test_cut_at_every_byte(tmp_path: Path) -> None:
    for end in range(len(GOOD)):
        with pytest.raises(Damaged):
            header_of(tmp_path / "f", GOOD[:end])
    assert set(header_of(tmp_path / "f", GOOD)) == {"d2t", "t2d"}


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_change_is_refused_or_harmless(tmp_path: Path, data: st.DataObject) -> None:
    changed = bytearray(GOOD)
    for _ in range(data.draw(st.integers(1, 4))):
        changed[data.draw(st.integers(0, len(GOOD) - 1))] = data.draw(st.integers(0, 255))
    try:
        tensors = header_of(tmp_path / "f", bytes(changed))
    except (Damaged, Unreadable):
        return
    for tensor in tensors.values():
        assert 8 <= tensor.offset <= tensor.offset + tensor.size <= len(GOOD)


def test_names_of_tensors_may_be_anything(tmp_path: Path) -> None:
    names = ["../../etc/passwd", "\x1b[31m", "", "a" * 10_000, "模型"]
    header = {name: {"dtype": "U8", "shape": [1], "data_offsets": [i, i + 1]} for i, name in enumerate(names)}
    assert set(header_of(tmp_path / "f", safetensors_file(header, bytes(len(names))))) == set(names)
    broken = json.loads(json.dumps(header))
    broken["\x1b[31m"]["shape"] = [2]
    with pytest.raises(Damaged) as caught:
        header_of(tmp_path / "f", safetensors_file(broken, bytes(len(names))))
    assert "\x1b" not in str(caught.value)
