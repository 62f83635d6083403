"""How much memory of the host may still be had: what the kernel calls available, and what the limits of containers leave."""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Iterator

UNTOLD = 1 << 30
"""Bytes that are taken for available where the kernel does not say."""
_UNLIMITED = 1 << 60
_FILES = {
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    2: ("memory.max", "memory.current", "inactive_file"),
}
"""Version of control groups -> limit, usage, and what of the usage the kernel gives back first (in memory.stat)."""


def available(meminfo: str = "/proc/meminfo", cgroup: str = "/proc/self/cgroup", root: str = "/sys/fs/cgroup") -> int:
    """Return the bytes that this process and its children may still take without being killed for it.

    Args:
        meminfo: the file of the host's memory.
        cgroup: the file that names the control groups of this process.
        root: where control groups are mounted.
    """
    host = _named(meminfo, "MemAvailable:")
    left = UNTOLD if host is None else host << 10
    return max(0, min([left, *_left_by_limits(cgroup, root)]))


def _left_by_limits(cgroup: str, root: str) -> Iterator[int]:
    for version, folder in _folders(cgroup, root):
        limit_file, usage_file, kept = _FILES[version]
        limit, usage = _number(os.path.join(folder, limit_file)), _number(os.path.join(folder, usage_file))
        if limit is not None and usage is not None and limit < _UNLIMITED:
            yield limit - usage + (_named(os.path.join(folder, "memory.stat"), kept) or 0)


def _folders(cgroup: str, root: str) -> Iterator[tuple[int, str]]:
    """Yield version and folder of our control group of memory, and of all that it is within: each may have a limit."""
    try:
        with open(cgroup) as stream:
            lines = stream.read(65_536).splitlines()
    except OSError:
        return
    for line in lines:
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if "memory" in controllers.split(","):
            version, mounts = 1, [os.path.join(root, "memory")]
        elif number == "0" and not controllers:
            version, mounts = 2, [root, os.path.join(root, "unified")]
        else:
            continue
        names = [name for name in path.split("/") if name not in ("", ".", "..")]
        for mount in mounts:
            # Inside a container the path may be that of the outside; then the mount itself is our group.
            for depth in range(len(names), -1, -1):
                yield version, os.path.join(mount, *names[:depth])


def _number(path: str) -> int | None:
    try:
        with open(path) as stream:
            return int(stream.read(64))
    except (OSError, ValueError):
        return None


def _named(path: str, name: str) -> int | None:
    """Return the number behind ``name`` in a file of names and numbers."""
    try:
        with open(path) as stream:
            for line in stream:
                words = line.split()
                if len(words) > 1 and words[0] == name:
                    return int(words[1])
    except (OSError, ValueError):
        return None
    return None
