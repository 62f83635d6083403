"""A local file that is a byte-for-byte copy of one log on a host, and grows with it.

The size of the file is the offset at which the copy goes on; nothing else is remembered, so nothing can disagree with
it. Before anything is appended, the host compares the last bytes that are here with its own. Bytes that were received
once are never overwritten and never deleted: where a log was replaced on the host, the file that is here is renamed
(``NAME.old-1``) and a new one begins.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob
import hashlib
import os
import re
import secrets
import stat
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from .errors import LocalIOError, RdiagError, StateUnknown
from .text import safe

CHECKED = 4096
"""At most so many bytes before the end are compared with the host's."""
SYNC_EVERY = 5.0
"""Seconds after which bytes that were written are on the disk, not only with the kernel."""

_SYNC_BYTES = 32 * 1024 * 1024


class Busy(Exception):
    """Another process keeps this file up to date."""


class Copy(Protocol):
    """What this side has of one log."""

    offset: int

    def tail(self) -> bytes:
        """Return the last bytes before :attr:`offset`, at most :data:`CHECKED`."""
        ...

    def append(self, data: memoryview) -> None:
        """Add what follows :attr:`offset`."""
        ...

    def sync(self, *, now: bool = False) -> None:
        """Have the disk keep what was added, if it is time to."""
        ...

    def close(self) -> None:
        """Let go of it; idempotent."""
        ...


class Position:
    """A copy that is not kept: it knows where it is, and its last bytes."""

    def __init__(self, offset: int = 0) -> None:
        self.offset = offset
        self._tail = b""

    def tail(self) -> bytes:
        """Return the last bytes before :attr:`offset`."""
        return self._tail

    def append(self, data: memoryview) -> None:
        """Go on by ``data``."""
        self.offset += len(data)
        self._tail = (self._tail + bytes(data[-CHECKED:]))[-CHECKED:]

    def sync(self, *, now: bool = False) -> None:
        """Do nothing: there is no disk."""

    def close(self) -> None:
        """Do nothing."""


class Mirror:
    """A copy in a file, locked against other writers for as long as it is open.

    Args:
        path: where; created (0600) when it does not exist, together with its folder.
        lazy: do not create it before there is something to keep.

    Raises:
        Busy: another process writes it.
        LocalIOError: it cannot be opened, or is no regular file.
    """

    def __init__(self, path: Path, *, lazy: bool = False) -> None:
        self.path = path
        self.offset = 0
        self._synced = 0
        self._descriptor = -1
        self._dirty_since: float | None = None
        self._syncing: threading.Thread | None = None
        self._problem: OSError | None = None
        if not (lazy and not os.path.lexists(path)):
            self._open()

    def _open(self) -> None:
        with _explained(self.path):
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._descriptor = _open_locked(self.path)
            self.offset = self._synced = os.fstat(self._descriptor).st_size

    def tail(self) -> bytes:
        """Return the last bytes before :attr:`offset`."""
        count = min(CHECKED, self.offset)
        if count == 0:
            return b""
        with _explained(self.path):
            return os.pread(self._descriptor, count, self.offset - count)

    def append(self, data: memoryview) -> None:
        """Add what follows; raise LocalIOError when not all of it could be written. What was, counts."""
        view = data
        if self._descriptor < 0:
            self._open_late()
        with _explained(self.path, self.offset):
            while view:
                written = os.pwrite(self._descriptor, view, self.offset)
                self.offset += written
                view = view[written:]
        if self._dirty_since is None:
            self._dirty_since = time.monotonic()

    def read(self, offset: int, count: int) -> bytes:
        """Return up to ``count`` bytes at ``offset``."""
        if offset >= self.offset:
            return b""
        with _explained(self.path):
            return os.pread(self._descriptor, min(count, self.offset - offset), offset)

    def sync(self, *, now: bool = False) -> None:
        """Have the disk keep what was added: all of it ``now``, or in the background, when it is due.

        Raises LocalIOError when the disk could not, this time or the last time.
        """
        late = self._dirty_since is not None and time.monotonic() - self._dirty_since >= SYNC_EVERY
        due = late or self.offset - self._synced >= _SYNC_BYTES or (now and self._dirty_since is not None)
        if self._syncing is not None and (now or not self._syncing.is_alive()):
            self._syncing.join()
            self._syncing = None
        if due and self._syncing is None:
            self._dirty_since = None
            self._synced = self.offset
            self._syncing = threading.Thread(target=self._write_through, name="sync", daemon=True)
            self._syncing.start()
            if now:
                self._syncing.join()
                self._syncing = None
        if self._problem is not None:
            problem, self._problem = self._problem, None
            with _explained(self.path):
                raise problem

    def _write_through(self) -> None:
        # In a thread of its own: a busy disk takes its time, and lines go on arriving meanwhile.
        try:
            os.fdatasync(self._descriptor)
        except OSError as error:
            self._problem = error

    def set_aside(self) -> tuple[Path, Mirror]:
        """Give the file another name and begin a new one; return (the other name, the new mirror).

        This object goes on with the renamed file.
        """
        path = self.path
        if self._descriptor < 0:
            self._open_late()
        fresh = path.with_name(f".{path.name}.{secrets.token_hex(6)}")
        with _explained(path):
            os.close(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600))
            # Locked before it can be seen under its name.
            successor = Mirror(fresh)
            try:
                self.path = _linked_aside(path)
                fresh.replace(path)
            except BaseException:
                successor.close()
                fresh.unlink()
                raise
        successor.path = path
        return self.path, successor

    def close(self) -> None:
        """Have the disk keep everything, and unlock."""
        if self._descriptor >= 0:
            try:
                self.sync(now=True)
            finally:
                os.close(self._descriptor)
                self._descriptor = -1

    def _open_late(self) -> None:
        try:
            self._open()
        except Busy:
            self.offset = 1
        if self.offset:
            raise LocalIOError(f"{self.path}: somebody else created it meanwhile", hint="run the same command again")


