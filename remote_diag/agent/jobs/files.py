"""The files of a job: what is here already by its hash, what has to come, and an attempt's own copy of each."""

from __future__ import annotations

import fcntl
import os
import stat
from time import monotonic

from ..layout import BLOBS
from ..operations import Failure, Gone
from ..protocol import ENVIRONMENT
from ..request import is_sha256
from ..storage import StorageError, private_directory, write_all

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Iterable

    from ..operations import Peer
    from .request import SentFile

_PIECE = 1 << 20
_PROGRESS_EVERY = 0.2
_PATIENCE = 3600.0
_OPEN = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class JobFiles:
    """Brings the files of one launch to this host.

    Args:
        cache: the cache folder.
        files: what the job wants.
        peer: who sends what is missing.
    """

    def __init__(self, cache: str, files: Iterable[SentFile], peer: Peer) -> None:
        self._blobs = os.path.join(cache, BLOBS)
        self._files = list(files)
        self._peer = peer
        self._open: dict[str, _Incoming] = {}
        self._last_progress = 0.0

    def receive_missing(self) -> int:
        """Ask for every file that is not here, in one message; return how many bytes came.

        Raises:
            Failure: something arrived damaged, or cannot be stored.
            Gone: the client went away.
        """
        wanted = {one.sha256: one.size for one in self._files}
        missing = {name: size for name, size in wanted.items() if not self._is_here(name, size)}
        if not missing:
            return 0
        try:
            private_directory(self._blobs)
        except StorageError as error:
            raise Failure(ENVIRONMENT, str(error), error.hint) from None
        have = self._begun_before(missing)
        total = sum(missing.values())
        self._peer.put("need", {"files": sorted(missing), "have": have})
        done = sum(have.values())
        came = 0
        kept = False
        try:
            while missing:
                frame = self._peer.next(_PATIENCE)
                if frame is None or frame.kind not in ("file", "file-part"):
                    raise Failure(ENVIRONMENT, "the client did not send the files that were asked for")
                count = self._take(frame.kind, frame.payload, missing)
                came += count
                done += count
                self._tell(done, total, now=frame.kind == "file-part" or not missing)
        except Gone:
            kept = True
            raise
        finally:
            for incoming in self._open.values():
                incoming.close(keep=kept)
        return came

    def _begun_before(self, missing: dict[str, int]) -> dict[str, int]:
        """Return how many bytes of which files came already, over connections that were lost."""
        have = {}
        try:
            for name, size in missing.items():
                if os.path.lexists(_partial(self._blobs, name)):
                    incoming = self._open[name] = _Incoming(self._blobs, name)
                    incoming.go_on(size, self._peer)
                    if incoming.size:
                        have[name] = incoming.size
        except OSError as error:
            raise self._cannot_store(error) from None
        except Gone:
            for incoming in self._open.values():
                incoming.close(keep=True)
            raise
        return have

    def place(self, folder: str) -> None:
        """Give the job its own copy of each file in ``folder``; raise Failure when that cannot be."""
        try:
            os.mkdir(folder, 0o700)
            for one in self._files:
                target = os.path.join(folder, *one.path.split("/"))
                os.makedirs(os.path.dirname(target), mode=0o700, exist_ok=True)
                # A copy and no link: a job that rewrites its configuration must not rewrite that of the next one.
                self._copy(one, os.fsencode(target) if not target.isascii() else target)
        except OSError as error:
            raise Failure(ENVIRONMENT, "cannot write the job's files: %s" % error) from None

    def _is_here(self, name: str, size: int) -> bool:
        path = os.path.join(self._blobs, name)
        try:
            if os.lstat(path).st_size != size:
                return False
            digest = _hasher()
            with open(path, "rb", 0) as stream:
                for piece in iter(lambda: stream.read(_PIECE), b""):
                    digest.update(piece)
                    # Large files on a slow disk take longer than a client waits for a sign of life.
                    self._peer.pulse()
            # Somebody uses it: `clean` looks at this time.
            os.utime(path)
        except OSError:
            return False
        return bool(digest.hexdigest() == name)

    def _take(self, kind: str, payload: bytes, missing: dict[str, int]) -> int:
        head, _, data = payload.partition(b"\n")
        name = head.decode("ascii", "replace")
        if not is_sha256(name) or name not in missing:
            raise Failure(ENVIRONMENT, "the client sent a file that was not asked for")
        offset = 0
        if kind == "file-part":
            number, _, data = data.partition(b"\n")
            offset = int(number) if number.isdigit() and len(number) < 20 else -1
        try:
            incoming = self._open.get(name)
            if incoming is None:
                incoming = self._open[name] = _Incoming(self._blobs, name)
            if offset == 0 and incoming.size:
                incoming.begin_anew()
            if offset != incoming.size:
                raise Failure(ENVIRONMENT, "a part of a file is missing")
            incoming.add(data)
            if incoming.size >= missing[name]:
                del self._open[name]
                incoming.finish(missing.pop(name))
        except OSError as error:
            raise self._cannot_store(error) from None
        return len(data)

    def _cannot_store(self, error: OSError) -> Failure:
        return Failure(
            ENVIRONMENT,
            "cannot store a file in %s: %s" % (self._blobs, error.strerror),
            "free some space there, or set cache_dir: for this host in hosts.yaml to a folder with room",
        )

    def _tell(self, done: int, total: int, *, now: bool) -> None:
        """Say how much is here; the client sends parts only so far ahead of that."""
        time = monotonic()
        if now or time >= self._last_progress + _PROGRESS_EVERY:
            self._last_progress = time
            self._peer.put("progress", {"done": done, "total": total, "unit": "B", "label": "files"})

    def _copy(self, one: SentFile, target: Any) -> None:
        descriptor = os.open(target, _CREATE, 0o600)
        with open(os.path.join(self._blobs, one.sha256), "rb", 0) as source:
            try:
                for piece in iter(lambda: source.read(_PIECE), b""):
                    write_all(descriptor, piece)
                    self._peer.pulse()
                os.fchmod(descriptor, one.mode | 0o400)
            finally:
                os.close(descriptor)


