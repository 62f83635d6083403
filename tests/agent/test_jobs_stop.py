"""Stopping jobs: everything that belongs to them ends, or is named; nothing else is touched."""

from __future__ import annotations

import os
import secrets
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from remote_diag.agent.jobs.stop import stop
from tests.agent.conftest import alive, wait_until
from tests.support.agent_driver import AgentDriver, lay_out_bundle
from tests.support.job_host import Ended, JobHost, launch_request, marked

FREEZERS = (Path("/sys/fs/cgroup/freezer"), Path("/sys/fs/cgroup"))

# A family of processes, each harder to find or to end than the one before.
FAMILY = """
import os, signal, subprocess, sys, time

def note(name):
    with open("pids", "a") as stream:
        stream.write("%s %d\\n" % (name, os.getpid()))

def child(name, deaf=False, session=False, orphan=False, naked=False):
    if os.fork():
        return
    if session:
        os.setsid()
    if orphan and os.fork():
        os._exit(0)
    if deaf:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    note(name)
    os.execve("/bin/sleep", ["sleep", "1000"], {} if naked else dict(os.environ))

child("plain")
child("deaf", deaf=True)
child("session", session=True)
child("daemon", session=True, orphan=True)
child("deaf daemon", session=True, orphan=True, deaf=True)
child("naked daemon", session=True, orphan=True, deaf=True, naked=True)
while True:
    time.sleep(1)
"""


@pytest.fixture
def host(tmp_path: Path) -> Iterator[JobHost]:
    with JobHost(lay_out_bundle(tmp_path / "cache")) as jobs:
        yield jobs


def family(host: JobHost) -> dict[str, int]:
    """Launch the family; return its members once all are there."""
    host.python(FAMILY)
    path = host.directory("job.v1") / "files" / "pids"

    def members() -> dict[str, int]:
        lines = path.read_text().splitlines() if path.exists() else []
        return {name: int(pid) for name, _, pid in (line.rpartition(" ") for line in lines)}

    assert wait_until(lambda: len(members()) == 6)
    time.sleep(0.1)
    return members()


def test_the_whole_tree_ends_whatever_it_tries(host: JobHost) -> None:
    pids = family(host)
    done = host.stop("job", 0.3)
    assert (done["stopped"], done["state"], done["survivors"]) == (True, "stopped", [])
    assert [name for name, pid in pids.items() if alive(pid)] == []
    assert done["signalled"] == 7


def test_without_the_supervisor_all_that_carry_the_marker_end(host: JobHost) -> None:
    pids = family(host)
    os.kill(host.record("job.v1").state["supervisor_pid"], signal.SIGKILL)
    done = host.stop("job", 0.3)
    assert done["state"] == "stopped"
    left = {name for name, pid in pids.items() if alive(pid)}
    try:
        # What gave up its marker, its session and its parent can be told from no stranger; that is left alone.
        assert left == {"naked daemon"}
    finally:
        os.kill(pids["naked daemon"], signal.SIGKILL)


def test_a_job_gets_its_grace(host: JobHost) -> None:
    host.launch(["/bin/sh", "-c", "trap 'sleep 0.5; echo checkpoint written; exit 5' TERM; while :; do sleep 0.05; done"])
    time.sleep(0.2)
    started = time.monotonic()
    done = host.stop("job.v1", 20)
    assert time.monotonic() - started < 10
    assert (done["state"], done["exit_code"], done["signal"]) == ("stopped", 5, None)
    assert host.job("job.v1")["last_line"] == "checkpoint written"


def test_a_job_that_is_over_is_left_as_it_is(host: JobHost) -> None:
    host.launch(["/bin/false"])
    host.wait_for("job.v1", "failed")
    done = host.stop("job.v1")
    assert (done["was"], done["state"], done["exit_code"], done["stopped"]) == ("failed", "failed", 1, False)
    assert not (host.directory("job.v1") / "stop").exists()


def test_an_unknown_job_is_no_job(host: JobHost) -> None:
    with pytest.raises(Ended) as caught:
        host.stop("nothing")
    assert caught.value.outcome == "no-job"


def test_a_name_means_the_attempt_that_runs(host: JobHost) -> None:
    host.launch(["/bin/sleep", "100"])
    host.launch(["/bin/true"], force=True)
    host.wait_for("job.v2", "exited")
    assert host.stop("job")["job"] == "job.v1"


