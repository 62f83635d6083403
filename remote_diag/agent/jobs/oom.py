"""Whether the kernel killed for lack of memory: its own counters, before and after."""

from __future__ import annotations

import os

_ROOT = "/sys/fs/cgroup"


class OomCounters:
    """Counts of OOM kills that this process can see: of its memory cgroup (version 1 or 2), and of the host.

    Args:
        proc_cgroup: the file that names the cgroups of this process.
        root: where cgroups are mounted.
        vmstat: the file with the host's counters.
    """

    def __init__(
        self, proc_cgroup: str = "/proc/self/cgroup", root: str = _ROOT, vmstat: str = "/proc/vmstat"
    ) -> None:
        self._cgroup = _find_counter(proc_cgroup, root)
        self._vmstat = vmstat
        self._before = self._read()

    @property
    def source(self) -> str | None:
        """The file with the cgroup's counter; None when there is none."""
        return self._cgroup

    def evidence(self) -> dict[str, object]:
        """Return how many kills were counted since the beginning: ``cgroup`` and ``host``, None where not counted."""
        now = self._read()
        counted = {
            name: None if before is None or now[name] is None else max(0, now[name] - before)  # type: ignore[operator]
            for name, before in self._before.items()
        }
        return {"source": self._cgroup, **counted}

    def _read(self) -> dict[str, int | None]:
        return {
            "cgroup": None if self._cgroup is None else _counter(self._cgroup),
            "host": _counter(self._vmstat),
        }


def _find_counter(proc_cgroup: str, root: str) -> str | None:
    """Return the file that counts the OOM kills of our memory cgroup."""
    try:
        with open(proc_cgroup) as stream:
            lines = stream.read(65536).splitlines()
    except OSError:
        return None
    for line in lines:
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if "memory" in controllers.split(","):
            candidates = [root + "/memory" + path.rstrip("/") + "/memory.oom_control", root + "/memory/memory.oom_control"]
        elif number == "0" and not controllers:
            candidates = [
                place + path.rstrip("/") + "/memory.events" for place in (root, root + "/unified")
            ] + [root + "/memory.events"]
        else:
            continue
        for candidate in candidates:
            # Inside a container the path may be that of the outside; then the mount itself is our cgroup.
            if os.path.isfile(candidate) and _counter(candidate) is not None:
                return candidate
    return None


def _counter(path: str) -> int | None:
    """Return the number behind ``oom_kill`` in a file of names and numbers."""
    try:
        with open(path) as stream:
            for line in stream:
                name, _, value = line.partition(" ")
                if name == "oom_kill":
                    return int(value)
    except (OSError, ValueError):
        return None
    return None
