"""Jobs as they lie on a host, made by hand: the folder, the records, and a plain process that writes the logs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

from remote_diag.agent.layout import DEFAULT_CACHE, JobPaths, boot_id

WRITER = """
import json, os, random, sys, time
directory, *arguments = sys.argv[1:]
log = os.open(directory + "/stdout.log", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
err = os.open(directory + "/stderr.log", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
def put(data, where=log):
    view = memoryview(data)
    while view:
        view = view[os.write(where, view):]
def end(state="exited", exit_code=0):
    with open(directory + "/state.json") as stream:
        record = json.load(stream)
    record.update(state=state, exit_code=exit_code, signal=None)
    with open(directory + "/.state.new", "w") as stream:
        json.dump(record, stream)
    os.rename(directory + "/.state.new", directory + "/state.json")
"""


class FakeJob:
    """A running job.

    Args:
        home: home directory on the host.
        job: its id.
        cache: cache folder below ``home``.
    """

    def __init__(self, home: Path, job: str, *, cache: str = DEFAULT_CACHE) -> None:
        self.id = job
        self.directory = home / cache / "jobs" / job
        self.directory.mkdir(mode=0o700, parents=True)
        self.paths = JobPaths(str(self.directory))
        self.stdout, self.stderr = Path(self.paths.stdout), Path(self.paths.stderr)
        self.stdout.touch()
        self.stderr.touch()
        Path(self.paths.started).touch()
        Path(self.paths.record).write_text(json.dumps({"schema_version": 1, "job": job}))
        self._processes: list[subprocess.Popen[bytes]] = []
        # As long as this very process lives, the job counts as supervised.
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        self.set_state("running", supervisor_pid=os.getpid(), supervisor_start_ticks=ticks, boot_id=boot_id())

    def set_state(self, state: str, **fields: Any) -> None:
        """Write the record, as a whole."""
        self._state = {**getattr(self, "_state", {"schema_version": 1}), "state": state, **fields}
        temporary = self.directory / ".state.new"
        temporary.write_text(json.dumps(self._state))
        temporary.replace(self.paths.state)

    def append(self, data: bytes, stream: str = "stdout") -> None:
        """Add to a log, as the job would."""
        with (self.directory / f"{stream}.log").open("ab", buffering=0) as file:
            file.write(data)

    def end(self, state: str = "exited", exit_code: int | None = 0, **fields: Any) -> None:
        """Let the job end."""
        self.set_state(state, exit_code=exit_code, signal=None, **fields)

    def run(self, body: str, *arguments: object) -> subprocess.Popen[bytes]:
        """Start a process that writes; ``body`` has ``put``, ``err``, ``end`` and ``arguments``."""
        process = subprocess.Popen(
            [sys.executable, "-c", WRITER + textwrap.dedent(body), str(self.directory), *map(str, arguments)],
            stdin=subprocess.DEVNULL,
        )
        self._processes.append(process)
        return process

    def finished(self, seconds: float = 30.0) -> None:
        """Wait for the processes; fails unless all of them ended well: nobody disturbed them."""
        until = time.monotonic() + seconds
        for process in self._processes:
            assert process.wait(max(0.1, until - time.monotonic())) == 0

    def close(self) -> None:
        """End what still runs."""
        for process in self._processes:
            if process.poll() is None:
                process.kill()
                process.wait()
