"""Files on the host: probe files kept by their hash, and the private directory of a run."""

from __future__ import annotations

import errno
import os
import stat

from . import layout
from .digest import sha256
from .removal import remove_tree, sweep

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .request import Request

_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)


class StorageError(Exception):
    """A file or folder cannot be made, or must not be used; the text says which and why.

    Args:
        message: the cause.
        hint: what to do about it.
    """

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint


def _explained(what: str, error: OSError) -> StorageError:
    reason = error.strerror or str(error)
    hint = None
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        hint = "free some space there, or set cache_dir: for this host in hosts.yaml to a folder with room"
    elif error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        hint = "make it writable, or set cache_dir: for this host in hosts.yaml to a folder that is"
    return StorageError("cannot %s: %s" % (what, reason), hint)


def private_directory(path: str) -> None:
    """Make ``path`` with mode 0700, or check that what is there belongs to us alone to write to.

    Raises:
        StorageError: it cannot be made; it is a link or no folder; somebody else owns it or may write to it.
    """
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        pass
    except OSError as error:
        raise _explained("make the folder %s" % path, error) from None
    status = os.lstat(path)
    fix = "remove it, or set cache_dir: for this host in hosts.yaml to another folder"
    if stat.S_ISLNK(status.st_mode):
        raise StorageError("%s is a symbolic link; rdiag writes into no folder that it did not make" % path, fix)
    if not stat.S_ISDIR(status.st_mode):
        raise StorageError("%s is not a folder" % path, fix)
    if status.st_uid != os.geteuid():
        raise StorageError("%s belongs to user %d, not to user %d" % (path, status.st_uid, os.geteuid()), fix)
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise StorageError("%s can be written to by other users" % path, "chmod 700 %s" % path)


def create(path: str, content: bytes) -> None:
    """Create ``path`` (0600) holding ``content``; whatever is there already is not touched.

    Raises:
        OSError: it exists, or cannot be written; then nothing is left behind.
    """
    descriptor = os.open(path, _CREATE, 0o600)
    try:
        write_all(descriptor, content)
    except BaseException:
        os.unlink(path)
        raise
    finally:
        os.close(descriptor)


def write_all(descriptor: int, content: bytes) -> None:
    """Write all of ``content``; raise OSError when that fails."""
    view = memoryview(content)
    while view:
        view = view[os.write(descriptor, view) :]


class Blobs:
    """Probe files by the SHA-256 of their bytes: those of the bundle, and those that came over a session."""

    def __init__(self, bundle: str, cache: str) -> None:
        self._shipped = os.path.join(bundle, layout.BLOBS)
        self._kept = os.path.join(cache, layout.BLOBS)

    def read(self, name: str) -> bytes | None:
        """Return the bytes whose hash is ``name``; None when they are not here or damaged.

        They are read once, and what is returned is what was hashed.
        """
        for folder in (self._shipped, self._kept):
            path = os.path.join(folder, name)
            try:
                with open(path, "rb", 0) as stream:
                    content = stream.read()
            except OSError:
                continue
            if sha256(content) == name:
                return content
        return None

    def store(self, name: str, content: bytes) -> None:
        """Keep ``content``, whose hash is ``name``, for later runs; replaces a damaged copy.

        Raises:
            StorageError: it cannot be written.
        """
        private_directory(self._kept)
        path = os.path.join(self._kept, name)
        temporary = os.path.join(self._kept, ".%s.%s" % (name, os.urandom(8).hex()))
        try:
            create(temporary, content)
            os.rename(temporary, path)
        except OSError as error:
            raise _explained("write %s" % path, error) from None


class RunDirectory:
    """The private directory of one run: made, filled, and removed with everything in it."""

    def __init__(self, cache: str, run_id: str) -> None:
        self.paths = layout.RunPaths(cache, run_id)
        self.path = self.paths.directory
        self._cache = cache
        self._identity: tuple[int, int] | None = None

    def make(self, request: Request, probe: bytes) -> None:
        """Create the directory and what the probe's process needs in it.

        Raises:
            StorageError: something cannot be made or must not be used, or a run of this name exists.
        """
        private_directory(self._cache)
        private_directory(os.path.join(self._cache, layout.RUNS))
        try:
            os.mkdir(self.path, 0o700)
            status = os.lstat(self.path)
            self._identity = (status.st_dev, status.st_ino)
            create(self.paths.probe, probe)
            create(self.paths.request, request.payload)
        except FileExistsError:
            raise StorageError("a run named %s exists in %s" % (os.path.basename(self.path), self._cache)) from None
        except OSError as error:
            raise _explained("write to %s" % self.path, error) from None

    def remove(self, until: float = float("inf")) -> None:
        """Delete the directory with all that it holds, unless something else stands in its place; follow no link.

        Args:
            until: when to give up, on ``time.monotonic``; another call goes on.
        """
        if self._identity is not None and remove_tree(self.path, self._identity, until):
            self._identity = None

    def sweep(self) -> None:
        """Delete what agents that were killed left beside this directory."""
        sweep(os.path.dirname(self.path))

    @property
    def exists(self) -> bool:
        """Whether the directory was made and not removed since."""
        return self._identity is not None
