"""Who is on which GPU: the processes that the driver lists, joined with what /proc knows of them."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from .missing import Missing, known
from .occupancy import GpuProcess, GpuUse, is_ours_to_see, owner
from .procfs import read_text

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .collect import Seen
    from .smi_reading import GpuReading, SmiProcess

_CONTAINER = re.compile(r"(docker|libpod|crio|cri-containerd|containerd|lxc)[-/.:]+([0-9a-f]{12,64}|[\w.-]+)")
_PODS = re.compile(r"kubepods[^\n]*?([0-9a-f]{64})")


@dataclass
class Holder:
    """One process on one GPU."""

    pid: int
    name: str
    kind: str | None
    """C computes, G draws; None where it is not said."""
    memory: float | Missing
    """MiB."""
    user: str | None
    """None where the process is not to be seen from here."""
    container: str | None
    alive: bool | None
    """Whether /proc has it; None in a container, where that proves nothing."""
    uuid: str | None
    bus_id: str | None


def container_of(pid: int, root: str = "/") -> str | None:
    """Return the container of a process, such as ``docker 0123456789ab``; None for one that is in none."""
    text = read_text(os.path.join(root, "proc/%d/cgroup" % pid), 65536) or ""
    pod = _PODS.search(text)
    if pod is not None:
        return "kubernetes %s" % pod.group(1)[:12]
    found = _CONTAINER.search(text)
    return None if found is None else "%s %s" % ({"libpod": "podman"}.get(found.group(1), found.group(1)), found.group(2)[:12])


def holders(seen: Seen) -> list[Holder] | None:
    """Return everybody on any GPU; None where that could not be found out."""
    if seen.processes is None:
        return None
    listed: dict[tuple[int, str | None], SmiProcess] = {}
    for process in [*seen.processes, *(one for reading in seen.readings for one in reading.processes)]:
        pid = known(process.pid)
        if pid is not None:
            identity = (pid, known(process.bus_id) or known(process.uuid))
            old = listed.setdefault(identity, process)
            if isinstance(old.memory_mib, Missing) and not isinstance(process.memory_mib, Missing):
                old.memory_mib = process.memory_mib
            if isinstance(old.kind, Missing):
                old.kind = process.kind
    return [_holder(pid, process, seen) for (pid, _), process in listed.items()]


def _holder(pid: int, process: SmiProcess, seen: Seen) -> Holder:
    ours = not seen.parsed and is_ours_to_see(pid)
    visible = ours and os.path.exists("/proc/%d" % pid)
    alive = True if visible or (ours and _exists(pid)) else None if seen.parsed or seen.around.container or seen.around.wsl else False
    return Holder(
        pid, known(process.name) or "", known(process.kind), process.memory_mib, owner(pid) if visible else None,
        container_of(pid) if visible else None, alive, known(process.uuid), known(process.bus_id),
    )  # fmt: skip


def _exists(pid: int) -> bool:
    """Whether there is such a process: /proc hides those of others where it is mounted with hidepid."""
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except (OSError, OverflowError):
        return False
    return True


def use_of(reading: GpuReading, seen: Seen, everybody: list[Holder] | None) -> GpuUse | None:
    """Return how much a GPU is used, for the one rule of :mod:`.occupancy`; None where that could not be found out."""
    uuid, bus, index = known(reading.uuid), known(reading.bus_id), known(reading.index)
    if everybody is None or uuid is None:
        return None
    use = GpuUse(
        -1 if index is None else index, uuid, bus or "", known(reading.memory_total_mib), known(reading.memory_used_mib),
        list(seen.load.get(uuid, ())),
    )  # fmt: skip
    for holder in everybody:
        if (holder.uuid == uuid or (bus is not None and holder.bus_id == bus)) and holder.kind != "G":
            memory = "memory unknown" if isinstance(holder.memory, Missing) else "%.0f MiB" % holder.memory
            use.processes.append(GpuProcess("%d, %s, %s" % (holder.pid, holder.name, memory), uuid))
    return use
