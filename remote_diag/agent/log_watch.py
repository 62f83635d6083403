"""Waking up when a log grows: inotify where it works, looking every few milliseconds where it does not.

inotify says nothing about writes of other machines on a network file system. So files are looked at from time to time
in any case; when that finds something that inotify had not announced, inotify is not relied on any more.
"""

from __future__ import annotations

import os
import select

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_MODIFY, _MOVED_FROM, _MOVED_TO, _CREATE, _DELETE = 0x2, 0x40, 0x80, 0x100, 0x200
_EVENTS = _MODIFY | _MOVED_FROM | _MOVED_TO | _CREATE | _DELETE
_SHORTEST = 0.002
_LONGEST = 0.05
_GROWTH = 1.25
_SAFETY = 0.25
_TRUST = 3


class Watch:
    """Tells how long to wait before files are looked at again.

    Args:
        inotify: False to look only.
    """

    def __init__(self, *, inotify: bool = True) -> None:
        self.descriptor = -1
        """Readable when something happened in a watched folder; -1 without inotify."""
        self._library: Any = None
        self._folders: set[str] = set()
        self._interval = _SHORTEST
        self._missed = 0
        if inotify:
            self._open()

    def add(self, folder: str) -> None:
        """Watch the files of ``folder``; harmless when repeated."""
        if self.descriptor < 0 or folder in self._folders:
            return
        self._folders.add(folder)
        if self._library.inotify_add_watch(self.descriptor, os.fsencode(folder), _EVENTS) < 0:
            self.distrust()

    def distrust(self) -> None:
        """Do without inotify from now on."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def missed(self) -> None:
        """Something was found without having been announced; after a few times, do without announcements."""
        if self.descriptor < 0:
            return
        poller = select.poll()
        poller.register(self.descriptor, select.POLLIN)
        if not poller.poll(0):
            self._missed += 1
            if self._missed >= _TRUST:
                self.distrust()

    def drain(self) -> None:
        """Take what inotify says; that there was something is all that counts."""
        try:
            while len(os.read(self.descriptor, 1 << 16)) > 1 << 15:
                pass
        except OSError:
            pass

    def interval(self, *, busy: bool) -> float:
        """Return the seconds until the next look; ``busy`` when the last one found something."""
        if self.descriptor >= 0:
            return _SAFETY
        self._interval = _SHORTEST if busy else min(_LONGEST, self._interval * _GROWTH)
        return self._interval

    def close(self) -> None:
        """Stop watching."""
        self.distrust()

    def _open(self) -> None:
        try:
            import ctypes

            self._library = ctypes.CDLL(None, use_errno=True)
            descriptor: int = self._library.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        except (ImportError, OSError, AttributeError):
            return
        self.descriptor = descriptor
