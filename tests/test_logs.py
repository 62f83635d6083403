"""Following a job's logs over a real sshd, while everything between here and there breaks.

In each test the local file ends up as the log on the host, byte for byte, and the job's process never notices.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from remote_diag import follower as follower_module
from remote_diag.errors import AuthError, HostKeyError, LocalIOError, StateUnknown, UnreachableError
from remote_diag.events import Note, Progress
from remote_diag.follower import (
    Backoff,
    Followed,
    Follower,
    FollowEvent,
    LogBytes,
    Skipped,
    Start,
    Wanted,
    Warned,
)
from remote_diag.host import Host
from remote_diag.session import Session

from .support.jobs import FakeJob
from .support.places import mounted
from .support.proxy import Proxy
from .support.sshd import TestSshd, wait_until

pytestmark = pytest.mark.ssh

NOISY = """
# Lines, progress bars, bytes that are no text; for about `seconds`.
seconds, seed = float(arguments[0]), int(arguments[1])
rng = random.Random(seed)
until = time.monotonic() + seconds
number = 0
while time.monotonic() < until:
    number += 1
    put(b"step %d loss=%f\\r" % (number, rng.random()))
    put(rng.randbytes(rng.randrange(1, 3000)) + b"\\n")
    if number % 7 == 0:
        put(b"warning %d \\xff\\xfe\\n" % number, err)
    time.sleep(0.005)
put(b"the end")
end()
"""


@pytest.fixture
def make_job(zsh_server: TestSshd) -> Iterator[Callable[[str], FakeJob]]:
    jobs: list[FakeJob] = []

    def make(name: str, home: Path | None = None) -> FakeJob:
        job = FakeJob(home or zsh_server.home, f"{name}.v1")
        jobs.append(job)
        return job

    yield make
    for job in jobs:
        job.close()


class Followers:
    """Followers in threads of their own, each with what it told."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.threads: list[threading.Thread] = []

    def start(self, host: Host, job: str, **wanted: Any) -> Running:
        options = {"directory": self.directory, "show": False, **wanted}
        running = Running(host, job, Wanted(**options))
        self.threads.append(running.thread)
        running.thread.start()
        return running


class Running:
    """One follower."""

    def __init__(self, host: Host, job: str, wanted: Wanted) -> None:
        self.events: list[FollowEvent] = []
        self.result: Followed | None = None
        self.error: BaseException | None = None
        self.host, self.job, self.wanted = host, job, wanted
        self.thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        try:
            with Follower(self.host, self.job, self.wanted, on_event=self.events.append) as follower:
                self.result = follower.run()
        except BaseException as error:  # noqa: BLE001 - looked at by the test
            self.error = error

    def done(self, seconds: float = 40.0) -> Followed:
        """Return how it ended; fails when it does not end, or not well."""
        self.thread.join(seconds)
        assert not self.thread.is_alive(), f"still following: {self.notes()}"
        if self.error is not None:
            raise self.error
        assert self.result is not None
        return self.result

    def notes(self) -> list[str]:
        return [event.text for event in self.events if isinstance(event, (Note, Warned))]

    def shown(self, stream: str = "stdout") -> bytes:
        return b"".join(event.data for event in self.events if isinstance(event, LogBytes) and event.stream == stream)


