"""What is still running: the proof that nothing was left behind."""

from __future__ import annotations

import time
from pathlib import Path


def running(*words: str) -> list[str]:
    """Return ``pid: command line`` of every live process whose command line holds all ``words``."""
    found = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            line = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")
            state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if state not in "ZX" and all(word in line for word in words):
            found.append(f"{folder.name}: {line}")
    return found


def gone(*words: str, within: float = 10.0) -> list[str]:
    """Wait until no such process is left; return those that are."""
    until = time.monotonic() + within
    while time.monotonic() < until:
        if not running(*words):
            return []
        time.sleep(0.05)
    return running(*words)


def parent(pid: int) -> int:
    """Return the parent of a process."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
