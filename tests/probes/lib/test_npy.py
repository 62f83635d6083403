from __future__ import annotations

import io
import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from probes.lib.npy import Header, read_header


def parse(data: bytes) -> Header:
    return read_header(lambda offset, count: data[offset : offset + count])


def saved(array: Any, version: tuple[int, int] | None = None) -> bytes:
    buffer = io.BytesIO()
    np.lib.format.write_array(buffer, np.asanyarray(array), version=version)
    return buffer.getvalue()


def file(header: str | bytes, *, version: int = 1) -> bytes:
    text = header if isinstance(header, bytes) else header.encode("latin-1")
    return b"\x93NUMPY" + bytes([version, 0]) + struct.pack("<H" if version == 1 else "<I", len(text)) + text


@pytest.mark.parametrize("dtype", ["?", "i1", "u1", "<i2", "<i4", "<i8", ">i8", "<u8", "<f2", "<f4", ">f8"])
@pytest.mark.parametrize("shape", [(5,), (0,), (), (2, 3)])
def test_what_numpy_writes_is_read_as_numpy_reads_it(dtype: str, shape: tuple[int, ...]) -> None:
    array = np.zeros(shape, dtype)
    data = saved(array)
    header = parse(data)
    assert np.dtype(header.dtype) == array.dtype
    assert header.shape == shape
    assert header.data + header.size == len(data)


@pytest.mark.parametrize("version", [(1, 0), (2, 0), (3, 0)])
def test_versions(version: tuple[int, int]) -> None:
    assert parse(saved(np.arange(3), version)).shape == (3,)


def test_order_of_two_dimensions() -> None:
    assert parse(saved(np.asfortranarray(np.ones((2, 3))))).fortran_order
    assert not parse(saved(np.ones((2, 3)))).fortran_order


@pytest.mark.parametrize(
    "header",
    [
        "{'shape': (3,), 'descr': '<i8', 'fortran_order': False}",
        "{'descr':'<i8','fortran_order':False,'shape':(3,)}",
        "{'descr': '<i8', 'fortran_order': False, 'shape': (3L,), }   \n",
    ],
)
def test_headers_that_others_write(header: str) -> None:
    assert parse(file(header)) == Header("<i8", (3,), 10 + len(header), 24, fortran_order=False)


GOOD = "{'descr': '<i8', 'fortran_order': False, 'shape': (3,), }"


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "not a .npy"),
        (b"\x93NUMPX\x01\x00\x10\x00 {}", "not a .npy"),
        (file(GOOD, version=9), "version 9"),
        (file(GOOD)[:30], "cut"),
        (b"\x93NUMPY\x02\x00\xff\xff\xff\xff", "4294967295 bytes"),
        (file("{}"), "not understood"),
        (file("[]"), "not understood"),
        (file("{'descr': '<i8', 'fortran_order': False}"), "not understood"),
        (file(GOOD[:-2] + "'shape': (4,)}"), "not understood"),
        (file(GOOD[:-2] + "'x': 1}"), "not understood"),
        (file(GOOD.replace("False", "print()")), "not understood"),
        (file(GOOD.replace("'<i8'", "True")), "not understood"),
        (file(GOOD.replace("(3,)", "(-3,)")), "not understood"),
        (file(GOOD.replace("(3,)", "(3.5,)")), "not understood"),
        (file(GOOD.replace("(3,)", "(" + "9" * 60 + ",)")), "shape"),
        (file(GOOD.replace("(3,)", "(" + "1," * 50 + ")")), "shape"),
        (file(GOOD.replace("<i8", "|O")), "pickle"),
        (file(GOOD.replace("<i8", "<U7")), "not numbers"),
        (file(GOOD.replace("<i8", "<c8")), "not numbers"),
        (file(GOOD.replace("<i8", "<b8")), "not known"),
        (file(GOOD.replace("'<i8'", "[('a', '<i8')]")), "structured"),
        (file("(" * 9000), "not understood"),
        (file("{" + "-" * 9000 + "}"), "not understood"),
    ],
)
def test_everything_else_is_refused_in_words(data: bytes, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        parse(data)


@settings(max_examples=300)
@given(st.data())
def test_any_change_is_refused_or_read_as_a_header(data: st.DataObject) -> None:
    changed = bytearray(saved(np.arange(3)))
    changed[data.draw(st.integers(0, 100))] = data.draw(st.integers(0, 255))
    try:
        header = parse(bytes(changed))
    except ValueError:
        return
    assert header.size >= 0
    np.dtype(header.dtype)
