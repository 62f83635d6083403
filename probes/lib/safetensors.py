"""The safetensors format, read without the library of that name: no mapping into memory, no torch.

A file is 8 bytes (the length n of the header, little endian), n bytes of JSON, and the tensors' bytes back to back. The
JSON maps each name to ``{"dtype": "I64", "shape": [32000], "data_offsets": [begin, end]}``, offsets counted from the
end of the header; ``__metadata__`` maps text to text.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from .files import Damaged, Unreadable, quoted
from .strict_json import parse_object

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from .files import File

MAX_HEADER = 16 << 20
"""Bytes. A header of 100,000 tensors takes about 10 MB; the largest real ones stay far below."""
MAX_TENSORS = 200_000
MAX_DIMENSIONS = 16

BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "U16": 16, "I16": 16, "U32": 32, "I32": 32, "U64": 64, "I64": 64,
    "F16": 16, "BF16": 16, "F32": 32, "F64": 64, "C64": 64,
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F8_E5M2FNUZ": 8, "F8_E4M3FNUZ": 8,
}  # fmt: skip
"""Bits of one element."""


@dataclass(frozen=True)
class Tensor:
    """Where one tensor lies."""

    name: str
    dtype: str
    """As the format writes it: ``I64``, ``BF16``."""
    shape: tuple[int, ...]
    offset: int
    """Of its first byte, from the beginning of the file."""
    size: int
    """Bytes."""


def read_header(file: File) -> dict[str, Tensor]:
    """Return the tensors of ``file`` by name, after holding every one against all others and the size of the file.

    Raises:
        Damaged: it is no safetensors file, is cut, or its header lies.
        Unreadable: it is the placeholder of a file that was never downloaded.
    """
    header, length = _read_json(file)
    header.pop("__metadata__", None)
    if len(header) > MAX_TENSORS:
        raise Damaged(file.path, "%d tensors; more than %d are not read" % (len(header), MAX_TENSORS))
    start = 8 + length
    try:
        tensors = {name: _tensor(name, entry, start) for name, entry in header.items()}
        _check_layout(tensors, start, file.size)
    except ValueError as error:
        raise Damaged(file.path, str(error)) from None
    return tensors


def read_metadata(file: File) -> dict[str, str]:
    """Return what the header says besides tensors, as far as it is text; raise as :func:`read_header` does."""
    metadata = _read_json(file)[0].get("__metadata__")
    pairs = metadata.items() if isinstance(metadata, dict) else ()
    return {name: text for name, text in pairs if isinstance(text, str)}


def _read_json(file: File) -> tuple[dict[str, Any], int]:
    """Return (header, its length in bytes)."""
    length = _header_length(file)
    try:
        return parse_object(file.read(8, length)), length
    except ValueError as error:
        raise Damaged(file.path, "header: %s" % error) from None


def _header_length(file: File) -> int:
    begin = file.read(0, min(file.size, 64))
    if begin.startswith(b"version https://git-lfs"):
        raise Unreadable(file.path, "is a Git LFS placeholder, not the file itself", "fetch it with: git lfs pull")
    if len(begin) < 9:
        raise Damaged(file.path, "not a safetensors file: %d bytes" % file.size)
    length: int = struct.unpack("<Q", begin[:8])[0]
    if begin[8:9] != b"{":
        raise Damaged(file.path, "not a safetensors file: no header at its beginning")
    if length > file.size - 8:
        raise Damaged(file.path, "cut, or no safetensors file: a header of %d bytes, a file of %d" % (length, file.size))
    if length > MAX_HEADER:
        raise Damaged(file.path, "a header of %d bytes; more than %d are not read" % (length, MAX_HEADER))
    return length


def _tensor(name: str, entry: Any, start: int) -> Tensor:
    where = "tensor %s: " % quoted(name)
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= set(entry):
        raise ValueError(where + "dtype, shape or data_offsets missing")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str):
        raise ValueError(where + "the dtype is not text")  # noqa: TRY004
    if not _counts(shape) or len(shape) > MAX_DIMENSIONS:
        raise ValueError(where + "the shape is not a short list of counts")
    if not _counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise ValueError(where + "data_offsets is not [begin, end]")
    size = offsets[1] - offsets[0]
    bits = BITS.get(dtype)
    # Python's integers do not overflow: a shape of [2**62, 4] is just a lie about the size.
    elements = 1
    for dimension in shape:
        elements *= dimension
    if bits is not None and elements * bits != size * 8:
        raise ValueError(where + "%s %s does not take %d bytes" % (quoted(dtype), shape, size))
    return Tensor(name, dtype, tuple(shape), start + offsets[0], size)


def _counts(value: object) -> bool:
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 1 << 63 for item in value)


def _check_layout(tensors: dict[str, Tensor], start: int, size: int) -> None:
    end = start
    for tensor in sorted(tensors.values(), key=lambda tensor: (tensor.offset, tensor.size)):
        if tensor.offset != end:
            what = "overlaps another one" if tensor.offset < end else "leaves a hole before it"
            raise ValueError("tensor %s %s" % (quoted(tensor.name), what))
        end += tensor.size
    if end > size:
        raise ValueError("cut: %d bytes are missing at its end" % (end - size))
    if end < size:
        raise ValueError("%d bytes follow the last tensor" % (size - end))