@pytest.fixture
def followers(tmp_path: Path) -> Followers:
    return Followers(tmp_path / "rdiag-logs")


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reconnect sooner, so that the tests are quick; the real waits are tested by themselves."""
    monkeypatch.setattr(follower_module, "FIRST_WAIT", 0.05)


def same(local: Path, job: FakeJob, stream: str = "stdout") -> bool:
    there = (job.directory / f"{stream}.log").read_bytes()
    here = local.read_bytes()
    assert here == there, f"{len(here)} bytes here, {len(there)} there"
    return True


def grown(path: Path, size: int) -> Callable[[], bool]:
    return lambda: path.exists() and path.stat().st_size >= size


# -- nothing breaks


def test_a_log_is_mirrored_while_it_grows_and_to_its_last_byte(
    zsh_server: TestSshd, make_job: Callable[..., FakeJob], followers: Followers
) -> None:
    job = make_job("plain")
    job.append(b"before\n")
    job.run(NOISY, 1.0, 1)
    ended = followers.start(zsh_server.host(), "plain").done()
    job.finished()
    assert (ended.job, ended.state.state, ended.state.exit_code) == ("plain.v1", "exited", 0)
    assert same(followers.directory / "plain.v1.log", job)
    assert same(followers.directory / "plain.v1.err.log", job, "stderr")
    assert sorted(path.name for path in followers.directory.iterdir()) == ["plain.v1.err.log", "plain.v1.log"]
    assert (followers.directory / "plain.v1.log").stat().st_mode & 0o777 == 0o600


def test_the_last_line_written_right_before_the_end_is_never_lost(
    zsh_server: TestSshd, make_job: Callable[..., FakeJob], tmp_path: Path
) -> None:
    """One connection a job would take too long: one session, a hundred jobs that end in the moment they write."""
    with Session(zsh_server.host()) as session:
        for number in range(100):
            job = make_job(f"last{number}")
            # Sometimes before the reader is there, sometimes while it starts, sometimes while it waits.
            writer = threading.Timer(
                number % 10 * 0.003,
                lambda job=job: (job.append(b"the last line of %s" % job.id.encode()), job.end()),
            )
            writer.start()
            with Follower(
                session.host, job.id, Wanted(directory=tmp_path, show=False),
                connect=lambda _host, _tell: _Borrowed(session),
            ) as follower:  # fmt: skip
                follower.run()
            writer.join()
            assert (tmp_path / f"{job.id}.log").read_bytes() == b"the last line of %s" % job.id.encode()


class _Borrowed(Session):
    """A session that outlives its ``with`` statement."""

    def __init__(self, session: Session) -> None:
        self.__dict__ = session.__dict__

    def __exit__(self, *_: object) -> None:
        return


def test_without_follow_a_running_job_is_copied_as_far_as_it_got(
    zsh_server: TestSshd, make_job: Callable[..., FakeJob], followers: Followers, tmp_path: Path
) -> None:
    job = make_job("snapshot")
    job.append(b"one\n" * 1000)
    output = tmp_path / "copy.txt"
    ended = followers.start(zsh_server.host(), "snapshot.v1", follow=False, output=output).done()
    assert ended.state.state == "running"
    assert same(output, job)
    job.append(b"two\n")
    followers.start(zsh_server.host(), "snapshot.v1", follow=False, output=output).done()
    assert same(output, job)
    assert list(tmp_path.iterdir()) == [output]


def test_logs_of_ranks_are_files_of_their_own(
    zsh_server: TestSshd, make_job: Callable[..., FakeJob], followers: Followers
) -> None:
    job = make_job("ranks")

    def write(path: str, data: bytes) -> Path:
        file = job.directory / "ranks" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)
        return file

    write("none_x1/attempt_0/0/stdout.log", b"rank zero\n")
    write("none_x1/attempt_0/0/stderr.log", b"rank zero complains\n")
    running = followers.start(zsh_server.host(), "ranks", show=True)
    assert wait_until(grown(followers.directory / "ranks.v1.rank0.err.log", 1), 15)
    # These appear while it follows.
    write("none_x1/attempt_0/11/stdout.log", b"rank eleven\n")
    write("none_x1/attempt_1/0/stdout.log", b"rank zero again\n")
    write("none_x1/attempt_1/../../../../evil", b"no log\n")
    assert wait_until(grown(followers.directory / "ranks.v1.rank0.attempt1.log", 1), 15)
    job.append(b"main\n")
    job.end()
    running.done()
    found = {path.name: path.read_bytes() for path in followers.directory.iterdir()}
    assert found == {
        "ranks.v1.log": b"main\n",
        "ranks.v1.rank0.log": b"rank zero\n",
        "ranks.v1.rank0.err.log": b"rank zero complains\n",
        "ranks.v1.rank11.log": b"rank eleven\n",
        "ranks.v1.rank0.attempt1.log": b"rank zero again\n",
    }
    assert running.shown() == b"main\n"
    assert running.shown("rank0") == b""
    only = followers.start(zsh_server.host(), "ranks", ranks=(0,), show=True)
    only.done()
    assert only.shown() == b""
    assert only.shown("rank0") == b"rank zero\n"
    assert only.shown("rank0.attempt1") == b"rank zero again\n"


def test_the_end_of_a_log_is_shown_without_fetching_the_rest(
    zsh_server: TestSshd, make_job: Callable[..., FakeJob], followers: Followers
) -> None:
    job = make_job("sparse")
    with job.stdout.open("r+b") as file:
        file.seek(5 * 2**30)
        file.write(b"\nthe last but one\nthe last\n")
    job.end()
    started = time.monotonic()
    tail = followers.start(zsh_server.host(), "sparse", start=Start("last-lines", 2), show=True)
    tail.done()
    assert tail.shown() == b"the last but one\nthe last\n"
    since = followers.start(zsh_server.host(), "sparse", start=Start("offset", 5 * 2**30 + 1), show=True)
    since.done()
    assert since.shown() == b"the last but one\nthe last\n"
    assert time.monotonic() - started < 15
    assert not followers.directory.exists()


def test_a_copy_of_a_huge_log_goes_on_where_it_is(
    zsh_server: TestSshd, make_job: Callable[..., FakeJob], followers: Followers
) -> None:
    """5 GiB there, 5 GiB less a few MiB here (both mostly holes): only what is missing travels."""
    job = make_job("huge")
    local = followers.directory / "huge.v1.log"
    followers.directory.mkdir()
    for path in (job.stdout, local):
        with path.open("wb") as file:
            file.seek(5 * 2**30)
            file.write(b"up to here\n")
    job.append(b"x" * (6 * 2**20) + b"\n")
    job.end()
    running = followers.start(zsh_server.host(), "huge")
    ended = running.done()
    assert local.stat().st_size == job.stdout.stat().st_size == ended.files[0].offset
    with local.open("rb") as here, job.stdout.open("rb") as there:
        here.seek(5 * 2**30 - 100)
        there.seek(5 * 2**30 - 100)
        assert here.read() == there.read()
    assert any(isinstance(event, Progress) and event.total and event.total > 5000 for event in running.events)


def test_what_was_copied_of_a_job_that_is_gone_is_named(zsh_server: TestSshd, followers: Followers) -> None:
    for name in ("cleaned.v1.log", "cleaned.v2.err.log", "cleaned.v2.rank11.log", "cleaned2.v1.log", "cleaned.txt"):
        followers.directory.mkdir(exist_ok=True)
        (followers.directory / name).write_text("text")
    with pytest.raises(StateUnknown) as caught:
        followers.start(zsh_server.host(), "cleaned").done()
    copies = (caught.value.hint or "").splitlines()[-1].partition(": ")[2]
    assert [Path(one).name for one in copies.split(", ")] == ["cleaned.v1.log", "cleaned.v2.err.log", "cleaned.v2.rank11.log"]


def test_a_job_that_is_not_there_and_a_log_that_is_not(
    zsh_server: TestSshd, make_job: Callable[..., FakeJob], followers: Followers
) -> None:
    with pytest.raises(StateUnknown, match="no job called 'nothing'") as caught:
        followers.start(zsh_server.host(), "nothing").done()
    assert caught.value.hint is not None
    assert "rdiag jobs" in caught.value.hint
    assert "copied" not in caught.value.hint
    job = make_job("empty")
    job.stdout.unlink()
    job.end()
    (file, *_) = followers.start(zsh_server.host(), "empty").done().files
    assert file.missing


# -- the connection breaks


def test_sessions_killed_on_the_host(
    zsh_server: TestSshd, make_job: Callable[..., FakeJob], followers: Followers
) -> None:
    job = make_job("killed")
    job.run(NOISY, 3.0, 2)
    running = followers.start(zsh_server.host(), "killed")
    local = followers.directory / "killed.v1.log"
    for size in (1, 100_000, 200_000):
        assert wait_until(grown(local, size), 15)
        for pid in zsh_server.session_pids():
            os.kill(pid, 9)
    running.done()
    job.finished()
    assert same(local, job)
    assert any("connected again" in note for note in running.notes())


def test_the_server_restarted(
    start_sshd: Callable[..., TestSshd], make_job: Callable[..., FakeJob], followers: Followers
) -> None:
    with start_sshd(shell="zsh") as server:
        job = make_job("restarted", home=server.home)
        job.run(NOISY, 3.0, 3)
        running = followers.start(server.host(), "restarted")
        local = followers.directory / "restarted.v1.log"
        assert wait_until(grown(local, 10_000), 15)
        server.stop()
        assert wait_until(lambda: any("trying again" in note for note in running.notes()), 15)
        server._start()
        running.done()
        job.finished()
        assert same(local, job)


def test_connections_reset_again_and_again(
    zsh_server: TestSshd, make_job: Callable[..., FakeJob], followers: Followers
) -> None:
    job = make_job("resets")
    job.run(NOISY, 8.0, 4)
    rng = random.Random(4)  # noqa: S311 - the same every time
    with Proxy(zsh_server.port) as proxy:
        running = followers.start(replace(zsh_server.host(), port=proxy.port, host_key=_pin(zsh_server)), "resets")
        until = time.monotonic() + 8
        while time.monotonic() < until:
            time.sleep(rng.uniform(0.5, 1.0))
            proxy.cut()
        running.done()
        assert proxy.connections > 5
    job.finished()
    assert same(followers.directory / "resets.v1.log", job)
    assert same(followers.directory / "resets.v1.err.log", job, "stderr")


def test_a_frozen_line(zsh_server: TestSshd, make_job: Callable[..., FakeJob], followers: Followers) -> None:
    job = make_job("frozen")
    with Proxy(zsh_server.port) as proxy, _impatient(2.0):
        running = followers.start(replace(zsh_server.host(), port=proxy.port, host_key=_pin(zsh_server)), "frozen")
        job.append(b"a\n" * 1000)
        local = followers.directory / "frozen.v1.log"
        assert wait_until(grown(local, 2000), 15)
        proxy.freeze()
        job.append(b"b\n" * 1000)
        assert wait_until(lambda: any("nothing was heard" in note for note in running.notes()), 15)
        job.append(b"c\n" * 1000)
        proxy.thaw()
        job.end()
        running.done()
    assert same(local, job)


def test_login_and_host_key_failures_are_not_tried_again(
    start_sshd: Callable[..., TestSshd], make_job: Callable[..., FakeJob], followers: Followers
) -> None:
    with start_sshd(shell="zsh") as server:
        job = make_job("refused", home=server.home)
        running = followers.start(server.host(), "refused")
        assert wait_until(lambda: running.result is not None or bool(running.events[1:]), 15)
        server.new_host_keys()
        with pytest.raises(HostKeyError):
            running.done()
        with pytest.raises((AuthError, HostKeyError)):
            followers.start(server.host(identity_file=None), "refused").done()
        assert same(followers.directory / "refused.v1.log", job)


def test_a_host_that_was_never_reached_is_not_waited_for(followers: Followers) -> None:
    started = time.monotonic()
    with pytest.raises(UnreachableError):
        followers.start(Host("gone", address="127.0.0.1", port=1, user="nobody"), "any").done()
    assert time.monotonic() - started < 10


def test_waits_double_up_to_a_limit_and_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follower_module, "FIRST_WAIT", 0.5)
    backoff = Backoff()
    waits = [backoff.next() for _ in range(12)]
    for number, wait in enumerate(waits):
        longest = min(15.0, 0.5 * 2**number)
        assert 0.6 * longest <= wait <= longest
    assert Backoff().next() != Backoff().next()


# -- the log changes its shape


def test_a_rotated_log(zsh_server: TestSshd, make_job: Callable[..., FakeJob], followers: Followers) -> None:
    job = make_job("rotated")
    running = followers.start(zsh_server.host(), "rotated", show=True)
    local, older = (followers.directory / name for name in ("rotated.v1.log", "rotated.v1.log.old-1"))
    job.append(b"first file\n")
    assert wait_until(grown(local, 11), 15)
    with job.stdout.open("ab", buffering=0) as held:
        held.write(b"still the first file\n")
        job.stdout.rename(job.directory / "stdout.log.1")
        job.append(b"second file\n")
        assert wait_until(lambda: older.exists() and grown(local, 12)(), 15)
        # A process that inherited the file goes on writing into it under its new name.
        held.write(b"late\n")
        assert wait_until(grown(older, 37), 15)
    job.end()
    (file, *_) = running.done().files
    assert older.read_bytes() == (job.directory / "stdout.log.1").read_bytes() == b"first file\nstill the first file\nlate\n"
    assert same(local, job)
    assert file.older == [older]
    assert any("rotated" in note for note in running.notes())
    assert running.shown() == b"first file\nstill the first file\nsecond file\nlate\n"


def test_a_log_that_was_rotated_while_nobody_looked(
    zsh_server: TestSshd, make_job: Callable[..., FakeJob], followers: Followers
) -> None:
    job = make_job("nobody")
    job.append(b"first\n")
    followers.start(zsh_server.host(), "nobody", follow=False).done()
    job.append(b"first, later\n")
    job.stdout.rename(job.directory / "stdout.log.2")
    job.append(b"second\n")
    os.utime(job.directory / "stdout.log.2", (1, 1))
    job.stdout.rename(job.directory / "stdout.log.1")
    job.append(b"third\n")
    job.end()
    (file, *_) = followers.start(zsh_server.host(), "nobody").done().files
    assert [path.read_bytes() for path in file.older] == [b"first\nfirst, later\n", b"second\n"]
    assert same(followers.directory / "nobody.v1.log", job)


@pytest.mark.parametrize("later", [b"short\n", b"longer than what was there before\n"], ids=["shorter", "longer"])
def test_a_truncated_log(
    zsh_server: TestSshd, make_job: Callable[..., FakeJob], followers: Followers, later: bytes
) -> None:
    job = make_job(f"truncated{len(later)}")
    running = followers.start(zsh_server.host(), job.id)
    local = followers.directory / f"{job.id}.log"
    job.append(b"before it was truncated\n")
    assert wait_until(grown(local, 24), 15)
    with job.stdout.open("wb") as file:
        file.write(later)
    job.end()
    (kept, *_) = running.done().files
    assert [path.read_bytes() for path in kept.older] == [b"before it was truncated\n"]
    assert same(local, job)
    assert any("kept in" in note for note in running.notes())


def test_a_copy_of_something_else_is_left_alone(
    zsh_server: TestSshd, make_job: Callable[..., FakeJob], followers: Followers
) -> None:
    job = make_job("other")
    job.append(b"what the host has\n" * 10)
    job.end()
    followers.directory.mkdir()
    local = followers.directory / "other.v1.log"
    local.write_bytes(b"my only notes, called like a log\n")
    (local.parent / "other.v1.log.old-1").write_bytes(b"older ones\n")
    running = followers.start(zsh_server.host(), "other", follow=False)
    (file, *_) = running.done().files
    assert same(local, job)
    assert [(path.name, path.read_bytes()) for path in file.older] == [
        ("other.v1.log.old-2", b"my only notes, called like a log\n")
    ]
    assert (local.parent / "other.v1.log.old-1").read_bytes() == b"older ones\n"
    assert any("not the one" in note for note in running.notes())


def test_a_deleted_log_is_read_to_its_end(
    zsh_server: TestSshd, make_job: Callable[..., FakeJob], followers: Followers
) -> None:
    job = make_job("deleted")
    with job.stdout.open("ab", buffering=0) as held:
        running = followers.start(zsh_server.host(), "deleted")
        held.write(b"one\n")
        local = followers.directory / "deleted.v1.log"
        assert wait_until(grown(local, 4), 15)
        job.stdout.unlink()
        assert wait_until(lambda: any("deleted" in note for note in running.notes()), 15)
        held.write(b"two\n")
        assert wait_until(grown(local, 8), 15)
        held.write(b"three\n")
        job.end()
    (file, *_) = running.done().files
    assert file.missing
    assert local.read_bytes() == b"one\ntwo\nthree\n"


# -- this side


def test_two_followers_of_one_job(
    zsh_server: TestSshd, make_job: Callable[..., FakeJob], followers: Followers, tmp_path: Path
) -> None:
    job = make_job("shared")
    job.run(NOISY, 2.0, 5)
    first = followers.start(zsh_server.host(), "shared", show=True)
    local = followers.directory / "shared.v1.log"
    assert wait_until(grown(local, 1000), 15)
    second = followers.start(zsh_server.host(), "shared", show=True)
    third = followers.start(zsh_server.host(), "shared", show=True, output=tmp_path / "third.log")
    for one in (first, second, third):
        one.done()
    job.finished()
    assert same(local, job)
    assert same(tmp_path / "third.log", job)
    for one in (first, second, third):
        assert one.shown() == job.stdout.read_bytes()
    assert any("only shows" in note for note in second.notes())
    assert second.result is not None
    assert second.result.files[0].path is None


def test_a_full_disk_here_loses_nothing(
    zsh_server: TestSshd, make_job: Callable[..., FakeJob], followers: Followers, tmp_path: Path
) -> None:
    job = make_job("full")
    job.append(os.urandom(400_000))
    job.end()
    with mounted(tmp_path / "small", "size=256k,mode=700") as small:
        followers.directory = small / "logs"
        with pytest.raises(LocalIOError, match="No space left") as caught:
            followers.start(zsh_server.host(), "full").done()
        kept = (followers.directory / "full.v1.log").read_bytes()
        assert 0 < len(kept) < 400_000
        assert job.stdout.read_bytes().startswith(kept)
        assert f"its first {len(kept)} bytes are kept" in caught.value.message
        os.system(f"mount -o remount,size=2m {small}")  # noqa: S605 - a constant but for the test's own folder
        followers.start(zsh_server.host(), "full").done()
        assert same(followers.directory / "full.v1.log", job)


def test_what_is_shown_of_a_copy_that_is_here_already(
    zsh_server: TestSshd, make_job: Callable[..., FakeJob], followers: Followers
) -> None:
    job = make_job("again")
    job.append(b"0123456789\n" * 1000)
    followers.start(zsh_server.host(), "again", follow=False).done()
    job.append(b"new\n")
    job.end()
    everything = followers.start(zsh_server.host(), "again", show=True)
    everything.done()
    assert everything.shown() == job.stdout.read_bytes()
    last = followers.start(zsh_server.host(), "again", show=True, show_last=100)
    last.done()
    assert last.shown() == job.stdout.read_bytes()[-100:]
    assert Skipped("stdout", 11_004 - 100, followers.directory / "again.v1.log") in last.events


def _pin(server: TestSshd) -> str:
    """Return the server's key as an inventory pins it: the port is another one behind a proxy."""
    return " ".join(server.host_key())


@contextmanager
def _impatient(seconds: float) -> Iterator[None]:
    """Take a connection for dead sooner."""
    from remote_diag import link

    before = link.BEAT_EVERY, link.SILENCE_LIMIT
    link.BEAT_EVERY, link.SILENCE_LIMIT = seconds / 3, seconds
    try:
        yield
    finally:
        link.BEAT_EVERY, link.SILENCE_LIMIT = before
