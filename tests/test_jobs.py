"""Jobs over a real sshd behind zsh: whatever happens to the connection, they go on, and are known."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest

from remote_diag.errors import EnvironmentUnfit, Refused, StateUnknown, UnreachableError
from remote_diag.events import Event, Progress
from remote_diag.follower import Follower, Wanted
from remote_diag.host import Environment, Host
from remote_diag.job_files import collect
from remote_diag.jobs import JobRecord, JobSpec, launch_surely, new_launch_id, parse_record
from remote_diag.session import Session
from tests.support import sshd
from tests.support.cli import command, environment
from tests.support.crash_points import CrashPoints
from tests.support.job_host import PYTHON, end_jobs, marked
from tests.support.places import mounted
from tests.support.proxy import Proxy

pytestmark = pytest.mark.ssh


@pytest.fixture(scope="module")
def server(start_sshd: Callable[..., sshd.TestSshd]) -> Iterator[sshd.TestSshd]:
    """A server of this file's own: its sessions are killed and its listener restarted."""
    with start_sshd(shell="zsh", noise=sshd.NOISE) as one:
        yield one


@pytest.fixture
def host(server: sshd.TestSshd) -> Iterator[Host]:
    yield server.host(environment=Environment("python", PYTHON))
    end_jobs(cache_of(server))
    for folder in (cache_of(server) / "jobs").glob("*.v*"):
        shutil.rmtree(folder)


def sleeper(name: str = "job") -> JobSpec:
    return JobSpec(name, ("/bin/sleep", "1000"), disk_bytes=0)


def cache_of(server: sshd.TestSshd) -> Path:
    return server.home / ".cache" / "rdiag"


def launched(host: Host, spec: JobSpec) -> JobRecord:
    with Session(host) as session:
        return session.launch(spec)


def job(host: Host, name: str) -> JobRecord:
    with Session(host) as session:
        (one,) = session.jobs(name)
    return one


def ended(host: Host, name: str) -> JobRecord:
    assert sshd.wait_until(lambda: not job(host, name).active, 20)
    return job(host, name)


def test_from_launch_to_end(host: Host, tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "train.py").write_text("print(open('sub/data').read())\n")
    (tmp_path / "sub" / "data").write_text("größe")
    spec = JobSpec("job", (PYTHON, "train.py"), files=collect(["train.py", "sub"], tmp_path), disk_bytes=0)
    record = launched(host, spec)
    assert record.job == "job.v1"
    done = ended(host, "job.v1")
    assert (done.state, done.exit_code, done.last_line) == ("exited", 0, "größe")
    assert done.as_dict()["started_at"].endswith("Z")


def test_killed_sessions_and_a_restarted_listener_do_not_touch_it(host: Host, server: sshd.TestSshd) -> None:
    with Session(host) as session:
        record = session.launch(sleeper())
        assert record.pid is not None
        for pid in server.session_pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    server.stop()
    server._start()
    assert sshd.alive(record.pid)
    assert job(host, "job").state == "running"
    with Session(host) as session:
        stopped = session.stop("job", grace=1)
    assert (stopped.stopped, stopped.record.state, stopped.survivors) == (True, "stopped", ())
    assert not sshd.alive(record.pid)


