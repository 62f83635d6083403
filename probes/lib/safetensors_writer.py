"""Write a safetensors file in one pass: the header first, then each tensor's bytes as they come.

Nothing is held in memory. The file is laid out as the library of that name lays it out: wide types first, then by name,
so that every tensor is aligned.
"""

from __future__ import annotations

import contextlib
import json
import os
import struct
import threading
from dataclasses import dataclass

from .files import Unreadable, cause
from .safetensors import BITS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import TracebackType
    from typing import Iterable, Mapping

    from .files import File

BLOCK = 1 << 20
"""Bytes that are copied at a time: they stay in the processor's cache between being read and being written."""
_FLUSH = 64 << 20
"""Bytes after which the disk is told to begin."""
_WORDS = {"bool": "BOOL", "bfloat16": "BF16"}
_LETTERS = {"int": "I", "uint": "U", "float": "F"}


@dataclass(frozen=True)
class Spec:
    """One tensor to be written."""

    name: str
    dtype: str
    """As the format writes it: ``I64``, ``BF16``."""
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Bytes."""
        elements = 1
        for dimension in self.shape:
            elements *= dimension
        return elements * BITS[self.dtype] // 8


def format_word(dtype: str) -> str:
    """Return what the format calls a type: ``bfloat16`` is ``BF16``; its own names stay what they are."""
    kind = dtype.rstrip("0123456789")
    return _WORDS.get(dtype) or (_LETTERS[kind] + dtype[len(kind) :] if kind in _LETTERS else dtype)


def arrange(specs: Iterable[Spec]) -> list[Spec]:
    """Return ``specs`` in the order in which they are written."""
    return sorted(specs, key=lambda spec: (-BITS[spec.dtype], spec.name))


def make_header(specs: Iterable[Spec], metadata: Mapping[str, str]) -> bytes:
    """Return the beginning of the file, up to the first tensor's first byte.

    Args:
        specs: as :func:`arrange` returns them.
        metadata: texts by name.
    """
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    end = 0
    for spec in specs:
        header[spec.name] = {
            "dtype": spec.dtype,
            "shape": list(spec.shape),
            "data_offsets": [end, end + spec.size],
        }
        end += spec.size
    text = json.dumps(header, separators=(",", ":")).encode("ascii")
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


class Writer:
    """A new file that is filled from its beginning to its end. Use it in a ``with`` statement.

    The disk works while more is being prepared: a large file is not first collected in memory and then waited for.

    Args:
        path: it must not exist.

    Raises:
        Unreadable: it cannot be made.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.written = 0
        """Bytes so far."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            self._descriptor = os.open(path, flags, 0o666)
        except OSError as error:
            raise self._failed(error) from None
        self._block = memoryview(bytearray(BLOCK))
        self._flushed = 0
        self._flush: threading.Thread | None = None

    def __enter__(self) -> Writer:
        """Return the writer."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close the file; without an error, only after the disk has it."""
        try:
            if self._flush is not None:
                self._flush.join()
            if kind is None:
                self._sync()
        finally:
            os.close(self._descriptor)

    def write(self, data: bytes | memoryview) -> None:
        """Append ``data``; raise Unreadable where that fails."""
        rest = memoryview(data).cast("B")
        while len(rest):
            try:
                count = os.write(self._descriptor, rest[: 1 << 26])
            except OSError as error:
                raise self._failed(error) from None
            self.written += count
            rest = rest[count:]
        if self.written - self._flushed >= _FLUSH and (self._flush is None or not self._flush.is_alive()):
            self._flushed = self.written
            self._flush = threading.Thread(target=self._start_flushing, daemon=True)
            self._flush.start()

    def copy(self, file: File, offset: int, count: int) -> None:
        """Append ``count`` bytes of ``file``; raise Damaged or Unreadable."""
        while count:
            part = self._block[: min(count, BLOCK)]
            file.read_into(offset, part)
            self.write(part)
            offset += len(part)
            count -= len(part)

    def _start_flushing(self) -> None:
        # What fails here fails again, and is reported, when the file is closed.
        with contextlib.suppress(OSError):
            os.fdatasync(self._descriptor)

    def _sync(self) -> None:
        try:
            os.fsync(self._descriptor)
        except OSError as error:
            raise self._failed(error) from None

    def _failed(self, error: OSError) -> Unreadable:
        return Unreadable(self.path, "cannot be written: %s" % cause(error))
