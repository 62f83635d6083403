"""What is looked at before a job starts: room on the disk and in shared memory, and GPUs that nobody uses."""

from __future__ import annotations

import os
from time import monotonic

from ..guard import ANSWER_WITHIN, PROGRAM, Question, locate
from ..operations import Failure
from ..processes import Children
from ..protocol import ENVIRONMENT, REFUSED

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ..operations import Peer
    from .record import Job

SHM = "/dev/shm"  # noqa: S108 - where torch's data loaders and NCCL share memory
DEFAULT_DISK = 1 << 30
DEFAULT_SHM = 1 << 30
"""Needed by a job with GPUs unless it says otherwise; docker gives 64 MiB, of which NCCL and data loaders die."""
_FORCE = "--force launches it all the same"


def check_room(folder: str, needed: int | None, shm: int | None, *, has_gpus: bool) -> list[str]:
    """Return what there is too little of, one sentence each.

    Args:
        folder: where the job writes.
        needed: bytes of disk that it says it needs; None for the default.
        shm: bytes of /dev/shm that it says it needs; None for the default, which applies to jobs with GPUs.
        has_gpus: whether it asked for GPUs.
    """
    problems = []
    disk = DEFAULT_DISK if needed is None else needed
    free = _free(folder)
    if free is not None and free < disk:
        problems.append("%s has %s free; the job needs %s" % (folder, _size(free), _size(disk)))
    wanted = shm if shm is not None else DEFAULT_SHM if has_gpus else 0
    if wanted:
        free = _free(SHM)
        if free is None:
            problems.append("there is no %s; the job needs %s of it" % (SHM, _size(wanted)))
        elif free < wanted:
            problems.append("%s has %s free; the job needs %s" % (SHM, _size(free), _size(wanted)))
    return problems


def _free(path: str) -> int | None:
    try:
        status = os.statvfs(path)
    except OSError:
        return None
    return status.f_bavail * status.f_frsize


def _size(count: int) -> str:
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20)):
        if count >= factor:
            return "%.1f %s" % (count / factor, unit)
    return "%d B" % count


class GpuChoice:
    """Which GPUs a job gets.

    Args:
        wanted: a count, or indexes.
        env: environment variables, by whose PATH nvidia-smi is found.
        running: the jobs of this host that run now; their GPUs are taken, even if nothing computes on them yet.
        force: take them although somebody uses them, or nobody can tell.
        peer: the client, whose beats are answered meanwhile.
        smi_lock: path of the lock of the GPU driver; None where there is none.
    """

    def __init__(
        self,
        wanted: int | list[int],
        env: dict[str, str],
        running: list[Job],
        *,
        force: bool,
        peer: Peer,
        smi_lock: str | None,
    ) -> None:
        self._wanted = wanted
        self._env = env
        self._running = running
        self._force = force
        self._peer = peer
        self._smi_lock = smi_lock
        self.overridden: list[str] = []
        """What ``force`` overrode, one sentence each."""

    def choose(self) -> list[int]:
        """Return the indexes, as nvidia-smi counts; raise Failure when they are not to be had."""
        if self._wanted == 0:
            return []
        try:
            indexes, busy = self._look()
        except ValueError as error:
            self._object("cannot tell whether the GPUs are free: %s" % error, "if you know that they are, " + _FORCE)
            return self._wanted if isinstance(self._wanted, list) else list(range(self._wanted))
        if isinstance(self._wanted, list):
            return self._take(self._wanted, indexes, busy)
        if self._wanted > len(indexes):
            raise Failure(ENVIRONMENT, "%d GPUs are wanted and this host has %d" % (self._wanted, len(indexes)))
        # The free ones first; with --force the busy ones fill up.
        free = [index for index in indexes if index not in busy]
        chosen = sorted((free + [index for index in indexes if index in busy])[: self._wanted])
        if len(free) < self._wanted:
            owners = "; ".join("GPU %d: %s" % (index, busy[index]) for index in indexes if index in busy)
            self._object(
                "%d GPUs are wanted and %d are free: %s" % (self._wanted, len(free), owners),
                "wait until they are free, or stop their owners; " + _FORCE,
            )
        return chosen

    def _take(self, wanted: list[int], indexes: list[int], busy: dict[int, str]) -> list[int]:
        strange = [index for index in wanted if index not in indexes]
        if strange:
            raise Failure(
                ENVIRONMENT, "there is no GPU %s; this host has %s" % (strange[0], ", ".join(map(str, indexes)) or "none")
            )
        owners = "; ".join("GPU %d: %s" % (index, busy[index]) for index in wanted if index in busy)
        if owners:
            self._object("in use: " + owners, "wait until they are free, or stop their owners; " + _FORCE)
        return wanted

    def _object(self, message: str, hint: str) -> None:
        if not self._force:
            raise Failure(REFUSED, message, hint)
        self.overridden.append(message)

    def _look(self) -> tuple[list[int], dict[int, str]]:
        """Return (indexes, who uses which of them); raise ValueError when nvidia-smi does not say."""
        from probes.lib.gpu.occupancy import Inquiry, describe

        inquiry = Inquiry()
        while inquiry.question is not None:
            self._wait(inquiry.pause)
            inquiry.take(self._ask(inquiry.question))
        if inquiry.strangers:
            raise ValueError("%s is on a GPU that is not listed" % describe(inquiry.strangers))
        busy = self._promised()
        busy.update({gpu.index: reason for gpu, reason in inquiry.busy})
        return sorted(gpu.index for gpu in inquiry.gpus), busy

    def _wait(self, seconds: float) -> None:
        until = monotonic() + seconds
        while monotonic() < until:
            self._peer.next(max(0.0, until - monotonic()))

    def _promised(self) -> dict[int, str]:
        promised: dict[int, str] = {}
        for job in self._running:
            for index in job.record.get("gpus") or []:
                if isinstance(index, int):
                    promised[index] = "job %s" % job.id
        return promised

    def _ask(self, arguments: tuple[str, ...]) -> list[str]:
        """Return the lines that nvidia-smi answers with; it is asked, and never waited for."""
        from probes.lib.gpu.one_at_a_time import PAUSE, Busy, Turn

        path = locate(self._env)
        turn = Turn(self._smi_lock, " ".join((PROGRAM, *arguments)), ANSWER_WITHIN)
        try:
            while not turn.ready():
                self._peer.next(PAUSE)
        except Busy as busy:
            raise ValueError(str(busy)) from None
        except BaseException:
            turn.end(over=True)
            raise
        try:
            question = Question(path, self._env, Children(), arguments, turn)
        except OSError as error:
            raise ValueError("%s cannot be started: %s" % (path, error.strerror)) from None
        try:
            while True:
                lines = question.lines()
                if lines is not None:
                    return lines
                if monotonic() > question.late:
                    raise ValueError("%s does not answer: the driver may hang" % PROGRAM)
                if question.reading:
                    self._peer.next(0.1, question.descriptor)
                    question.read()
                else:
                    self._peer.next(0.002)
        finally:
            question.abandon()
