"""What is written of a job, and what its state is: the record, checked against what is alive.

A record of a newer release may hold more than is known here, and one of an older release less; what is understood
is used, and what is not never makes a job disappear.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat

from .. import wirejson
from ..layout import JOBS, JobPaths, boot_id
from ..processes import read_process
from . import names
from .tree import JobTree, identity_alive

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

SCHEMA_VERSION = 1
STARTING = "starting"
RUNNING = "running"
EXITED = "exited"
FAILED = "failed"
STOPPED = "stopped"
LOST = "lost"
UNKNOWN = "unknown"
FINAL = (EXITED, FAILED, STOPPED)
"""States that the supervisor writes last."""
_MAX_RECORD = 4 << 20
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


def read_record(path: str) -> dict[str, Any] | None:
    """Return the JSON object in ``path``; None when there is none, or it cannot be understood. Follows no link."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    with open(descriptor, "rb") as stream:
        try:
            if not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
                return None
            value = wirejson.decode(stream.read(_MAX_RECORD))
        except (OSError, ValueError):
            return None
    return value if isinstance(value, dict) else None


def write_record(path: str, record: dict[str, Any], spare: str | None = None) -> None:
    """Write ``record`` so that a reader finds it as a whole or not at all, and so that it outlives a crash.

    Args:
        path: what to replace.
        record: the content.
        spare: a file whose room may be used when the disk is full.

    Raises:
        OSError: it cannot be written.
    """
    content = wirejson.encode(record) + b"\n"
    temporary = "%s.%s.tmp" % (path, os.urandom(4).hex())
    try:
        _write_new(temporary, content)
    except OSError as error:
        _unlink(temporary)
        if spare is None or error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        _write_over(spare, content)
        temporary = spare
    os.rename(temporary, path)
    sync_directory(os.path.dirname(path))


def reserve(path: str, size: int = 16384) -> None:
    """Take room for a later record, if there is some."""
    try:
        _write_new(path, b" " * size)
    except OSError:
        return


def _write_new(path: str, content: bytes) -> None:
    descriptor = os.open(path, _CREATE, 0o600)
    try:
        _write_all(descriptor, content)
    finally:
        os.close(descriptor)


