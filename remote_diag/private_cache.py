"""Small files in the user's cache folder that spare this machine the same work twice.

An entry is used only when it is a file of ours that nobody else may write to and its digest is right; anything else
counts as absent. Entries are readable by their owner only, written in one step, and few are kept. Where nothing can be
written, nothing is remembered, and that is all.
"""

from __future__ import annotations

import hashlib
import os
import stat
from pathlib import Path

from . import paths

_MAX_BYTES = 4 * 1024 * 1024


class Folder:
    """One kind of entries, in a folder of its own.

    Args:
        name: of the folder.
        version: stands at the beginning of every entry; one that begins otherwise is not used.
        kept: how many entries are kept, the newest ones.
    """

    def __init__(self, name: str, version: bytes, kept: int) -> None:
        self._name = name
        self._version = version
        self._kept = kept

    @property
    def path(self) -> Path:
        """Where the entries are; read anew each time, as the environment may change in a test or a notebook."""
        return paths.cache_dir() / self._name

    def read(self, name: str) -> bytes:
        """Return the body of the entry ``name``; raises OSError or ValueError when there is none that can be trusted."""
        header, _, body = _read_private(self.path / name).partition(b"\n")
        if header != self._header(body):
            raise ValueError("damaged")
        return body

    def write(self, name: str, body: bytes) -> None:
        """Keep ``body`` as ``name``, in one step; where that is impossible, nothing happens."""
        try:
            folder = self.path
            if not _may_create_in(folder):
                return
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            _require_private(folder.stat(), stat.S_IFDIR)
            temporary = folder / f".{name}.{os.urandom(8).hex()}"
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            try:
                with os.fdopen(descriptor, "wb") as stream:
                    stream.write(self._header(body) + b"\n" + body)
                temporary.replace(folder / name)
            except BaseException:
                temporary.unlink(missing_ok=True)
                raise
            self._forget_old(folder)
        except (OSError, ValueError):
            return

    def _header(self, body: bytes) -> bytes:
        return b"%s %s" % (self._version, hashlib.sha256(body).hexdigest().encode("ascii"))

    def _forget_old(self, folder: Path) -> None:
        entries = sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime_ns, reverse=True)
        for path in entries[self._kept :]:
            path.unlink(missing_ok=True)


def _may_create_in(folder: Path) -> bool:
    """Whether the nearest folder that exists is ours: `sudo rdiag` leaves nothing of root's in a user's home."""
    nearest = next((path for path in (folder, *folder.parents) if path.exists()), None)
    return nearest is not None and nearest.stat().st_uid == os.geteuid()


def _require_private(status: os.stat_result, kind: int) -> None:
    if stat.S_IFMT(status.st_mode) != kind or status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise ValueError("not a private file of ours")


def _read_private(path: Path) -> bytes:
    _require_private(path.parent.lstat(), stat.S_IFDIR)
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as stream:
        _require_private(os.fstat(descriptor), stat.S_IFREG)
        data = stream.read(_MAX_BYTES + 1)
    if len(data) > _MAX_BYTES:
        raise ValueError("too large")
    return data
