"""Every process of a run, wherever it fled to: found, ended, and proven gone.

A run's processes are recognised in three ways, any of which is enough: descent from the agent (it adopts
orphans, where the kernel lets it), the environment variable RDIAG_RUN_ID, and the session of the probe. Only
``/proc/<pid>/{stat,environ}`` are read, and environ only of processes younger than the agent: reading that of
an older one that is stuck in the kernel could block us.
"""

from __future__ import annotations

import os
import signal

from .layout import MARKER

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Callable

GRACE = 2.0
"""Seconds between asking (SIGTERM) and killing."""
LIMIT = 5.0
"""Seconds of killing after which what is left counts as a survivor."""
_PR_SET_CHILD_SUBREAPER = 36
_HAS_PROC = os.path.exists("/proc/self/stat")


class Process:
    """A process as the kernel shows it in ``/proc/<pid>/stat``."""

    __slots__ = ("group", "name", "parent", "pid", "session", "started", "state", "threads")

    def __init__(self, pid: int, stat: bytes) -> None:
        opening, closing = stat.index(b"("), stat.rindex(b")")
        fields = stat[closing + 2 :].split()
        self.pid = pid
        self.name = stat[opening + 1 : closing].decode("utf-8", "backslashreplace")
        self.state = fields[0].decode("ascii", "replace")
        self.parent = int(fields[1])
        self.group = int(fields[2])
        self.session = int(fields[3])
        self.threads = int(fields[17])
        self.started = int(fields[19])
        """Clock ticks after boot; with the pid it names one process for good."""

    @property
    def dead(self) -> bool:
        """Whether only its exit status is left; a leader that ended before its threads is not dead."""
        return self.state in ("Z", "X", "x") and self.threads <= 1


def read_process(pid: int) -> Process | None:
    """Return what the kernel says of ``pid`` now; None when there is no such process."""
    try:
        with open("/proc/%d/stat" % pid, "rb", 0) as stream:
            return Process(pid, stream.read(4096))
    except (OSError, ValueError, IndexError):
        return None


def all_processes() -> dict[int, Process]:
    """Return every process that this one can see, by pid."""
    found = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            process = read_process(int(name))
            if process is not None:
                found[process.pid] = process
    return found


def become_subreaper() -> bool:
    """Ask the kernel to make orphaned descendants our children; return whether it will."""
    try:
        import ctypes

        return bool(ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0)
    except (ImportError, OSError, AttributeError):
        return False


def send(process: Process, number: int) -> None:
    """Signal ``process`` if it is still the process that was seen; otherwise do nothing."""
    handle = _open_handle(process.pid)
    if handle is None:
        if _same(process):
            _ignore_missing(os.kill, process.pid, number)
        return
    try:
        # The handle is bound to one process; what was checked after opening it is what gets the signal.
        if _same(process):
            _ignore_missing(getattr(signal, "pidfd_send_signal"), handle, number)  # noqa: B009 - newer than 3.8
    finally:
        os.close(handle)


def _open_handle(pid: int) -> int | None:
    """Return a pidfd; None where Python (3.8) or the kernel has none, or the process is gone."""
    opener: Callable[[int], int] | None = getattr(os, "pidfd_open", None)
    try:
        return None if opener is None else opener(pid)
    except OSError:
        return None


def _same(process: Process) -> bool:
    now = read_process(process.pid)
    return now is not None and now.started == process.started


def _ignore_missing(send_to: Callable[[int, int], object], target: int, number: int) -> None:
    try:  # noqa: SIM105 - contextlib would be one more import
        send_to(target, number)
    except (ProcessLookupError, PermissionError):
        pass