def _write_over(path: str, content: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        # The blocks are there already; the file is made shorter only afterwards. Blanks may follow JSON.
        _write_all(descriptor, content)
        os.ftruncate(descriptor, len(content))
    finally:
        os.close(descriptor)


def _write_all(descriptor: int, content: bytes) -> None:
    view = memoryview(content)
    while view:
        view = view[os.write(descriptor, view) :]
    os.fsync(descriptor)


def _unlink(path: str) -> None:
    try:
        os.unlink(path)
    except OSError:
        return


def sync_directory(path: str) -> None:
    """Make sure that the names in ``path`` outlive a crash, where the file system can promise that."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return
    try:
        os.fsync(descriptor)
    except OSError:
        return
    finally:
        os.close(descriptor)


def node() -> str:
    """Return the name of this machine, or container."""
    return os.uname().nodename


def integer(record: dict[str, Any], name: str) -> int | None:
    """Return a number of a record; None for anything else."""
    value = record.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def text(record: dict[str, Any], name: str) -> str | None:
    """Return a text of a record; None for anything else."""
    value = record.get(name)
    return value if isinstance(value, str) else None


def number(record: dict[str, Any], name: str) -> float | None:
    """Return a number of a record, as a float; None for anything else."""
    value = record.get(name)
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def is_locked(path: str) -> bool:
    """Whether the launcher or the supervisor of a job is alive, as far as its lock tells."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno in (errno.EAGAIN, errno.EACCES)
    finally:
        os.close(descriptor)
    return False


class Job:
    """One attempt, as its folder and the kernel show it.

    Args:
        directory: its folder.
    """

    def __init__(self, directory: str) -> None:
        self.paths = JobPaths(directory)
        self.id = self.paths.job
        self.record: dict[str, Any] = read_record(self.paths.record) or {}
        self.state: dict[str, Any] = read_record(self.paths.state) or {}

    @property
    def happened(self) -> bool:
        """Whether it is, or was, a job: a folder whose launch was cut off before the start is none."""
        return os.path.lexists(self.paths.started) or is_locked(self.paths.lock)

    @property
    def is_final(self) -> bool:
        """Whether the supervisor has written its last word."""
        return self.state.get("state") in FINAL

    def look_again(self) -> None:
        """Read the state anew."""
        self.state = read_record(self.paths.state) or self.state

    def supervised(self) -> bool:
        """Whether its supervisor, or the launcher before, is alive."""
        supervisor = self.identity("supervisor")
        if supervisor is not None and self.is_here() and identity_alive(supervisor):
            return True
        return is_locked(self.paths.lock)

    def is_here(self) -> bool:
        """Whether it was started on this machine, since this machine was started."""
        return bool(self.state.get("boot_id", boot_id()) == boot_id())

    def identity(self, who: str) -> tuple[int, int] | None:
        """Return (pid, start time in clock ticks) of the ``supervisor`` or of the ``leader``."""
        pid = integer(self.state, "supervisor_pid" if who == "supervisor" else "pid")
        started = integer(self.state, "supervisor_start_ticks" if who == "supervisor" else "start_ticks")
        return None if pid is None or started is None else (pid, started)

    def tree(self) -> JobTree:
        """Return its processes; none when they cannot be on this machine."""
        marker = text(self.record, "marker") or text(self.state, "marker")
        if not self.is_here():
            return JobTree(None, None, None, 0)
        return JobTree(
            marker,
            self.identity("supervisor"),
            self.identity("leader"),
            integer(self.state, "supervisor_start_ticks") or 0,
        )

    def judge(self) -> dict[str, Any]:
        """Return ``state``, ``message``, ``exit_code``, ``signal``: what can be said of it now."""
        self.look_again()
        recorded = self.state.get("state")
        if recorded in FINAL:
            return self._answer(str(recorded))
        if recorded not in (None, STARTING, RUNNING):
            return self._answer(UNKNOWN, "its record says %s, which this release does not know" % ascii(recorded)[:80])
        elsewhere = self._elsewhere()
        if elsewhere is not None:
            return elsewhere
        if self.supervised():
            return self._answer(RUNNING if recorded == RUNNING else STARTING)
        # The supervisor may have written its last word and left between the two looks.
        self.look_again()
        if self.is_final:
            return self._answer(str(self.state["state"]))
        return self._unsupervised()

    def _elsewhere(self) -> dict[str, Any] | None:
        if self.is_here():
            return None
        where = text(self.state, "node")
        if where is not None and where != node():
            return self._answer(UNKNOWN, "it was launched on %s, which shares this folder" % where[:100])
        return self._answer(LOST, "the host was rebooted while it ran")

    def _unsupervised(self) -> dict[str, Any]:
        members = self.tree().members()
        if members:
            pids = ", ".join(str(pid) for pid in sorted(members)[:5])
            return self._answer(
                RUNNING,
                "its supervisor is gone and %d of its processes go on (pid %s); how it ends will not be known"
                % (len(members), pids),
            )
        if os.path.lexists(self.paths.stop):
            return self._answer(STOPPED, "its supervisor is gone, and so are its processes")
        return self._answer(LOST, "its supervisor was killed; how it ended is not known")

    def _answer(self, state: str, message: str = "") -> dict[str, Any]:
        return {
            "state": state,
            "message": message or text(self.state, "message") or "",
            "exit_code": integer(self.state, "exit_code"),
            "signal": integer(self.state, "signal"),
        }


def all_jobs(cache: str) -> list[Job]:
    """Return every job of this host, the newest attempt of each name last."""
    folder = os.path.join(cache, JOBS)
    try:
        found = os.listdir(folder)
    except OSError:
        return []
    parts = sorted((split, name) for name in found for split in [names.split(name)] if split is not None)
    return [Job(os.path.join(folder, name)) for _, name in parts if not os.path.islink(os.path.join(folder, name))]


def find(cache: str, wanted: str) -> Job | None:
    """Return the job ``wanted`` (``finetune.v2``), or its latest attempt (``finetune``); None when there is none."""
    attempts = [
        job for job in all_jobs(cache) if wanted in (job.id, (names.split(job.id) or ("",))[0]) and job.happened
    ]
    return attempts[-1] if attempts else None


def start_ticks(pid: int) -> int | None:
    """Return when a process started, clock ticks after boot; None when it is gone."""
    process = read_process(pid)
    return None if process is None else process.started
