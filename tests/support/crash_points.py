"""Launches whose connection is cut after a given byte, and what is there afterwards."""

from __future__ import annotations

import contextlib
import shutil
from dataclasses import dataclass, replace
from typing import Literal

from remote_diag.errors import UnreachableError
from remote_diag.host import Host
from remote_diag.jobs import JobSpec, launch_surely, new_launch_id
from remote_diag.session import Session

from .job_host import end_jobs, marked
from .proxy import Proxy
from .sshd import TestSshd, wait_until

Direction = Literal["server", "client"]


@dataclass(frozen=True)
class Exchange:
    """How many bytes each side sends while a job is launched: up to the end of the login, and in all."""

    login: dict[Direction, int]
    total: dict[Direction, int]


class CrashPoints:
    """Cuts launches on one server.

    Args:
        server: where jobs run.
        host: how it is reached directly.
    """

    def __init__(self, server: TestSshd, host: Host) -> None:
        self._server = server
        self._host = host
        self._cache = server.home / ".cache" / "rdiag"

    def through(self, port: int) -> Host:
        """Return the host as it is reached through a proxy."""
        return replace(self._host, port=port, host_key=" ".join(self._server.host_key()))

    def measure(self) -> Exchange:
        """Launch one job, uncut, and return what was sent."""
        with Session(self._host) as session:
            session.launch(self._spec("warm"))
        with Proxy(self._server.port) as proxy, Session(self.through(proxy.port)) as session:
            login: dict[Direction, int] = {"server": proxy.from_server, "client": proxy.from_client}
            session.launch(self._spec("measure"))
            total: dict[Direction, int] = {"server": proxy.from_server, "client": proxy.from_client}
        self.end()
        return Exchange(login, total)

    def cut(self, direction: Direction, after: int, name: str, how: Literal["rst", "fin"] = "rst") -> int:
        """Launch a job over a connection that ends after so many bytes; return how many jobs there are, 0 or 1.

        What the host says, and what runs there, must agree; and asked again with the same id there must be one job.
        """
        launch_id, spec = new_launch_id(), self._spec(name)
        cut_after, cut_asked_after = (after, None) if direction == "server" else (None, after)
        with (
            Proxy(self._server.port, cut_after=cut_after, cut_asked_after=cut_asked_after, cut_how=how) as proxy,
            contextlib.suppress(UnreachableError),
            Session(self.through(proxy.port)) as session,
        ):
            session.launch(spec, launch_id=launch_id)
        found = self._found(launch_id)
        running = self._running(f"{name}.v1", len(found))
        assert len(running) == len(found) <= 1, f"{direction} {after}: {found} are said to run, and {running} run"
        record = launch_surely(lambda: Session(self._host), spec, launch_id=launch_id, tell=lambda _: None)
        assert record.job == f"{name}.v1", f"{direction} {after}: asked again, it became {record.job}"
        assert record.state == "running", record
        assert len(self._running(record.job, 1)) == 1
        return len(found)

    def end(self) -> None:
        """End every job, and forget it: to look at thousands that are over would take longer than to launch one."""
        end_jobs(self._cache)
        for folder in (self._cache / "jobs").glob("*.v*"):
            shutil.rmtree(folder)

    def _running(self, job: str, expected: int) -> list[int]:
        """Return the processes of a job; looked for again when there are too few: for a moment in exec they show nothing."""
        wait_until(lambda: len(marked(job, self._cache)) >= expected, 1.0)
        return marked(job, self._cache)

    def _found(self, launch_id: str) -> list[str]:
        with Session(self._host) as session:
            found = session.jobs(launch_id=launch_id)
        # The agent of the cut connection may be at it still: then the job is starting.
        while found and found[0].state == "starting":
            with Session(self._host) as session:
                found = session.jobs(launch_id=launch_id)
        return [one.job for one in found]

    @staticmethod
    def _spec(name: str) -> JobSpec:
        return JobSpec(name, ("/bin/sleep", "1000"), disk_bytes=0)
