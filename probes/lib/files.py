"""Files from elsewhere, read in bounded pieces.

Whatever a path leads to, opening and reading it here ends soon: a FIFO or a device is refused, nothing is mapped into
memory, and a file that shrinks meanwhile is an error instead of a signal.
"""

from __future__ import annotations

import contextlib
import os
import stat

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import TracebackType


class Unreadable(Exception):
    """An input cannot be used: it is missing, may not be read, or is of a kind that is not understood.

    Args:
        path: the file or folder.
        reason: what is the matter with it.
        hint: what to do about it.
    """

    def __init__(self, path: str, reason: str, hint: str | None = None) -> None:
        super().__init__("%s: %s" % (shown(path), reason))
        self.path = path
        self.reason = reason
        self.hint = hint


class Absent(Unreadable):
    """What was looked for is not in a checkpoint that was looked through."""


class Damaged(Exception):
    """A file contradicts itself or its format.

    Args:
        path: the file.
        reason: the contradiction.
    """

    hint = "compare its size and hash with the original's, and copy it again"

    def __init__(self, path: str, reason: str) -> None:
        super().__init__("%s: %s" % (shown(path), reason))
        self.path = path
        self.reason = reason


def shown(text: str) -> str:
    """Return ``text`` (a path, a name from a file) encodable as UTF-8; what is not becomes an escape."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def quoted(text: str) -> str:
    """Return a name from a file, quoted, escaped and at most 80 characters long."""
    return ascii(text if len(text) <= 80 else text[:79] + "~")


def listed(names: list[str]) -> str:
    """Return the first names from a file, each as :func:`quoted`, and how many more there are."""
    more = ", and %d more" % (len(names) - 6) if len(names) > 6 else ""
    return ", ".join(quoted(name) for name in names[:6]) + more


class Meter:
    """Counts what is read from files."""

    def __init__(self) -> None:
        self.bytes = 0
        """Bytes read so far."""
        self.files: list[str] = []
        """Paths of the files that were opened, in order."""


class File:
    """One regular file, open for reading.

    Symbolic links are followed: a checkpoint in a download cache is made of them.

    Args:
        path: the file.
        meter: told of every byte.

    Raises:
        Unreadable: no such file, no permission, or not a regular file.
    """

    def __init__(self, path: str, meter: Meter) -> None:
        self.path = path
        self._meter = meter
        try:
            # Without O_NONBLOCK, opening a FIFO waits for a writer that never comes.
            self._descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except (OSError, ValueError) as error:
            raise Unreadable(path, cause(error), advice(path, error)) from None
        status = os.fstat(self._descriptor)
        if not stat.S_ISREG(status.st_mode):
            os.close(self._descriptor)
            raise Unreadable(path, "is %s, not a regular file" % kind_of(status.st_mode), "give a file, or a folder with files")
        self.size = status.st_size
        """Bytes, when it was opened."""
        meter.files.append(path)

    def __enter__(self) -> File:
        """Return the file."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close it."""
        self.close()

    def close(self) -> None:
        """Close it; a second time does nothing."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def read(self, offset: int, count: int) -> bytes:
        """Return exactly ``count`` bytes from ``offset`` on.

        Raises:
            Damaged: the file is shorter than that.
            Unreadable: the read failed.
        """
        if offset < 0 or count < 0 or offset + count > self.size:
            raise Damaged(self.path, "bytes %d to %d are asked for, the file has %d" % (offset, offset + count, self.size))
        parts = []
        while count:
            try:
                # Linux returns at most 2 GiB at a time; network file systems may return less.
                part = os.pread(self._descriptor, min(count, 1 << 26), offset)
            except OSError as error:
                raise Unreadable(self.path, "cannot be read: %s" % cause(error)) from None
            if not part:
                raise Damaged(self.path, "it became shorter while it was being read")
            self._meter.bytes += len(part)
            parts.append(part)
            offset += len(part)
            count -= len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill ``buffer`` with the bytes from ``offset`` on; raise as :meth:`read` does."""
        end = offset + len(buffer)
        if offset < 0 or end > self.size:
            raise Damaged(self.path, "bytes %d to %d are asked for, the file has %d" % (offset, end, self.size))
        while len(buffer):
            try:
                count = os.preadv(self._descriptor, [buffer[: 1 << 26]], offset)
            except OSError as error:
                raise Unreadable(self.path, "cannot be read: %s" % cause(error)) from None
            if not count:
                raise Damaged(self.path, "it became shorter while it was being read")
            self._meter.bytes += count
            offset += count
            buffer = buffer[count:]

    def expect(self, offset: int, count: int) -> None:
        """Tell the system that these bytes will be read soon, in whatever order."""
        with contextlib.suppress(OSError):
            os.posix_fadvise(self._descriptor, offset, count, os.POSIX_FADV_WILLNEED)


def read_small(path: str, meter: Meter, limit: int) -> bytes:
    """Return the contents of a file of at most ``limit`` bytes; raise Unreadable or Damaged."""
    with File(path, meter) as file:
        if file.size > limit:
            raise Damaged(path, "%d bytes; a file of this kind has at most %d" % (file.size, limit))
        return file.read(0, file.size)


def cause(error: Exception) -> str:
    """Return what an OSError says, without the path that it repeats."""
    return (error.strerror or str(error)) if isinstance(error, OSError) else str(error)


def advice(path: str, error: Exception) -> str | None:
    """Return what to do about a path that could not be opened."""
    if isinstance(error, PermissionError):
        return "it must be readable for the user that rdiag logs in as"
    if not isinstance(error, FileNotFoundError):
        return None
    if os.path.islink(path):
        return "it is a link to %s, which does not exist: download it again" % shown(os.readlink(path))
    if path.startswith("~"):
        return "~ is taken literally; write the path out, or relative to %s" % shown(os.getcwd())
    if not os.path.isabs(path):
        return "the path is looked up on the host, below %s" % shown(os.getcwd())
    return "the path is looked up on the host"


def kind_of(mode: int) -> str:
    """Return what a file mode stands for, in words."""
    kinds = (
        (stat.S_ISDIR, "a folder"),
        (stat.S_ISFIFO, "a named pipe"),
        (stat.S_ISSOCK, "a socket"),
        (stat.S_ISCHR, "a character device"),
        (stat.S_ISBLK, "a block device"),
    )
    return next((words for test, words in kinds if test(mode)), "something else")