def older_copies(path: Path, count: int) -> list[Mirror]:
    """Open what was set aside of ``path`` last, at most ``count`` files, the oldest first; what cannot be had is left out."""
    numbers = sorted(
        int(ending)
        for one in path.parent.glob(f"{glob.escape(path.name)}.old-*")
        if (ending := one.name.rpartition("-")[2]).isascii() and ending.isdigit() and len(ending) < 6
    )
    found = []
    for number in numbers[-count:]:
        with contextlib.suppress(Busy, LocalIOError):
            found.append(Mirror(path.with_name(f"{path.name}.old-{number}"), lazy=True))
    return found


def with_copies(error: RdiagError, directory: Path, job: str) -> RdiagError:
    """Have an error about a job that the host does not have name what was copied of its logs before; return the error.

    Args:
        error: any; others are left as they are.
        directory: where copies are kept.
        job: its id (``finetune.v2``), or a name for every attempt.
    """
    pattern = re.compile(re.escape(job) + r"(\.v[0-9]+)?(\.err|\.rank[0-9]+)?\.log")
    kept = []
    if isinstance(error, StateUnknown):
        with contextlib.suppress(OSError):
            kept = sorted(path for path in directory.iterdir() if pattern.fullmatch(path.name))
    if kept:
        names = ", ".join(safe(str(path)) for path in kept[:4]) + (", ..." if len(kept) > 4 else "")
        error.hint = f"{error.hint or ''}\nits logs were copied before: {names}".lstrip()
    return error


def fingerprint(copy: Copy) -> tuple[int, str]:
    """Return (count, SHA-256) of the last bytes of ``copy``."""
    tail = copy.tail()
    return len(tail), hashlib.sha256(tail).hexdigest()


def described(copy: Copy) -> dict[str, object]:
    """Return what an agent needs to find the place where ``copy`` ends."""
    count, digest = fingerprint(copy)
    return {"offset": copy.offset, "bytes": count, "sha256": digest}


def _open_locked(path: Path) -> int:
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
        try:
            if _lock(descriptor, path):
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _lock(descriptor: int, path: Path) -> bool:
    """Lock the file; return whether it still has its name, which may have changed since it was opened."""
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "is not a regular file")
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise Busy(str(path)) from None
    try:
        return os.path.samestat(status, os.stat(path, follow_symlinks=False))  # noqa: PTH116 - samestat's partner
    except FileNotFoundError:
        return False


def _linked_aside(path: Path) -> Path:
    """Give ``path`` a second name that nobody has, and return it."""
    for number in range(1, 10_000):
        other = path.with_name(f"{path.name}.old-{number}")
        with contextlib.suppress(FileExistsError):
            try:
                os.link(path, other, follow_symlinks=False)
            except OSError as error:
                if error.errno not in {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}:
                    raise
                # A file system without hard links: take the name first, then replace what took it.
                os.close(os.open(other, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
                path.replace(other)
            return other
    raise OSError(errno.EEXIST, "has too many older copies beside it")


@contextlib.contextmanager
def _explained(path: Path, offset: int | None = None) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        kept = "" if offset is None else f"; its first {offset} bytes are kept"
        raise LocalIOError(
            f"{path}: {error.strerror or error}{kept}",
            hint="free space or choose another place with --output, then run the same command: it goes on from there",
        ) from error
