"""A folder that comes into being whole or not at all.

It is filled under another name beside its place, forced to disk, and renamed. Whatever happens meanwhile (a kill, a full
disk, a power cut), its place is empty or holds all of it. What a killed run left behind is removed by the next one.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import stat

from .files import Unreadable, cause, shown

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import TracebackType

_SUFFIX = ".rdiag-partial"
_MARGIN = 16 << 20
"""Bytes of free space beyond what will be written: the file system's own records, and other writers."""


def place_for(out: str) -> str:
    """Return the absolute path of a folder to be made.

    Raises:
        Unreadable: something is there already, or the folder that it is to be made in is not.
    """
    place = os.path.abspath(out)
    if os.path.lexists(place):
        raise Unreadable(out, "exists already; nothing is overwritten", "give a name that is free, or move it away first")
    parent = os.path.dirname(place)
    if not os.path.isdir(parent):
        raise Unreadable(parent, "is no folder to make %s in" % shown(os.path.basename(place)), "make it first, or give another")
    return place


def check_space(place: str, needed: int) -> int:
    """Return the bytes that are free where ``place`` is to be made; raise Unreadable when ``needed`` are not."""
    parent = os.path.dirname(place)
    status = os.statvfs(parent)
    free = status.f_bavail * status.f_frsize
    if free < needed + _MARGIN:
        raise Unreadable(
            parent,
            "has %.2f GB of free space; %.2f GB are needed" % (free / 1e9, (needed + _MARGIN) / 1e9),
            "make room, or give a folder on another file system",
        )
    return free


class NewFolder:
    """The folder while it is being filled; use it in a ``with`` statement, write into :attr:`path`, then :meth:`keep` it.

    Args:
        place: where it will be, as :func:`place_for` returned it.
        tag: keeps runs apart that make the same folder at the same time; no slash in it.
    """

    def __init__(self, place: str, tag: str) -> None:
        self.place = place
        self._parent, name = os.path.split(place)
        # The name may be as long as names can be.
        self._prefix = "." + name[:120] + "."
        self.path = os.path.join(self._parent, self._prefix + tag[:40] + _SUFFIX)
        """Where it is now."""
        self._lock = -1

    def __enter__(self) -> NewFolder:
        """Remove what killed runs left, make the folder, hold a lock on it; raise Unreadable."""
        self._remove_leftovers()
        try:
            os.mkdir(self.path)
            self._lock = _locked(self.path)
        except OSError as error:
            raise Unreadable(self._parent, "a folder cannot be made in it: %s" % cause(error)) from None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Remove what was not kept."""
        if os.path.lexists(self.path):
            shutil.rmtree(self.path, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)

    def keep(self, readable_as: str) -> None:
        """Force the folder to disk and give it its name.

        Args:
            readable_as: a folder; whoever may read that may read the new one. rdiag itself runs with a umask that lets
                nobody else.

        Raises:
            Unreadable: meanwhile somebody made something of that name, or the disk failed.
        """
        try:
            mode = stat.S_IMODE(os.stat(readable_as).st_mode) & 0o777 | 0o700
            for name in os.listdir(self.path):
                os.chmod(os.path.join(self.path, name), mode & 0o666)
            os.chmod(self.path, mode)
            _sync(self.path)
            # Replaces nothing but an empty folder; anything else there is an error.
            os.rename(self.path, self.place)
            _sync(self._parent)
        except OSError as error:
            taken = error.errno in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR)
            raise Unreadable(self.place, "appeared meanwhile; nothing is overwritten" if taken else cause(error)) from None

    def _remove_leftovers(self) -> None:
        with contextlib.suppress(OSError):
            for name in os.listdir(self._parent):
                if name.startswith(self._prefix) and name.endswith(_SUFFIX):
                    _remove_unless_locked(os.path.join(self._parent, name))


def _locked(path: str) -> int:
    """Return a descriptor of the folder ``path`` with the lock on it, which ends with the process; raise OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno == errno.EWOULDBLOCK:
            os.close(descriptor)
            raise
        # A file system without locks: then leftovers stay, see below.
    return descriptor


def _remove_unless_locked(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(path, ignore_errors=True)
    finally:
        os.close(descriptor)


def _sync(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