def test_a_killed_client_leaves_it_running(host: Host, server: sshd.TestSshd, tmp_path: Path) -> None:
    inventory = tmp_path / "hosts.yaml"
    inventory.write_text(
        f"hosts:\n  there: {{address: 127.0.0.1, port: {server.port}, user: {server.user}, "
        f"identity_file: {server.identity_file}, known_hosts: {server.known_hosts}, environment: {{python: {PYTHON}}}}}\n"
    )
    client = subprocess.Popen(
        command("launch", "-i", str(inventory), "--host", "there", "--name", "job", "--", "/bin/sleep", "1000"),
        env=environment(tmp_path), cwd=tmp_path, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    assert sshd.wait_until(lambda: marked("job.v1", cache_of(server)), 30)
    time.sleep(0.3)
    client.kill()
    client.wait()
    time.sleep(0.3)
    assert job(host, "job").state == "running"


@pytest.mark.parametrize(("direction", "how"), [("server", "rst"), ("server", "fin"), ("client", "rst"), ("client", "fin")])
def test_cut_after_any_byte_there_is_one_job_or_none_and_it_is_known_which(
    host: Host, server: sshd.TestSshd, direction: Literal["server", "client"], how: Literal["rst", "fin"]
) -> None:
    """A few points here; ``scripts/crash_points`` takes every byte."""
    crash = CrashPoints(server, host)
    exchange = crash.measure()
    first, last = exchange.login[direction], exchange.total[direction]
    points = [last - (last - first) * share // 100 - 1 for share in (0, 3, 10, 25, 45, 70, 100)]
    seen = {crash.cut(direction, after, f"cut-{number}", how) for number, after in enumerate(points)}
    # A request that did not arrive as a whole starts nothing; answers are lost both before and after the start.
    assert 0 in seen
    assert direction == "client" or seen == {0, 1}


def test_a_lost_connection_is_made_up_for(host: Host, server: sshd.TestSshd) -> None:
    launched(host, sleeper("warm"))
    with Proxy(server.port) as proxy:
        launched(replace(host, port=proxy.port, host_key=" ".join(server.host_key())), sleeper("measure"))
        total = proxy.from_server
    notes: list[Event] = []
    with Proxy(server.port, cut_after=total - 150) as proxy:
        places = [replace(host, port=proxy.port, host_key=" ".join(server.host_key())), host]
        record = launch_surely(lambda: Session(places.pop(0)), sleeper(), tell=notes.append)
    assert (record.job, record.state) == ("job.v1", "running")
    assert len(marked("job.v1", cache_of(server))) == 1
    assert "asking again" in str(notes)


def test_when_nobody_answers_any_more_the_state_is_unknown(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("remote_diag.jobs._RETRIES", (0.01,))
    nowhere = replace(host, port=sshd.free_port())
    with pytest.raises(StateUnknown, match="whether the job runs is not known"):
        launch_surely(lambda: Session(nowhere), sleeper(), launch_id=new_launch_id(), tell=lambda _: None)
    with pytest.raises(UnreachableError):
        launch_surely(lambda: Session(nowhere), sleeper(), tell=lambda _: None)


def test_large_files_travel_in_parts_with_progress_and_only_once(host: Host, server: sshd.TestSshd, tmp_path: Path) -> None:
    content = os.urandom(1 << 20) * 24
    (tmp_path / "weights.bin").write_bytes(content)
    (tmp_path / "empty").touch()
    files = collect(["weights.bin", "empty"], tmp_path)
    spec = JobSpec("job", ("/bin/sh", "-c", "sha256sum weights.bin; wc -c <empty"), files=files, disk_bytes=0)
    events: list[Event] = []
    with Session(host, on_event=events.append) as session:
        session.launch(spec)
    bars = [event for event in events if isinstance(event, Progress)]
    assert len(bars) > 10
    assert (bars[-1].done, bars[-1].total, bars[-1].unit) == (24.0, 24.0, "MiB")
    done = ended(host, "job.v1")
    assert Path(done.log or "").read_text() == f"{files[1].sha256}  weights.bin\n0\n"
    with Proxy(server.port) as proxy:
        launched(replace(host, port=proxy.port, host_key=" ".join(server.host_key())), spec)
        assert proxy.from_client < 100_000


def test_a_large_file_whose_sending_was_cut_off_goes_on_where_it_was(host: Host, server: sshd.TestSshd, tmp_path: Path) -> None:
    (tmp_path / "weights.bin").write_bytes(os.urandom(1 << 20) * 24)
    (file,) = files = collect(["weights.bin"], tmp_path)
    spec = JobSpec("job", ("/bin/sh", "-c", "sha256sum weights.bin"), files=files, disk_bytes=0)
    launched(host, sleeper("warm"))
    notes: list[Event] = []
    with Proxy(server.port, cut_asked_after=18 << 20) as first, Proxy(server.port) as second:
        places = [replace(host, port=proxy.port, host_key=" ".join(server.host_key())) for proxy in (first, second)]
        launch_surely(lambda: Session(places.pop(0)), spec, tell=notes.append)
        assert second.from_client < 16 << 20
    assert "of which are there already" in str(notes)
    assert Path(ended(host, "job.v1").log or "").read_text() == f"{file.sha256}  weights.bin\n"


@pytest.mark.parametrize("transport", ["ssh", "local"])
def test_a_host_without_room_for_the_files_says_so(host: Host, tmp_path: Path, transport: str) -> None:
    (tmp_path / "weights.bin").write_bytes(bytes(40 << 20))
    spec = JobSpec("job", ("/bin/true",), files=collect(["weights.bin"], tmp_path), disk_bytes=0)
    with mounted(tmp_path / "small", "size=24m") as small:
        full = replace(host, cache_dir=str(small / "cache"))
        if transport == "local":
            full = replace(Host("here"), transport="local", cache_dir=str(small / "cache"), environment=host.environment)
        with pytest.raises(EnvironmentUnfit, match=r"cannot store a file in .*: No space left"):
            launched(full, spec)


def test_a_file_that_becomes_shorter_meanwhile_starts_nothing(host: Host, tmp_path: Path) -> None:
    path = tmp_path / "weights.bin"
    path.write_bytes(os.urandom(6 << 20))
    files = collect([path], tmp_path)
    path.write_bytes(b"short")
    with pytest.raises(Exception, match="became shorter"), Session(host) as session:
        session.launch(JobSpec("job", ("/bin/true",), files=files, disk_bytes=0))
    with Session(host) as session:
        assert session.jobs() == []


def test_refusals_are_errors_of_their_own(host: Host) -> None:
    launched(host, sleeper())
    with pytest.raises(Refused, match="is running"):
        launched(host, sleeper())
    with pytest.raises(EnvironmentUnfit, match="cannot start nope") as caught:
        launched(host, JobSpec("other", ("nope",), disk_bytes=0))
    assert "PATH" in (caught.value.hint or "")
    with pytest.raises(StateUnknown, match="no job called nothing"), Session(host) as session:
        session.stop("nothing")


def test_host_settings_reach_the_job(host: Host) -> None:
    there = replace(host, env=(("FROM_HOST", "a b"), ("BOTH", "host")), workdir="/")
    spec = JobSpec("job", ("/bin/sh", "-c", 'echo "$FROM_HOST|$BOTH|$PWD"'), env={"BOTH": "job"}, disk_bytes=0)
    launched(there, spec)
    assert ended(host, "job.v1").last_line == "a b|job|/"


def test_a_job_that_brings_files_runs_beside_them_wherever_the_host_starts_others(host: Host, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print('found')\n")
    there = replace(host, workdir="/")
    launched(there, JobSpec("job", (PYTHON, "train.py"), files=collect(["train.py"], tmp_path), disk_bytes=0))
    assert ended(host, "job.v1").last_line == "found"


# -- the job's logs lose their names; it goes on writing into the files that it was started with

WRITER = """
import os, sys, time
for number in range(3):
    while not os.path.exists(f"{sys.argv[1]}{number}"):
        time.sleep(0.01)
    print("line", number, flush=True)
    print("problem", number, file=sys.stderr, flush=True)
"""


@pytest.fixture
def writer(host: Host, tmp_path: Path) -> Callable[[int], None]:
    """A job that writes a line to each of its logs when it is told to."""
    (tmp_path / "writer.py").write_text(WRITER)
    launched(host, JobSpec("job", (PYTHON, "writer.py", str(tmp_path / "go")), files=collect(["writer.py"], tmp_path), disk_bytes=0))
    return lambda number: (tmp_path / f"go{number}").touch()


def copied(host: Host, folder: Path, *, follow: bool = False) -> Follower:
    return Follower(host, "job", Wanted(directory=folder, follow=follow, show=False), insist=True)


def test_a_rotated_log_is_followed_under_its_old_name_after_a_lost_connection(
    host: Host, server: sshd.TestSshd, tmp_path: Path, writer: Callable[[int], None]
) -> None:
    folder, logs = tmp_path / "copies", cache_of(server) / "jobs" / "job.v1"
    writer(0)
    with Proxy(server.port) as proxy:
        through = replace(host, port=proxy.port, host_key=" ".join(server.host_key()))
        with copied(through, folder, follow=True) as follower:
            thread = threading.Thread(target=follower.run)
            thread.start()
            assert sshd.wait_until(lambda: size(folder / "job.v1.log") == 7, 20)
            for name in ("stdout.log", "stderr.log"):
                (logs / name).rename(logs / f"{name}.1")
                (logs / name).touch()
            assert sshd.wait_until(lambda: (folder / "job.v1.err.log.old-1").exists() and (folder / "job.v1.log.old-1").exists(), 20)
            before = proxy.connections
            proxy.cut()
            assert sshd.wait_until(lambda: proxy.connections > before, 20)
            writer(1)
            writer(2)
            thread.join(30)
            assert not thread.is_alive()
    for ending, name in ((".log", "stdout.log"), (".err.log", "stderr.log")):
        assert (folder / f"job.v1{ending}.old-1").read_bytes() == (logs / f"{name}.1").read_bytes()
        assert (folder / f"job.v1{ending}").read_bytes() == b""
    assert (size(logs / "stdout.log.1"), size(logs / "stderr.log.1")) == (21, 30)


def test_another_client_goes_on_with_a_log_that_was_rotated(
    host: Host, server: sshd.TestSshd, tmp_path: Path, writer: Callable[[int], None]
) -> None:
    folder, logs = tmp_path / "copies", cache_of(server) / "jobs" / "job.v1"
    writer(0)
    assert sshd.wait_until(lambda: size(logs / "stderr.log"), 20)
    with copied(host, folder) as follower:
        follower.run()
    (logs / "stdout.log").rename(logs / "moved away")
    (logs / "stdout.log").write_bytes(b"somebody else's\n")
    writer(1)
    with copied(host, folder, follow=True) as follower:
        thread = threading.Thread(target=follower.run)
        thread.start()
        assert sshd.wait_until(lambda: size(folder / "job.v1.log.old-1") == 14, 20)
        writer(2)
        thread.join(30)
    assert (folder / "job.v1.log.old-1").read_bytes() == (logs / "moved away").read_bytes() == b"line 0\nline 1\nline 2\n"
    assert (folder / "job.v1.log").read_bytes() == b"somebody else's\n"


def test_a_deleted_log_is_had_for_as_long_as_the_job_runs(
    host: Host, server: sshd.TestSshd, tmp_path: Path, writer: Callable[[int], None]
) -> None:
    logs = cache_of(server) / "jobs" / "job.v1"
    writer(0)
    assert sshd.wait_until(lambda: size(logs / "stdout.log"), 20)
    (logs / "stdout.log").unlink()
    with copied(host, tmp_path / "first") as follower:
        follower.run()
    assert (tmp_path / "first" / "job.v1.log").read_bytes() == b"line 0\n"
    with copied(host, tmp_path / "first", follow=True) as follower:
        thread = threading.Thread(target=follower.run)
        thread.start()
        writer(1)
        assert sshd.wait_until(lambda: size(tmp_path / "first" / "job.v1.log") == 14, 20)
        writer(2)
        thread.join(30)
    assert (tmp_path / "first" / "job.v1.log").read_bytes() == b"line 0\nline 1\nline 2\n"


def size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def test_clean_over_the_session(host: Host) -> None:
    launched(host, JobSpec("job", ("/bin/true",), disk_bytes=0))
    ended(host, "job.v1")
    with Session(host) as session:
        rehearsal = session.clean(older_than_s=0, dry_run=True)
    assert ("job", "job.v1") in rehearsal.removed
    with Session(host) as session:
        session.clean(older_than_s=0)
    with Session(host) as session:
        assert session.jobs() == []


@pytest.mark.parametrize(
    "value", [None, [], {}, {"job": "../x.v1", "state": "running"}, {"job": "a", "state": "running"}, {"job": 1}]
)
def test_what_is_no_job_is_refused(value: object) -> None:
    with pytest.raises(UnreachableError):
        parse_record("there", value)


def test_a_record_of_another_release_is_read_as_far_as_it_is_understood() -> None:
    record = parse_record(
        "there",
        {"job": "a.v1", "state": "dreaming", "exit_code": "x", "signal": 1.5, "gpus": [0, "x"], "started_at": float("inf"),
         "launched": [], "novelty": {}, "last_line": "\x1b[2J\ud800"},
    )  # fmt: skip
    assert (record.state, record.exit_code, record.signal, record.gpus) == ("unknown", None, None, (0,))
    assert record.started_at is None
    assert (record.last_line or "").encode()


def test_the_hostname_is_recorded(host: Host) -> None:
    from remote_diag.provenance import launched_from

    spec = replace(sleeper(), launched=launched_from(Path()))
    assert launched(host, spec).by == launched_from(Path())["by"]
    assert launched_from(Path())["from_host"] == socket.gethostname()
