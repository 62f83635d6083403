"""The traces that a running process has written, found without touching the process.

Only /proc is read: files that it has open, its working folder, and the folders that its environment names for traces. A
file that some process still has open for writing is not finished.
"""

from __future__ import annotations

import os
import stat
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Iterator

ENDINGS = (".trace.json", ".trace.json.gz", ".pt.trace.json", ".pt.trace.json.gz")
FOLDERS = ("SGLANG_TORCH_PROFILER_DIR", "VLLM_TORCH_PROFILER_DIR", "TORCH_PROFILER_DIR", "KINETO_LOG_DIR")
"""Variables that name where servers and torch put traces."""
WITHIN = ("", "log", "logs", "trace", "traces", "profile", "profiles", "profiler", "tb_logs")
"""Folders below the working folder that are looked into."""
DEPTH = 2
MAX_ENTRIES = 20_000
"""Entries of folders that are looked at."""


class NoProcess(Exception):
    """The process does not exist or may not be looked at."""


class Found:
    """What was found.

    Args:
        path: the newest finished trace as this process can open it; None for none.
        age_s: seconds since it was last written to.
        looked_in: folders that were searched.
        open_for_writing: traces that the process has not finished.
    """

    def __init__(self, path: str | None, age_s: float, looked_in: tuple[str, ...], open_for_writing: tuple[str, ...]) -> None:
        self.path = path
        self.age_s = age_s
        self.looked_in = looked_in
        self.open_for_writing = open_for_writing


def newest_trace(pid: int) -> Found:
    """Return the newest finished trace of a process.

    Raises:
        NoProcess: there is no such process, or it belongs to somebody else.
    """
    root = "/proc/%d" % pid
    try:
        working = os.readlink(root + "/cwd")
        own_root = os.readlink(root + "/root")
    except FileNotFoundError:
        raise NoProcess("there is no process %d" % pid) from None
    except OSError as error:
        raise NoProcess("process %d may not be looked at: %s" % (pid, error.strerror)) from None
    # In a container its paths begin elsewhere.
    inside = own_root if own_root == "/" else root + "/root"
    inside = "" if inside == "/" else inside
    opened, written = _open_files(root)
    folders = [inside + folder for folder in (*_named_folders(root), *(os.path.join(working, name) for name in WITHIN))]
    budget = [MAX_ENTRIES]
    looked, candidates = [], {inside + path for path in opened if is_trace(path)}
    for folder in dict.fromkeys(os.path.normpath(folder) for folder in folders):
        if os.path.isdir(folder):
            looked.append(folder)
            deep = 0 if folder == os.path.normpath(inside + working) else DEPTH
            candidates.update(_traces(folder, deep, budget))
    unfinished = {inside + path for path in written}
    finished = [(modified, path) for path in candidates - unfinished for modified in _modified(path)]
    newest = max(finished, default=None)
    return Found(
        None if newest is None else newest[1],
        0.0 if newest is None else max(0.0, time.time() - newest[0]),
        tuple(looked),
        tuple(sorted(candidates & unfinished)),
    )


def is_trace(path: str) -> bool:
    """Return whether a file is called as traces are: ``NAME.trace.json``, or any json with trace in its name."""
    name = os.path.basename(path).lower()
    return name.endswith(ENDINGS) or ("trace" in name and name.endswith((".json", ".json.gz")))


def _open_files(root: str) -> tuple[set[str], set[str]]:
    """Return paths of files that the process has open, and those of them that it writes."""
    opened: set[str] = set()
    written: set[str] = set()
    try:
        numbers = os.listdir(root + "/fd")
    except OSError:
        return opened, written
    for number in numbers[:MAX_ENTRIES]:
        try:
            path = os.readlink("%s/fd/%s" % (root, number))
            with open("%s/fdinfo/%s" % (root, number), encoding="ascii", errors="replace") as file:
                flags = next((line.split()[1] for line in file if line.startswith("flags:")), "0")
            writes = int(flags, 8) & os.O_ACCMODE != os.O_RDONLY
        except (OSError, ValueError, IndexError):
            continue
        if path.startswith("/") and is_trace(path):
            opened.add(path)
            if writes:
                written.add(path)
    return opened, written


def _named_folders(root: str) -> Iterator[str]:
    try:
        with open(root + "/environ", "rb") as file:
            variables = file.read(1 << 20).split(b"\0")
    except OSError:
        return
    for variable in variables:
        name, _, value = variable.partition(b"=")
        folder = os.fsdecode(value)
        if name.decode("ascii", "replace") in FOLDERS and folder.startswith("/"):
            yield folder


def _traces(folder: str, depth: int, budget: list[int]) -> Iterator[str]:
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                budget[0] -= 1
                if budget[0] < 0:
                    return
                try:
                    if entry.is_dir(follow_symlinks=False):
                        if depth > 0:
                            yield from _traces(entry.path, depth - 1, budget)
                    elif is_trace(entry.name) and entry.is_file(follow_symlinks=False):
                        yield entry.path
                except OSError:
                    continue
    except OSError:
        return


def _modified(path: str) -> Iterator[float]:
    try:
        state = os.stat(path)
    except OSError:
        return
    if stat.S_ISREG(state.st_mode):
        yield state.st_mtime