class _Incoming:
    """A file on its way: under a hidden name until its hash was seen to be right.

    What came of it outlives a lost connection, and the next launch goes on there. Two launches that bring the same
    file at once do not share it: the second one takes a name of its own.
    """

    def __init__(self, folder: str, name: str) -> None:
        self._name = name
        self._path = os.path.join(folder, name)
        self._temporary = _partial(folder, name)
        self._descriptor = os.open(self._temporary, _OPEN, 0o600)
        if not _is_ours(self._descriptor, self._temporary):
            os.close(self._descriptor)
            self._temporary = os.path.join(folder, ".%s.%s" % (name, os.urandom(8).hex()))
            self._descriptor = os.open(self._temporary, _OPEN | os.O_EXCL, 0o600)
        self.begin_anew(empty=False)

    def begin_anew(self, *, empty: bool = True) -> None:
        """Forget what came."""
        if empty:
            os.ftruncate(self._descriptor, 0)
            os.lseek(self._descriptor, 0, os.SEEK_SET)
        self._digest = _hasher()
        self.size = 0

    def go_on(self, expected: int, peer: Peer) -> None:
        """Take what is here as the beginning; what is not shorter than the whole file cannot be that."""
        for piece in iter(lambda: os.read(self._descriptor, _PIECE), b""):
            self._digest.update(piece)
            self.size += len(piece)
            peer.pulse()
        if self.size >= expected:
            self.begin_anew()

    def add(self, data: bytes) -> None:
        write_all(self._descriptor, data)
        self._digest.update(data)
        self.size += len(data)

    def finish(self, expected: int) -> None:
        if self.size != expected or self._digest.hexdigest() != self._name:
            self.close(keep=False)
            raise Failure(
                ENVIRONMENT,
                "a file arrived damaged: its SHA-256 is not %s" % self._name,
                "it may have changed while it was sent; launch again",
            )
        try:
            os.fsync(self._descriptor)
            # Under its name before the lock is let go of.
            os.rename(self._temporary, self._path)
        finally:
            os.close(self._descriptor)
            self._descriptor = -1

    def close(self, *, keep: bool) -> None:
        if self._descriptor < 0:
            return
        try:
            if not keep or self._temporary != _partial(os.path.dirname(self._path), self._name):
                os.unlink(self._temporary)
        except OSError:
            return
        finally:
            os.close(self._descriptor)
            self._descriptor = -1


def _partial(folder: str, name: str) -> str:
    return os.path.join(folder, ".%s.part" % name)


def _is_ours(descriptor: int, path: str) -> bool:
    """Lock the beginning of a file; return whether nobody else brings it, and it still has its name."""
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.path.samestat(status, os.lstat(path))
    except OSError:
        return False


def _hasher() -> Any:
    # OpenSSL's, three times as fast as the interpreter's own: job files can be large.
    from hashlib import sha256

    return sha256()
