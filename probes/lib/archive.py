"""Members of a zip archive (``.npz``, and what ``torch.save`` writes), read in bounded pieces."""

from __future__ import annotations

import io
import struct
import zlib
from dataclasses import dataclass
from typing import IO
from zipfile import ZIP_DEFLATED, ZIP_STORED, BadZipFile, ZipFile, ZipInfo

from .files import Damaged, quoted

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from .files import File

MAX_DIRECTORY = 16 << 20
"""Bytes of the list of members."""
MAX_MEMBERS = 100_000
_TAIL = 1 << 17
_BROKEN = (BadZipFile, NotImplementedError, RuntimeError, EOFError, ValueError, OverflowError, struct.error, zlib.error)


@dataclass(frozen=True)
class Member:
    """Where a member's bytes lie."""

    name: str
    offset: int
    """Of its first byte, from the beginning of the file."""
    size: int
    """Bytes, unpacked."""
    packed: bool
    """Whether they are compressed."""


class Archive:
    """A zip archive in an open file.

    Raises:
        Damaged: it is none, is cut, or names a member twice.
    """

    def __init__(self, file: File) -> None:
        self._file = file
        window = Window(file, MAX_DIRECTORY + _TAIL, "the list of members")
        try:
            self._zip = ZipFile(window)
        except _BROKEN as error:
            raise Damaged(file.path, "not an intact zip archive: %s" % error) from None
        infos = self._zip.infolist()
        self._members: dict[str, ZipInfo] = {info.filename: info for info in infos}
        if len(self._members) != len(infos) or len(infos) > MAX_MEMBERS:
            raise Damaged(file.path, "members of the same name, or too many of them")
        window.lift()

    def names(self) -> list[str]:
        """Return the names of all members."""
        return list(self._members)

    def members(self) -> list[Member]:
        """Return where all members lie; raise Damaged when their local headers say otherwise than the list."""
        found = []
        for info in self._members.values():
            header = self._file.read(info.header_offset, 30)
            if header[:4] != b"PK\x03\x04":
                raise Damaged(self._file.path, "member %s is not where the archive says" % quoted(info.filename))
            name, extra = struct.unpack("<HH", header[26:30])
            packed = info.compress_type != ZIP_STORED
            offset = info.header_offset + 30 + name + extra
            if offset + info.compress_size > self._file.size or not (packed or info.compress_size == info.file_size):
                raise Damaged(self._file.path, "member %s is cut" % quoted(info.filename))
            found.append(Member(info.filename, offset, info.file_size, packed))
        return found

    def read(self, name: str, count: int, *, whole: bool = False) -> bytes:
        """Return the first ``count`` bytes of a member, fewer when it has fewer.

        With ``whole`` the member must have exactly that many, and its checksum is compared.

        Raises:
            Damaged: its data are not what the archive says, or its compression is one that numpy never writes.
        """
        info = self._members[name]
        where = "member %s: " % quoted(name)
        if info.compress_type not in (ZIP_STORED, ZIP_DEFLATED):
            raise Damaged(self._file.path, where + "compression %d is not read" % info.compress_type)
        if whole and info.file_size != count:
            raise Damaged(self._file.path, where + "%d bytes where %d are due" % (info.file_size, count))
        try:
            with self._zip.open(info) as member:
                data = _read_fully(member, count)
                # Only at the end of a member the checksum is looked at.
                more = member.read(1) if whole else b""
        except _BROKEN as error:
            raise Damaged(self._file.path, where + str(error)) from None
        if whole and (more or len(data) != count):
            raise Damaged(self._file.path, where + "its length is not what the archive says")
        return data


def _read_fully(member: IO[bytes], count: int) -> bytes:
    parts = []
    while count > 0:
        part = member.read(min(count, 1 << 20))
        if not part:
            break
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


class Window(io.RawIOBase):
    """A :class:`File` as a file object; while ``budget`` lasts, or without limit after :meth:`lift`.

    Args:
        file: it must stay open.
        budget: bytes that may be read.
        what: what is being read, for the error when there are more.
    """

    def __init__(self, file: File, budget: int, what: str) -> None:
        super().__init__()
        self._file = file
        self._what = what
        self._limit = budget
        self._position = 0
        self._budget: int | None = budget

    def lift(self) -> None:
        """From now on the caller bounds what is read."""
        self._budget = None

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def tell(self) -> int:
        """Return the position."""
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Return the new position."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._file.size}[whence]
        if base + offset < 0:
            raise ValueError("an offset before the beginning")
        self._position = base + offset
        return self._position

    def read(self, size: int = -1) -> bytes:
        """Return up to ``size`` bytes; raise Damaged when the budget is used up."""
        left = max(0, self._file.size - self._position)
        size = left if size is None or size < 0 else min(size, left)
        if self._budget is not None:
            self._budget -= size
            if self._budget < 0:
                raise Damaged(self._file.path, "%s takes more than %d bytes" % (self._what, self._limit))
        data = self._file.read(self._position, size)
        self._position += size
        return data

    def readinto(self, buffer: Any) -> int:
        """Fill ``buffer`` as far as there are bytes, and return how many; torch reads this way."""
        data = self.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)
