"""Log files that grow, and are rotated, truncated and deleted while they are read.

A *segment* is one file (an inode) read from an offset. A log is a name, and the segments that had this name one after
the other. Whatever happens to the name, a segment is read to its end before the next one begins, and is still looked
at for a while afterwards: a process that inherited the file goes on writing into it after it was renamed.
"""

from __future__ import annotations

import os
import stat

from .digest import sha256

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Callable

CHUNK = 256 * 1024
"""Bytes that are read at once."""
CHECKED = 4096
"""At most so many bytes before an offset are compared to find out whether a copy belongs to a file."""
_GUARD = 256
RETIRED = 4
"""So many files that lost their name are looked at, for what is still written into them."""
_SIBLINGS = 64
_SCAN = 1 << 16


class Rewritten(Exception):
    """What was read of a file is no longer in it: it was truncated, or written anew."""


class Segment:
    """One open file; read-only.

    Args:
        path: absolute; it has to be a regular file, and no link.
        held: a descriptor of a process, ``/proc/<pid>/fd/<n>``, that is this file whatever became of its name.

    Raises:
        OSError: it cannot be opened, or is something else.
    """

    def __init__(self, path: str, held: str | None = None) -> None:
        self.path = path
        links = os.O_NOFOLLOW if held is None else 0
        self.descriptor = os.open(held or path, os.O_RDONLY | links | os.O_NONBLOCK | os.O_CLOEXEC)
        status = os.fstat(self.descriptor)
        if not stat.S_ISREG(status.st_mode):
            os.close(self.descriptor)
            raise OSError("%s is not a regular file" % path)
        self.identity = (status.st_dev, status.st_ino)
        self.offset = 0
        self.end: int | None = None
        """Where reading stops; None for as long as it grows."""
        self.number = -1
        self.older: int | None = None
        """Which of the client's older copies goes on with this; None for the copy that has the log's name."""
        self.event = ""
        self._guard = b""

    def close(self) -> None:
        """Close the file; idempotent."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def size(self) -> int:
        """Return the size now, bytes."""
        return os.fstat(self.descriptor).st_size

    def seek(self, offset: int) -> None:
        """Go on at ``offset``."""
        self.offset = offset
        count = min(_GUARD, offset)
        self._guard = os.pread(self.descriptor, count, offset - count)

    def matches(self, offset: int, count: int, digest: str) -> bool:
        """Whether the ``count`` bytes before ``offset`` are here and have this SHA-256."""
        if self.size() < offset:
            return False
        return sha256(os.pread(self.descriptor, count, offset - count)) == digest

    def read(self, limit: int) -> bytes:
        """Return the next bytes, at most ``limit``, none at the end for now; raise Rewritten."""
        if self.end is not None:
            limit = max(0, min(limit, self.end - self.offset))
        guard = self._guard
        data = os.pread(self.descriptor, len(guard) + limit, self.offset - len(guard))
        # One read answers both questions: is what was there still there, and is there more.
        if not data.startswith(guard):
            raise Rewritten
        if len(data) == len(guard):
            return b""
        fresh = data[len(guard) :]
        self.offset += len(fresh)
        self._guard = data[-_GUARD:]
        return fresh

    def start_of_last_lines(self, count: int) -> int:
        """Return the offset at which the last ``count`` lines begin; memory does not grow with their length."""
        position = size = self.size()
        if count <= 0:
            return size
        if size and os.pread(self.descriptor, 1, size - 1) == b"\n":
            position -= 1
        while position > 0:
            begin = max(0, position - _SCAN)
            piece = os.pread(self.descriptor, position - begin, begin)
            found = piece.count(b"\n")
            if found < count:
                count -= found
                position = begin
                continue
            end = len(piece)
            for _ in range(count):
                end = piece.rfind(b"\n", 0, end)
            return begin + end + 1
        return 0


class Copy:
    """What the client has of a log: how many bytes, and the hash of the last of them.

    Args:
        offset: bytes the client has.
        count: how many bytes before ``offset`` were hashed, at most :data:`CHECKED`.
        digest: their SHA-256.
    """

    def __init__(self, offset: int, count: int, digest: str) -> None:
        self.offset = offset
        self.count = count
        self.digest = digest


class Log:
    """One log by its name.

    Args:
        stream: what it is called on the wire: ``stdout``, ``rank0``.
        path: absolute path.
        number: gives each segment its number.
        held: gives the descriptor that the job writes into, as ``/proc/<pid>/fd/<n>``, or None. A job goes on writing
            into the file that it was started with, whatever happens to the name.
    """

    def __init__(
        self, stream: str, path: str, number: Callable[[], int], held: Callable[[], str | None] = lambda: None
    ) -> None:
        self.stream = stream
        self.path = path
        self.taken = False
        """Whether the client wants it."""
        self.news: list[tuple[str, Segment | None]] = []
        """(event, segment) that the client has to be told before anything else is read."""
        self._number = number
        self._segments: list[Segment] = []
        self._retired: list[Segment] = []
        self._held = held
        self._copy: Copy | None = None
        self._older_copies: list[Copy] = []
        self._start: Callable[[Segment], int] | None = None
        self._deleted = False
        self._frozen = False

    def take(
        self, copy: Copy | None, start: Callable[[Segment], int] | None, older: tuple[Copy, ...] = ()
    ) -> None:
        """Begin: after what the client has, or where ``start`` says, or at the beginning.

        Args:
            copy: what the client has of the file that has the name, or had it last.
            start: where to begin without a copy.
            older: what it has of files that had the name before; they are gone on with where they grew.
        """
        self.taken = True
        self._copy = copy
        self._older_copies = list(older[:RETIRED])
        self._start = start
        self.look()

    def size(self) -> int | None:
        """Return the size of the file that has the name now; None when there is none."""
        try:
            return os.lstat(self.path).st_size
        except OSError:
            return None

    def look(self) -> None:
        """Notice what happened to the name: it appeared, was given to another file, disappeared."""
        try:
            status = os.lstat(self.path)
        except OSError:
            if not self._segments:
                self._begin_without_name()
            if self._segments and not self._deleted:
                self._deleted = True
                self.news.append(("deleted", None))
            return
        self._deleted = False
        if self._segments and self._segments[-1].identity == (status.st_dev, status.st_ino):
            return
        try:
            segment = Segment(self.path)
        except OSError:
            return
        if self._segments:
            self._add(segment, "rotated")
        else:
            self._begin(segment)

    def freeze(self) -> None:
        """Nobody writes any more, or only what is there now is wanted: stop at the present sizes."""
        if not self._frozen:
            self.look()
            self._frozen = True
            for segment in self._segments + self._retired:
                segment.end = segment.size()

    def read(self, limit: int) -> tuple[Segment, int, bytes] | None:
        """Return (segment, offset, bytes) that come next; None when there is nothing more, or there is news first."""
        while self._segments and not self.news:
            segment = self._segments[0]
            piece = self._piece(segment, limit)
            if piece is not None:
                return piece
            if self.news or len(self._segments) == 1:
                break
            self._retire(self._segments.pop(0))
            self._announce(self._segments[0])
        if not self.news:
            for segment in self._retired:
                piece = self._piece(segment, limit)
                if piece is not None:
                    return piece
        return None

    def close(self) -> None:
        """Close every file."""
        for segment in self._segments + self._retired:
            segment.close()

    def _piece(self, segment: Segment, limit: int) -> tuple[Segment, int, bytes] | None:
        offset = segment.offset
        try:
            data = segment.read(limit)
        except Rewritten:
            self._begin_anew(segment)
            return None
        return (segment, offset, data) if data else None

    def _begin_anew(self, segment: Segment) -> None:
        """Read a file from its beginning that was truncated or rewritten; under a new number."""
        if segment in self._retired:
            self._retired.remove(segment)
            segment.close()
            return
        segment.event = "truncated" if segment.size() < segment.offset else "rewritten"
        segment.seek(0)
        if self._frozen:
            segment.end = segment.size()
        self._announce(segment)

    def _begin_without_name(self) -> None:
        """Read the file that the job writes into although its name is gone."""
        segment = self._open_held()
        if segment is not None:
            self._begin(segment)

    def _open_held(self) -> Segment | None:
        held = self._held()
        if held is None:
            return None
        try:
            return Segment(self.path, held)
        except OSError:
            return None

    def _begin(self, segment: Segment) -> None:
        """Open the log for the first time: find the places where the client's copies end."""
        held = self._open_held()
        if held is not None and held.identity == segment.identity:
            held.close()
            held = None
        if self._copy is None or (held is not None and not self._copy.offset and not self._older_copies):
            # Nothing is there yet: the file that the job writes into comes first, whatever its name is now.
            first = segment if held is None else held
            first.seek(min(first.size(), self._start(first)) if self._start is not None else 0)
            self._add(first, "begun" if self._copy is None else "resumed")
            if held is not None:
                self._add(segment, "rotated")
            return
        self._go_on(self._copy, segment, held)
        for position, copy in enumerate(self._older_copies):
            self._go_on_with_older(position, copy)

    def _go_on(self, copy: Copy, segment: Segment, held: Segment | None) -> None:
        """Go on after ``copy``, in the file that has the name or in an older one.

        Args:
            copy: what the client has.
            segment: the file that has the name.
            held: another file that the job writes into.
        """
        older = []
        if segment.matches(copy.offset, copy.count, copy.digest):
            segment.seek(copy.offset)
            self._add(segment, "resumed")
        else:
            older = self._older(copy)
            if not older and held is not None and held.matches(copy.offset, copy.count, copy.digest):
                older = [held]
            for position, sibling in enumerate(older):
                sibling.seek(0 if position else copy.offset)
                self._add(sibling, "rotated" if position else "resumed")
            if older:
                self._add(segment, "rotated")
            else:
                self._add(segment, "truncated" if segment.size() < copy.offset else "different")
        if held is not None and held not in older:
            held.close()

    def _go_on_with_older(self, position: int, copy: Copy) -> None:
        """Look again at a file that lost its name: whoever has it open may write into it still."""
        reading = {one.identity for one in self._segments + self._retired}
        held = self._open_held()
        found: Segment | None = None
        # No byte at all fits every file.
        named = self._older(copy) if copy.offset else []
        for segment in ([] if held is None else [held]) + named:
            fits = found is None and segment.identity not in reading
            if fits and segment.matches(copy.offset, copy.count, copy.digest):
                found = segment
            else:
                segment.close()
        if found is not None:
            found.seek(copy.offset)
            found.older, found.event = position, "resumed"
            if self._frozen:
                found.end = found.size()
            self._retire(found)
            self._announce(found)

    def _older(self, copy: Copy) -> list[Segment]:
        """Return the file that the client's copy belongs to and those that came after it: name.1, name.2, ..."""
        folder, name = os.path.split(self.path)
        try:
            names = [one for one in os.listdir(folder) if one.startswith((name + ".", name + "-"))][:_SIBLINGS]
        except OSError:
            return []
        opened: list[tuple[float, Segment]] = []
        for one in names:
            try:
                segment = Segment(os.path.join(folder, one))
            except OSError:
                continue
            opened.append((os.fstat(segment.descriptor).st_mtime, segment))
        opened.sort(key=lambda pair: pair[0])
        siblings = [segment for _, segment in opened]
        found = [index for index, one in enumerate(siblings) if one.matches(copy.offset, copy.count, copy.digest)]
        first = found[-1] if found else len(siblings)
        for segment in siblings[:first]:
            segment.close()
        return siblings[first:]

    def _add(self, segment: Segment, event: str) -> None:
        segment.event = event
        if self._frozen:
            segment.end = segment.size()
        self._segments.append(segment)
        if len(self._segments) == 1:
            self._announce(segment)

    def _announce(self, segment: Segment) -> None:
        segment.number = self._number()
        self.news.append((segment.event, segment))

    def _retire(self, segment: Segment) -> None:
        self._retired.append(segment)
        if len(self._retired) > RETIRED:
            self._retired.pop(0).close()
