"""The processes of a job, wherever they fled to; and nobody else's, whatever numbers they have.

A process belongs to a job when it carries the job's marker in its environment, when it descends from one that does,
from the supervisor (which adopts orphans), or when it is in the session that the job began. A number alone proves
nothing: pids are used again, so a pid counts only together with the start time that belongs to it.
"""

from __future__ import annotations

import os

from ..layout import JOB_MARKER
from ..processes import all_processes, read_process

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ..processes import Process

    Identity = tuple[int, int]


def identity_alive(identity: Identity) -> bool:
    """Whether the process that had this pid and start time is there and no zombie."""
    process = read_process(identity[0])
    return process is not None and process.started == identity[1] and not process.dead


class JobTree:
    """What is alive of one job.

    Args:
        marker: value of RDIAG_JOB in the environment of its processes; None when it is not known.
        supervisor: pid and start time of its supervisor, which is no part of it.
        leader: pid and start time of the process that the supervisor started.
        epoch: nothing that started before this, in clock ticks after boot, belongs to it.
    """

    def __init__(self, marker: str | None, supervisor: Identity | None, leader: Identity | None, epoch: int) -> None:
        self._marker = None if marker is None else ("%s=%s" % (JOB_MARKER, marker)).encode("utf-8", "surrogateescape")
        self._supervisor = supervisor
        self._leader = leader
        self._epoch = epoch
        self._strangers: set[Identity] = set()
        self._known: set[Identity] = set()

    def empty(self) -> bool:
        """Whether nothing is left, when that can be told without looking at every process: it cannot."""
        return False

    def signal_group(self, number: int) -> bool:  # noqa: ARG002 - jobs need /proc
        """Return False: jobs are not ended by group."""
        return False

    def members(self) -> dict[int, Process]:
        """Return the living processes of the job, found anew, by pid; never the supervisor, never this process."""
        everything = all_processes()
        offspring: dict[int, list[Process]] = {}
        for process in everything.values():
            offspring.setdefault(process.parent, []).append(process)
        spared = {os.getpid()}
        open_ends = []
        if self._is(everything, self._supervisor):
            assert self._supervisor is not None  # noqa: S101 - see above
            spared.add(self._supervisor[0])
            open_ends += offspring.get(self._supervisor[0], [])
        session = self._leader[0] if self._leader is not None and self._is(everything, self._leader) else None
        open_ends += [process for process in everything.values() if self._recognised(process, session)]
        found: dict[int, Process] = {}
        while open_ends:
            process = open_ends.pop()
            if process.pid in found or process.pid in spared:
                continue
            found[process.pid] = process
            self._known.add((process.pid, process.started))
            open_ends += offspring.get(process.pid, [])
        return {pid: process for pid, process in found.items() if not process.dead}

    def _is(self, everything: dict[int, Process], identity: Identity | None) -> bool:
        if identity is None:
            return False
        process = everything.get(identity[0])
        return process is not None and process.started == identity[1]

    def _recognised(self, process: Process, session: int | None) -> bool:
        if process.started < self._epoch:
            return False
        identity = (process.pid, process.started)
        if identity in self._known or (session is not None and process.session == session):
            return True
        if self._marker is None or identity in self._strangers:
            return False
        content = read_environment(process.pid)
        if content is not None and self._marker in content.split(b"\0"):
            return True
        if content:
            # Between fork and exec a process still shows its parent's environment; one that shows nothing may be
            # on its way. What has another environment now may get ours with its next exec only from one of us.
            self._strangers.add(identity)
        return False


def read_environment(pid: int) -> bytes | None:
    """Return the environment of a process as it was when its program started; None when it is not to be had."""
    try:
        with open("/proc/%d/environ" % pid, "rb", 0) as stream:
            return stream.read()
    except OSError:
        return None
