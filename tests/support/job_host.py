"""Jobs on one "host" below a folder of the test, asked for through real agents; nothing is left running."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import signal
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType
from typing import Any

from remote_diag.agent.jobs import record

from .agent_driver import PATIENCE, AgentDriver

PYTHON = sys.executable


class Ended(AssertionError):
    """The operation ended with another outcome than ``ok``."""

    def __init__(self, end: dict[str, Any]) -> None:
        super().__init__(f"{end['outcome']}: {end['message']}; hint: {end['hint']}")
        self.outcome: str = end["outcome"]
        self.message: str = end["message"]
        self.hint: str | None = end["hint"]


class JobHost:
    """Talks to agents of one bundle; a context manager that ends every job of its cache folder.

    Args:
        bundle: an installed bundle; its parent is the cache folder.
        env: environment variables of the agents.
        python: the interpreter that they run on.
    """

    def __init__(self, bundle: Path, env: dict[str, str] | None = None, python: str = PYTHON) -> None:
        self.bundle = bundle
        self.cache = bundle.parent
        self.python_path = python
        self.env = dict(os.environ if env is None else env)
        self.on_agent: Callable[[AgentDriver], None] = lambda _: None
        """Called with each agent before it is told what to do."""

    def __enter__(self) -> JobHost:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        end_jobs(self.cache)

    def operate(self, operation: str, blobs: Iterable[bytes] = (), **fields: Any) -> dict[str, Any]:
        """Do one operation and return its result; raise Ended when it ends otherwise."""
        with AgentDriver(self.bundle, python=self.python_path, env=self.env) as driver:
            self.on_agent(driver)
            self.begin(driver, operation, **fields)
            return finish(driver, blobs)

    def begin(self, driver: AgentDriver, operation: str, **fields: Any) -> None:
        """Send a request to a fresh agent."""
        driver.write(driver.nonce.encode() + b"\n")
        request = {"protocol": 1, "operation": operation, "lease_s": PATIENCE, **fields}
        driver.send("request", json.dumps(request, separators=(",", ":")).encode())

    def launch(self, argv: list[str], name: str = "job", files: dict[str, bytes] | None = None, **fields: Any) -> Any:
        """Launch a job and return the report."""
        return self.operate("launch", (files or {}).values(), **launch_request(argv, name, files, **fields))

    def python(self, source: str, *words: str, name: str = "job", **fields: Any) -> Any:
        """Launch a Python program with arguments."""
        return self.launch([PYTHON, "main.py", *words], name, {"main.py": source.encode()}, **fields)

    def jobs(self, job: str | None = None) -> list[dict[str, Any]]:
        """Return what ``jobs`` says."""
        found: list[dict[str, Any]] = self.operate("jobs", job=job, launch_id=None)["jobs"]
        return found

    def job(self, job: str) -> dict[str, Any]:
        """Return what ``jobs`` says of one job."""
        (one,) = self.jobs(job)
        return one

    def stop(self, job: str, grace_s: float = 5.0) -> dict[str, Any]:
        """Stop a job."""
        return self.operate("stop", job=job, grace_s=grace_s, by="a test")

    def wait_for(self, job: str, *states: str, seconds: float = PATIENCE) -> dict[str, Any]:
        """Return the job's judgement once its state is one of ``states``."""
        until = time.monotonic() + seconds
        while True:
            judged = self.record(job).judge()
            if judged["state"] in states:
                return judged
            assert time.monotonic() < until, f"{job} is {judged}"
            time.sleep(0.01)

    def directory(self, job: str) -> Path:
        """Return the folder of a job."""
        return self.cache / "jobs" / job

    def record(self, job: str) -> record.Job:
        """Return the job as its folder shows it."""
        return record.Job(str(self.directory(job)))


def launch_request(
    argv: list[str], name: str = "job", files: dict[str, bytes] | None = None, **fields: Any
) -> dict[str, Any]:
    """Return the fields of a launch."""
    return {
        "launch_id": secrets.token_hex(16),
        "name": name,
        "argv": argv,
        "env": {},
        "workdir": None,
        "gpus": None,
        "files": [
            {"path": path, "sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data), "mode": 0o644}
            for path, data in (files or {}).items()
        ],
        "force": False,
        "needs": {"disk_bytes": 0, "shm_bytes": 0},
        "environment": {"kind": "default", "value": ""},
        "launched": {"by": "a test"},
        **fields,
    }


def finish(driver: AgentDriver, blobs: Iterable[bytes] = ()) -> dict[str, Any]:
    """Answer what an agent asks for, and return its result; raise Ended."""
    by_hash = {hashlib.sha256(data).hexdigest(): data for data in blobs}
    result: dict[str, Any] = {}
    for frame in driver.incoming():
        if frame.kind == "need":
            for name in json.loads(frame.payload)["files"]:
                driver.send("file", name.encode() + b"\n" + by_hash[name])
        elif frame.kind == "result":
            result = json.loads(frame.payload)
        elif frame.kind == "end":
            end = json.loads(frame.payload)
            if end["outcome"] != "ok":
                raise Ended(end)
            return result
    raise AssertionError(f"the agent ended without an end; stderr: {driver.stderr()!r}")


def end_jobs(cache: Path) -> None:
    """Kill every process of every job below ``cache``, and wait for the supervisors to have said so."""
    until = time.monotonic() + 10
    while time.monotonic() < until:
        alive = False
        for job in record.all_jobs(str(cache)):
            for pid in job.tree().members():
                alive = True
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            alive = alive or (job.supervised() and not job.is_final)
        if not alive:
            return
        time.sleep(0.02)


def marked(job: str, cache: Path) -> list[int]:
    """Return the living processes that carry the marker of ``job`` of this cache folder, found without rdiag's help."""
    files = b"RDIAG_JOB_FILES=" + os.fsencode(cache / "jobs" / job / "files")
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                environment = (entry / "environ").read_bytes().split(b"\0")
                if files in environment and any(one.startswith(b"RDIAG_JOB=%s:" % job.encode()) for one in environment):
                    found.append(int(entry.name))
    return found
