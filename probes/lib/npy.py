"""The header of numpy's ``.npy`` format, read without numpy and without evaluating anything.

Magic, version, length, then a Python dict in a fixed form: ``{'descr': '<i8', 'fortran_order': False, 'shape': (3,), }``.
Arrays of objects are pickles; they are refused.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Callable

MAGIC = b"\x93NUMPY"
MAX_HEADER = 10_000
"""Bytes; numpy itself refuses more."""

_ITEM = re.compile(
    r"\s*'(?P<name>descr|fortran_order|shape)'\s*:\s*"
    r"(?P<value>'[^']*'|\[[^\n]*\]|True|False|\([0-9L, ]*\))\s*(?:,\s*|\Z)"
)
_PLAIN = re.compile(r"[<>|=]?([biuf])([1248])\Z")


@dataclass(frozen=True)
class Header:
    """What a ``.npy`` file holds."""

    dtype: str
    """As numpy reads it, with its byte order: ``<i8``."""
    shape: tuple[int, ...]
    data: int
    """Offset of the first element's byte."""
    size: int
    """Bytes of all elements."""
    fortran_order: bool
    """Whether the first index runs fastest."""


def read_header(read: Callable[[int, int], bytes]) -> Header:
    """Return the header of a ``.npy`` file.

    Args:
        read: ``read(offset, count)`` returns that many bytes, fewer at the end of the file.

    Raises:
        ValueError: why this is not an array of numbers.
    """
    begin = read(0, 12)
    if len(begin) < 12 or not begin.startswith(MAGIC):
        raise ValueError("not a .npy file")
    major = begin[6]
    if major not in (1, 2, 3):
        raise ValueError("version %d of the .npy format is not known" % major)
    data, length = (10, struct.unpack("<H", begin[8:10])[0]) if major == 1 else (12, struct.unpack("<I", begin[8:12])[0])
    if length > MAX_HEADER:
        raise ValueError("a header of %d bytes; more than %d are not read" % (length, MAX_HEADER))
    raw = read(data, length)
    if len(raw) < length:
        raise ValueError("cut inside of its header")
    return _parse(raw.decode("latin-1"), data + length)


def make_header(dtype: str, shape: tuple[int, ...]) -> bytes:
    """Return the beginning of a ``.npy`` file, version 1, up to its first element.

    Args:
        dtype: as numpy writes it, with its byte order: ``<i8``.
        shape: in the order of C.
    """
    text = "{'descr': '%s', 'fortran_order': False, 'shape': %r, }" % (dtype, tuple(map(int, shape)))
    # As numpy does: the first element is aligned to 64 bytes, and the header ends a line.
    text += " " * (-(len(MAGIC) + 4 + len(text) + 1) % 64) + "\n"
    return MAGIC + b"\x01\x00" + struct.pack("<H", len(text)) + text.encode("ascii")


def _parse(text: str, data: int) -> Header:
    items = _items(text.strip())
    descr = items["descr"]
    plain = _PLAIN.match(descr[1:-1])
    if plain is None:
        if descr.startswith("["):
            raise ValueError("a structured array, not an array of numbers")
        if "O" in descr:
            raise ValueError("an array of Python objects: a pickle, which is not read")
        raise ValueError("elements of type %s are not numbers" % descr[:80])
    kind, width = plain.group(1), int(plain.group(2))
    if (kind == "b" and width != 1) or (kind == "f" and width == 1):
        raise ValueError("elements of type %s are not known" % descr)
    shape = _shape(items["shape"][1:-1])
    size = width
    for dimension in shape:
        size *= dimension
    return Header(descr[1:-1], shape, data, size, items["fortran_order"] == "True")


def _items(text: str) -> dict[str, str]:
    items: dict[str, str] = {}
    position, end = 1, len(text) - 1
    while text[:1] == "{" and text[-1:] == "}" and position < end:
        match = _ITEM.match(text, position, end)
        if match is None:
            break
        name, value = match.group("name"), match.group("value")
        expected = {"descr": "'[", "fortran_order": "TF", "shape": "("}[name]
        if name in items or value[0] not in expected:
            break
        items[name] = value
        position = match.end()
    if position != end or len(items) != 3:
        raise ValueError("the header is not understood")
    return items


def _shape(text: str) -> tuple[int, ...]:
    parts = [part.strip().rstrip("L") for part in text.split(",") if part.strip()]
    if len(parts) > 32 or not all(part.isdigit() and len(part) < 20 for part in parts):
        raise ValueError("the shape (%s) is not understood" % text[:80])
    return tuple(int(part) for part in parts)
