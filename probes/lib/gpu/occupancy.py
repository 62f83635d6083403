"""Whether a GPU is free, and who is on it.

The one place that decides this, for the guard of active probes, for ``rdiag launch`` and for ``rdiag gpu``.

A GPU is free if no process computes on it, **and** it holds next to no memory beyond what the driver keeps for
itself, **and** it was idle twice in a row. Each of the three misses something by itself: another container's
processes are not listed, an idle holder of memory shows no load, and a load that was just set up holds little memory.

:class:`Inquiry` asks nothing itself. It names the next question and takes the answer, so that whoever has to keep
talking to somebody else meanwhile can.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from .thresholds import standard

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Iterable, Sequence

PROGRAM = "nvidia-smi"
SAMPLES = 2
"""Idle samples in a row."""
MAX_SAMPLES = 4
"""Without persistence mode the first question wakes the card, and its own work shows as load."""
SAMPLE_GAP = 0.5
"""Seconds between two samples: the driver renews them every 1/6 to 1 s."""
_FORMAT = "--format=csv,noheader,nounits"
_FIELDS = ("index", "uuid", "pci.bus_id", "memory.total", "memory.used", "utilization.gpu")
"""Every driver knows these; one that it does not know would cost the whole answer."""
GPUS_QUESTION = ("--query-gpu=" + ",".join(_FIELDS), _FORMAT)
APPS_QUESTION = ("--query-compute-apps=gpu_uuid,pid,process_name,used_memory", "--format=csv,noheader")
_UNUSED_WORDS = ("no running processes found",)
_NOT_SUPPORTED = frozenset({"[n/a]", "n/a", "[not supported]", "not supported"})
_MAX_NAMED = 5
_INITIAL_PID_NAMESPACE = "pid:[4026531836]"
_DEVICES = ("/dev/nvidia", "/dev/dxg")


class GpuProcess:
    """One process that computes on a GPU, as nvidia-smi names it."""

    __slots__ = ("memory", "name", "pid", "uuid")

    def __init__(self, line: str, uuid: str = "") -> None:
        """Parse ``pid, name, memory``; the name may hold commas. Raise ValueError for anything else."""
        pid, _, rest = line.partition(",")
        name, comma, memory = rest.rpartition(",")
        if not comma or not pid.strip().isdigit():
            raise ValueError("not a process: %r" % line[:200])
        self.uuid = uuid
        """UUID of its GPU: of the parent where that one is cut up (MIG)."""
        self.pid = int(pid)
        self.name = name.strip()
        self.memory = memory.strip()
        """With its unit, or why it is not known."""

    def describe(self) -> str:
        """Say who it is and whose."""
        user = owner(self.pid) if is_ours_to_see(self.pid) else None
        return "pid %d (%s, user %s, %s)" % (self.pid, self.name[:200], user or "unknown", self.memory[:40])


def parse_apps(lines: Iterable[str]) -> list[GpuProcess]:
    """Return the processes of an answer to :data:`APPS_QUESTION`; raise ValueError when it is none."""
    found = []
    for line in lines:
        if line.strip().lower() in _UNUSED_WORDS:
            continue
        uuid, comma, rest = line.partition(",")
        if not comma or not uuid.strip().startswith(("GPU-", "MIG-")):
            raise ValueError("not a process: %r" % line[:200])
        found.append(GpuProcess(rest, uuid.strip()))
    return found


def owner(pid: int) -> str | None:
    """Return the user name of a process, its number where it has no name, None where nobody can tell."""
    try:
        uid = os.stat("/proc/%d" % pid).st_uid
    except OSError:
        return None
    try:
        import pwd

        return pwd.getpwuid(uid).pw_name
    except (ImportError, KeyError):
        return str(uid)


def is_ours_to_see(pid: int) -> bool:
    """Whether the process of that number here is the one that the driver means.

    In a container the driver may name processes by the numbers they have outside; another one may bear that number
    here. One that has a device of a GPU open is not it by accident.
    """
    try:
        if os.readlink("/proc/self/ns/pid") == _INITIAL_PID_NAMESPACE:
            return True
    except OSError:
        return True
    folder = "/proc/%d/fd" % pid
    try:
        return any(os.readlink(os.path.join(folder, name)).startswith(_DEVICES) for name in os.listdir(folder))
    except OSError:
        return False


def describe(processes: Sequence[GpuProcess]) -> str:
    """Say who they are, the first few by name."""
    named = ", ".join(process.describe() for process in processes[:_MAX_NAMED])
    more = len(processes) - _MAX_NAMED
    return named + (" and %d more" % more if more > 0 else "")


@dataclass
class GpuUse:
    """How much one GPU is used."""

    index: int
    """As nvidia-smi counts."""
    uuid: str
    bus_id: str = ""
    memory_total_mib: float | None = None
    memory_used_mib: float | None = None
    utilization_pct: list[float | None] = field(default_factory=list)
    """Samples in order; None where the card has no such counter (MIG)."""
    processes: list[GpuProcess] = field(default_factory=list)

    @property
    def memory_limit_mib(self) -> float | None:
        """What a free GPU may hold, MiB."""
        return None if self.memory_total_mib is None else memory_limit(self.memory_total_mib)

    @property
    def idle(self) -> bool | None:
        """Whether the last samples show no load; None before there are enough. Without a counter nothing speaks against it."""
        return idle(self.utilization_pct)

    @property
    def free(self) -> bool:
        """Whether nobody uses it."""
        return self.busy is None

    @property
    def busy(self) -> str | None:
        """Say who or what occupies it; None when it is free."""
        if self.processes:
            return describe(self.processes)
        used, limit = self.memory_used_mib, self.memory_limit_mib
        if used is None or limit is None:
            return "nobody can tell how much of its memory is used"
        if used > limit:
            return (
                "%.0f MiB are held by a process that is not shown here: it is another container's, or it ended badly" % used
            )
        if not self.idle:
            shown = ", ".join("%.0f %%" % sample for sample in self.utilization_pct if sample is not None)
            return "it is at work (utilization %s) and shows no process" % shown
        return None


def memory_limit(total_mib: float) -> float:
    """Return how much a free GPU may hold, MiB, beyond what the driver reserves for itself.

    Since 510 used memory does not contain that reserve; drivers before it do not tell it apart.
    """
    share, floor = standard()["occupancy.memory_share"], standard()["occupancy.memory_floor_mib"]
    return max(share.value * total_mib, floor.value)


def idle(samples: Sequence[float | None]) -> bool | None:
    """Whether the last :data:`SAMPLES` samples of utilization (%) show no load; None when there are too few."""
    last = samples[-SAMPLES:]
    if len(last) < SAMPLES:
        return None
    below = standard()["occupancy.idle_below_pct"].value
    return all(sample is None or sample < below for sample in last)


class Inquiry:
    """The questions that tell who is on which GPU, one at a time.

    ::

        while inquiry.question is not None:
            sleep(inquiry.pause)
            inquiry.take(answer of nvidia-smi to inquiry.question)
        inquiry.gpus
    """

    def __init__(self) -> None:
        self._samples = 0
        self._asked_apps = False
        self.gpus: list[GpuUse] = []
        self.strangers: list[GpuProcess] = []
        """Processes on a GPU that the list of GPUs does not have."""
        self.question: tuple[str, ...] | None = GPUS_QUESTION
        """Arguments of nvidia-smi; None when everything is known."""

    @classmethod
    def going_on(cls, gpu: GpuUse) -> Inquiry:
        """Return an inquiry about one GPU whose first samples and processes are known from another answer.

        Several of them share a question: each takes the line about its own GPU, and one that makes no sense costs the
        others nothing.
        """
        inquiry = cls()
        inquiry.gpus, inquiry._samples, inquiry._asked_apps = [gpu], len(gpu.utilization_pct), True
        inquiry.question = inquiry._next()
        return inquiry

    @property
    def pause(self) -> float:
        """Seconds to let pass before the question is asked."""
        return SAMPLE_GAP if self._asked_apps else 0.0

    def take(self, lines: Sequence[str]) -> None:
        """Take the answer (blank lines left out); raise ValueError when it makes no sense."""
        if self._samples and not self._asked_apps:
            self._take_apps(lines)
        else:
            self._take_gpus(lines)
        self.question = self._next()

    def _next(self) -> tuple[str, ...] | None:
        if not self._asked_apps:
            return APPS_QUESTION
        # Who is named is not waited for.
        undecided = any(not gpu.idle and not gpu.processes for gpu in self.gpus)
        return GPUS_QUESTION if undecided and self._samples < MAX_SAMPLES else None

    def _take_gpus(self, lines: Sequence[str]) -> None:
        known = {gpu.uuid: gpu for gpu in self.gpus}
        seen = set()
        for line in lines:
            cells = [cell.strip() for cell in line.split(",")]
            values = dict(zip(_FIELDS, cells))
            if len(cells) != len(_FIELDS) or not values["index"].isdigit() or not values["uuid"]:
                raise ValueError("not a GPU: %r" % line[:200])
            gpu = known.get(values["uuid"])
            if gpu is None and self._samples:
                raise ValueError("another GPU appeared meanwhile: %r" % line[:200])
            if gpu is None:
                gpu = GpuUse(int(values["index"]), values["uuid"], values["pci.bus_id"])
                self.gpus.append(gpu)
            if values["uuid"] in seen:
                raise ValueError("one GPU twice: %r" % line[:200])
            seen.add(values["uuid"])
            if any(other is not gpu and other.index == int(values["index"]) for other in self.gpus):
                raise ValueError("two GPUs have one index: %r" % line[:200])
            gpu.memory_total_mib = _number(values["memory.total"], line)
            gpu.memory_used_mib = _number(values["memory.used"], line)
            gpu.utilization_pct.append(_number(values["utilization.gpu"], line))
        if not seen:
            raise ValueError("it lists no GPU")
        if len(seen) != len(self.gpus):
            raise ValueError("%d GPUs where there were %d" % (len(seen), len(self.gpus)))
        self._samples += 1

    def _take_apps(self, lines: Sequence[str]) -> None:
        by_uuid = {gpu.uuid: gpu for gpu in self.gpus}
        for process in parse_apps(lines):
            gpu = by_uuid.get(process.uuid)
            if gpu is None:
                self.strangers.append(process)
            else:
                gpu.processes.append(process)
        self._asked_apps = True

    @property
    def busy(self) -> list[tuple[GpuUse, str]]:
        """The GPUs that are not free, and who or what occupies them."""
        return [(gpu, gpu.busy) for gpu in self.gpus if gpu.busy is not None]


def _number(text: str, line: str) -> float | None:
    """Return a number; None where the card has no such value. Raise ValueError for every other word."""
    if text.lower() in _NOT_SUPPORTED:
        return None
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1e9:
        raise ValueError("%s in %r" % (text or "nothing", line[:200]))
    return value