def test_neighbours_are_not_touched(host: JobHost) -> None:
    neighbour = host.launch(["/bin/sleep", "100"], name="job-2")["pid"]
    also = host.launch(["/bin/sleep", "100"], name="job.extra")["pid"]
    host.launch(["/bin/sleep", "100"], name="job")
    host.stop("job", 0)
    assert alive(neighbour)
    assert alive(also)


def test_stopping_twice_at_once_is_stopping(host: JobHost) -> None:
    pids = family(host)
    answers: list[Any] = []
    threads = [threading.Thread(target=lambda: answers.append(host.stop("job.v1", 0.3))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert [one["state"] for one in answers] == ["stopped", "stopped"]
    assert not any(alive(pid) for pid in pids.values())


def test_the_stop_goes_on_when_the_client_is_gone(host: JobHost) -> None:
    pids = family(host)
    with AgentDriver(host.bundle) as driver:
        host.begin(driver, "stop", job="job.v1", grace_s=1.0, by="")
        assert wait_until((host.directory("job.v1") / "stop").exists)
        assert driver.process.stdin is not None
        driver.process.stdin.close()
        host.wait_for("job.v1", "stopped")
    assert not any(alive(pid) for pid in pids.values())


class Nobody:
    """Stands for the client of an operation that is called from here, without the time that an agent takes to start."""

    def put(self, kind: str, fields: dict[str, Any]) -> None:
        """Hear nothing."""

    def next(self, wait: float, *others: int) -> None:  # noqa: ARG002 - as the real one has it
        """Say nothing."""
        time.sleep(wait)


def test_a_stop_during_the_start_knows_no_third_state(host: JobHost) -> None:
    """Whatever the moment, the job never starts or is stopped; nothing of it is left, and its record says so."""
    moments: set[str] = set()
    # The first 50 ms; on a machine that is busy nothing has begun by then, and it takes some longer ones to see both.
    waits = [0.003 * step for step in range(17)] + [0.1, 0.2, 0.4, 0.8, 1.6]
    for number, wait in enumerate(waits, 1):
        if wait >= 0.1 and len(moments) >= 2:
            break
        job = f"race.v{number}"
        with AgentDriver(host.bundle) as driver:
            host.begin(driver, "launch", **launch_request(["/bin/sleep", "1000"], "race"))
            # Before there is a record there is no job to stop.
            assert wait_until((host.directory(job) / "job.json").exists, 10)
            time.sleep(wait)
            done = stop({"job": job, "grace_s": 0, "by": ""}, Nobody(), str(host.cache))  # type: ignore[arg-type]
            assert (done["state"], done["survivors"]) == ("stopped", []), done
            moments.add(f"{done['was']}, {'never ran' if done['signal'] is None else 'ran'}")
            # The launcher was told something true: that it runs, or that it was stopped.
            assert b'"outcome":"ok"' in driver.wait_for("end").payload
        assert host.record(job).judge()["state"] == "stopped"
        assert marked(job, host.cache) == []
    assert len(moments) >= 2, moments


@contextmanager
def frozen(pids: list[int]) -> Iterator[None]:
    """Hold processes in the kernel so that not even SIGKILL ends them; skip where that is not allowed."""
    name = "rdiag-test-" + secrets.token_hex(4)
    for root in FREEZERS:
        group = root / name
        try:
            group.mkdir()
        except OSError:
            continue
        if (group / "freezer.state").exists():
            break
        group.rmdir()
    else:
        pytest.skip("no freezer cgroup (version 1) can be made here")
    try:
        for pid in pids:
            (group / "cgroup.procs").write_text(str(pid))
        (group / "freezer.state").write_text("FROZEN")
        yield
    finally:
        (group / "freezer.state").write_text("THAWED")
        for pid in pids:
            wait_until(lambda pid=pid: not alive(pid), 5.0)  # type: ignore[misc]
        group.rmdir()


def test_what_the_kernel_does_not_let_go_of_is_named(host: JobHost) -> None:
    pid = host.launch(["/bin/sleep", "100"])["pid"]
    with frozen([pid]):
        done = host.stop("job.v1", 0)
        assert done["stopped"] is False
        assert done["state"] == "running"
        assert [(one["pid"], one["name"], one["state"]) for one in done["survivors"]] == [(pid, "sleep", "D")]
    # Once it is let go, it is gone, and its record says why.
    assert host.wait_for("job.v1", "stopped")["signal"] == signal.SIGKILL