class Children:
    """Waits for every child of the agent, adopted ones included; remembers how the awaited ones ended."""

    def __init__(self) -> None:
        self._awaited: set[int] = set()
        self.ended: dict[int, int] = {}
        """Wait status of awaited children that have ended, by pid."""

    def await_(self, pid: int) -> None:
        """Remember how ``pid`` ends."""
        self._awaited.add(pid)

    def reap(self) -> bool:
        """Collect whoever has ended; return whether children are left."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return False
            if pid == 0:
                return True
            if pid in self._awaited:
                self._awaited.discard(pid)
                self.ended[pid] = status

    def pending(self) -> set[int]:
        """Return the awaited children that have not ended."""
        return self._awaited


class Tree:
    """The processes of one run.

    Args:
        run_id: value of RDIAG_RUN_ID in their environment.
        leader: pid of the probe's process, which leads a session and a group of its own.
        children: who waits for our children.
    """

    def __init__(self, run_id: str, leader: int, children: Children) -> None:
        self._marker = ("%s=%s" % (MARKER, run_id)).encode("ascii")
        self._leader = leader
        self._children = children
        self._agent = os.getpid()
        self._known: dict[int, int] = {}
        self._strangers: set[tuple[int, int]] = set()
        self._leader_waited_for = False
        own = read_process(self._agent) if _HAS_PROC else None
        self._epoch = 0 if own is None else own.started
        self.adopts_all = False
        """Whether orphans become our children, and did so before the probe's code ran."""

    def empty(self) -> bool:
        """Whether nothing of the run is left, when that can be told without looking at every process."""
        left = self._children.reap()
        return self.adopts_all and not left

    def members(self) -> dict[int, Process]:
        """Return the living processes of the run, found anew, by pid; never the agent, never its own helpers."""
        self._children.reap()
        everything = all_processes()
        helpers = self._children.pending() - {self._leader}
        offspring: dict[int, list[Process]] = {}
        for process in everything.values():
            offspring.setdefault(process.parent, []).append(process)
        found: dict[int, Process] = {}
        open_ends = [process for process in everything.values() if self._recognised(process)]
        open_ends += offspring.get(self._agent, [])
        while open_ends:
            process = open_ends.pop()
            if process.pid not in found and process.pid not in helpers and process.pid != self._agent:
                found[process.pid] = process
                self._known[process.pid] = process.started
                open_ends += offspring.get(process.pid, [])
        if self._leader in self._children.ended:
            # From the next look on, its number may belong to a stranger's session.
            self._leader_waited_for = True
        return {pid: process for pid, process in found.items() if not process.dead}

    def knows(self, pid: int) -> bool:
        """Whether ``pid`` belonged to the run when it was last seen."""
        return pid in self._known

    def _recognised(self, process: Process) -> bool:
        if process.pid == self._agent or process.started < self._epoch:
            return False
        if self._known.get(process.pid) == process.started:
            return True
        if not self._leader_waited_for and self._leader in (process.session, process.group):
            return True
        identity = (process.pid, process.started)
        if identity in self._strangers:
            return False
        if self._carries_marker(process.pid):
            return True
        self._strangers.add(identity)
        return False

    def _carries_marker(self, pid: int) -> bool:
        try:
            with open("/proc/%d/environ" % pid, "rb", 0) as stream:
                return self._marker in stream.read().split(b"\0")
        except OSError:
            return False

    def signal_group(self, number: int) -> bool:
        """Signal the probe's process group, for systems without ``/proc``; return whether it exists."""
        try:
            os.killpg(self._leader, number)
        except ProcessLookupError:
            return False
        except PermissionError:
            pass
        return True


class Ending:
    """Ends a tree step by step, so that the caller can go on talking to the client meanwhile.

    Args:
        tree: what to end.
        now: monotonic clock, seconds.
        grace: seconds between SIGTERM and SIGKILL; 0 kills at once.
        limit: seconds of killing before giving up.
    """

    def __init__(self, tree: Tree, now: float, grace: float = GRACE, limit: float = LIMIT) -> None:
        self._tree = tree
        self._kill_from = now + grace
        self._limit = limit
        self._asked: set[tuple[int, int]] = set()
        self._looks = 0
        self.ended: dict[int, str] = {}
        """Names of the processes that had to be signalled, by pid."""
        self.survivors: list[Process] = []

    def pause(self) -> float:
        """Return the seconds until the next step: few at first, more when it takes long on a large host."""
        return 0.02 if self._looks < 20 else 0.1

    def hurry(self, until: float) -> None:
        """Let the grace end at ``until``, unless it ends sooner."""
        self._kill_from = min(self._kill_from, until)

    def step(self, now: float) -> bool:
        """Signal whoever is left; return True when nobody is, or nothing more can be done."""
        self._looks += 1
        if self._tree.empty():
            return True
        killing = now >= self._kill_from
        out_of_time = now >= self._kill_from + self._limit
        if not _HAS_PROC:
            return not self._tree.signal_group(signal.SIGKILL if killing else signal.SIGTERM) or out_of_time
        members = self._tree.members()
        if not members or out_of_time:
            self.survivors = [members[pid] for pid in sorted(members)]
            return True
        for process in members.values():
            identity = (process.pid, process.started)
            self.ended.setdefault(process.pid, process.name)
            if killing:
                send(process, signal.SIGKILL)
            elif identity not in self._asked:
                self._asked.add(identity)
                send(process, signal.SIGTERM)
        return False
