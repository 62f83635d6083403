"""The host's side of following a log: files that change their shape, and a client that is not to be trusted or gone."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from remote_diag.agent.log_files import Copy, Log, Rewritten, Segment
from remote_diag.agent.log_reader import rank_logs
from remote_diag.agent.log_watch import Watch
from tests.support.agent_driver import AgentDriver
from tests.support.jobs import FakeJob

from .conftest import alive, wait_until

LINES = st.lists(st.binary(max_size=12).map(lambda data: data.replace(b"\n", b"x")), max_size=12)


@pytest.fixture
def job(bundle: Path, request: pytest.FixtureRequest) -> Iterator[FakeJob]:
    name = f"t{abs(hash(request.node.name)) % 10**9}.v1"
    made = FakeJob(bundle.parent.parent, name, cache="cache")
    yield made
    made.close()


class Client:
    """Speaks to a reader."""

    def __init__(self, driver: AgentDriver, job: str, *, follow: bool = True, lease_s: Any = 30.0) -> None:
        self.driver = driver
        driver.write(driver.nonce.encode() + b"\n")
        request = {"protocol": 1, "operation": "read-log", "job": job, "follow": follow, "lease_s": lease_s}
        driver.send("request", json.dumps(request).encode())

    def take(self, stream: str, **how: Any) -> None:
        self.driver.send("take", json.dumps({"stream": stream, **how}).encode())

    def wait(self, kind: str) -> Any:
        payload = self.driver.wait_for(kind).payload
        return payload if kind == "data" else json.loads(payload)

    def begin(self) -> None:
        assert [self.wait("offer")["stream"], self.wait("offer")["stream"]] == ["stdout", "stderr"]
        self.take("stdout", **{"from": "offset", "count": 0})
        self.take("stderr", **{"from": "nothing"})


def test_bytes_come_with_their_place_and_the_end_comes_last(agent: AgentDriver, job: FakeJob) -> None:
    client = Client(agent, job.id)
    found = client.wait("job")
    assert (found["job"], found["state"], found["log"]) == (job.id, "running", str(job.stdout))
    client.begin()
    assert client.wait("segment") == {
        "number": 1, "stream": "stdout", "event": "begun", "offset": 0, "size": 0,
        "path": str(job.stdout), "older": None,
    }  # fmt: skip
    job.append(b"one")
    assert client.wait("data") == b"\x01" + bytes(8) + b"one"
    job.append(b"two")
    assert client.wait("data") == b"\x01" + (3).to_bytes(8, "big") + b"two"
    job.end("failed", exit_code=9)
    answer = agent.finish()
    assert answer.outcome == "ok"
    assert answer.result == {"job": job.id, "state": "failed", "exit_code": 9, "signal": None}


def test_the_latest_attempt_answers_to_the_name(agent: AgentDriver, bundle: Path) -> None:
    home = bundle.parent.parent
    jobs = [FakeJob(home, f"attempts.v{number}", cache="cache") for number in (2, 10, 9)]
    FakeJob(home, "attempts.x.v99", cache="cache")
    # A launch that was cut off before anything was started is no job.
    Path(FakeJob(home, "attempts.v11", cache="cache").paths.started).unlink()
    assert Client(agent, "attempts").wait("job")["job"] == jobs[1].id


@pytest.mark.parametrize(
    ("payload", "cause"),
    [
        (b"no json", "not JSON"),
        (b"[]", "not a JSON object"),
        (b'{"stream":"../../etc/passwd","from":"offset","count":0}', "no log that was offered"),
        (b'{"stream":"stdout","from":"offset","count":-1}', "must be an integer"),
        (b'{"stream":"stdout","from":"offset","count":true}', "must be an integer"),
        (b'{"stream":"stdout","from":"copy","offset":5,"bytes":6,"sha256":"' + b"0" * 64 + b'"}', "must be an integer"),
        (b'{"stream":"stdout","from":"copy","offset":5,"bytes":5,"sha256":"x"}', "needs a sha256"),
        (b'{"stream":"stdout","from":"elsewhere"}', "from where"),
    ],
)
def test_a_client_that_talks_nonsense(agent: AgentDriver, job: FakeJob, payload: bytes, cause: str) -> None:
    client = Client(agent, job.id)
    client.wait("offer")
    client.wait("offer")
    agent.send("take", payload)
    end = agent.finish().end
    assert end["outcome"] == "environment"
    assert cause in end["message"]


@pytest.mark.parametrize("lease", [0, -1, "30", True, 1e9, None])
def test_a_request_that_makes_no_sense(agent: AgentDriver, job: FakeJob, lease: Any) -> None:
    Client(agent, job.id, lease_s=lease)
    end = agent.finish().end
    assert end["outcome"] == "environment"
    assert "lease_s" in end["message"]


@pytest.mark.parametrize("name", ["nothing", "../x", "", ".", "x" * 300, "a\x00b", "A.v1"])
def test_a_job_that_is_not_there(agent: AgentDriver, name: str) -> None:
    Client(agent, name)
    assert agent.finish().end["outcome"] == "no-job"


def test_a_reader_ends_when_its_client_says_nothing(agent: AgentDriver, job: FakeJob) -> None:
    client = Client(agent, job.id, lease_s=0.5)
    client.begin()
    assert agent.finish().end["outcome"] == "lease"


def test_a_reader_ends_when_its_client_is_gone_whatever_is_unread(bundle: Path, job: FakeJob) -> None:
    job.append(os.urandom(1 << 22))
    with AgentDriver(bundle) as driver:
        client = Client(driver, job.id)
        client.begin()
        client.wait("data")
        pid = driver.process.pid
        assert driver.process.stdin is not None
        driver.process.stdin.close()
        assert wait_until(lambda: not alive(pid), 5)


def test_beats_are_answered_while_nothing_happens(agent: AgentDriver, job: FakeJob) -> None:
    Client(agent, job.id).begin()
    agent.send("beat")
    agent.wait_for("beat")


def test_a_client_that_reads_nothing_costs_no_memory_and_loses_nothing(bundle: Path, job: FakeJob) -> None:
    data = os.urandom(1 << 20) * 48
    job.append(data)
    with AgentDriver(bundle) as driver:
        client = Client(driver, job.id)
        client.begin()
        time.sleep(0.5)
        status = Path(f"/proc/{driver.process.pid}/status").read_text()
        peak = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM:"))
        assert peak < 40_000
        job.end()
        answer = driver.finish()
    assert hashlib.sha256(b"".join(piece[9:] for piece in answer.of("data"))).digest() == hashlib.sha256(data).digest()


def test_an_idle_reader_costs_next_to_nothing(agent: AgentDriver, job: FakeJob) -> None:
    client = Client(agent, job.id)
    client.begin()
    job.append(b"x")
    client.wait("data")

    def busy() -> float:
        return int(Path(f"/proc/{agent.process.pid}/schedstat").read_text().split()[0]) / 1e9

    before = busy()
    time.sleep(2.0)
    assert (busy() - before) / 2.0 < 0.005


def test_links_are_not_followed(agent: AgentDriver, job: FakeJob, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(b"not a log")
    job.stdout.unlink()
    job.stdout.symlink_to(secret)
    job.end()
    client = Client(agent, job.id)
    client.begin()
    answer = agent.finish()
    assert answer.of("data") == []
    with pytest.raises(OSError, match="regular"):
        Segment(str(tmp_path))


# -- files


@given(LINES, st.binary(max_size=5).map(lambda data: data.replace(b"\n", b"")), st.integers(0, 15))
def test_the_last_lines_begin_where_they_begin(lines: list[bytes], rest: bytes, count: int) -> None:
    path = Path(f"/tmp/rdiag-lines-{os.getpid()}")
    whole = b"".join(line + b"\n" for line in lines) + rest
    path.write_bytes(whole)
    segment = Segment(str(path))
    expected = b"".join(whole.splitlines(keepends=True)[-count:]) if count and whole.isascii() else None
    start = segment.start_of_last_lines(count)
    segment.close()
    path.unlink()
    shown = whole[start:]
    assert start == 0 or whole[start - 1 : start] == b"\n" or count == 0
    assert len(shown.split(b"\n")) - shown.endswith(b"\n") <= max(count, 0) or not shown or count == 0
    if expected is not None and not any(byte in whole for byte in b"\r\x0b\x0c\x1c\x1d\x1e"):
        assert shown == expected


def test_last_lines_of_a_file_with_very_long_ones(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"first\n" + b"x" * 300_000 + b"\n" + b"y" * 200_000 + b"\nlast")
    segment = Segment(str(path))
    assert segment.start_of_last_lines(1) == 6 + 300_001 + 200_001
    assert segment.start_of_last_lines(2) == 6 + 300_001
    assert segment.start_of_last_lines(3) == 6
    assert segment.start_of_last_lines(4) == segment.start_of_last_lines(99) == 0
    segment.close()


def test_a_file_that_was_rewritten_is_noticed_even_at_the_same_size(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"abcdef")
    segment = Segment(str(path))
    assert segment.read(100) == b"abcdef"
    assert segment.read(100) == b""
    path.write_bytes(b"abcdeX")
    with pytest.raises(Rewritten):
        segment.read(100)
    segment.close()


@settings(max_examples=150, deadline=None)
@given(st.lists(st.sampled_from(["append", "append", "append", "truncate", "rotate", "read", "delete"]), max_size=25))
def test_whatever_happens_to_a_file_every_segment_is_a_copy_of_it(steps: list[str]) -> None:
    folder = Path(f"/tmp/rdiag-log-{os.getpid()}")
    folder.mkdir()
    path = folder / "log"
    path.touch()
    numbers = iter(range(1, 1000))
    log = Log("stdout", str(path), lambda: next(numbers))
    log.take(None, None)
    copies: dict[int, bytes] = {}
    # What the file with this number holds, as far as it is known: only the last number can still change its shape.
    content: list[bytes] = [b""]

    def read() -> None:
        log.look()
        while True:
            for _, segment in log.news:
                if segment is not None:
                    copies[segment.number] = b""
            log.news.clear()
            piece = log.read(7)
            if piece is None and not log.news:
                return
            if piece is not None:
                segment, offset, data = piece
                assert offset == len(copies[segment.number])
                copies[segment.number] += data

    try:
        read()
        for number, step in enumerate(steps):
            if step == "append":
                if not path.exists():
                    content.append(b"")
                content[-1] += b"%06d;" % number
                with path.open("ab") as file:
                    file.write(b"%06d;" % number)
            elif step == "truncate" and path.exists() and content[-1]:
                read()
                path.write_bytes(b"")
                content.append(b"")
            elif step == "rotate" and path.exists():
                read()
                path.rename(folder / f"log.{number}")
                path.touch()
                content.append(b"")
            elif step == "delete" and path.exists():
                read()
                path.unlink()
            read()
        assert [copies[number] for number in sorted(copies)] == content
    finally:
        log.close()
        for one in folder.iterdir():
            one.unlink()
        folder.rmdir()


def test_a_copy_is_found_again_among_rotated_files(tmp_path: Path) -> None:
    path = tmp_path / "stdout.log"
    path.write_bytes(b"newest")
    (tmp_path / "stdout.log.1").write_bytes(b"the old one, longer")
    (tmp_path / "stdout.log.gz").write_bytes(b"no")
    os.utime(tmp_path / "stdout.log.gz", (1, 1))
    os.utime(tmp_path / "stdout.log.1", (2, 2))
    numbers = iter(range(1, 10))
    log = Log("stdout", str(path), lambda: next(numbers))
    log.take(Copy(7, 7, hashlib.sha256(b"the old").hexdigest()), None)
    log.freeze()
    told: list[tuple[str, str, object]] = []
    for _ in range(10):
        told += [(event, segment.path, segment.offset) for event, segment in log.news if segment is not None]
        log.news.clear()
        piece = log.read(100)
        if piece is not None:
            told.append(("data", piece[0].path, piece[2]))
    log.close()
    assert told == [
        ("resumed", str(path) + ".1", 7),
        ("data", str(path) + ".1", b" one, longer"),
        ("rotated", str(path), 0),
        ("data", str(path), b"newest"),
    ]


# -- ranks, and waking up


def test_ranks_are_named_after_what_torchrun_made(tmp_path: Path) -> None:
    for name in (
        "b_run/attempt_0/0/stdout.log", "b_run/attempt_0/0/stderr.log", "b_run/attempt_1/0/stdout.log",
        "a_run/attempt_0/12/stdout.log", "a_run/attempt_0/12/error.json", "a_run/attempt_0/012/stdout.log",
        "a_run/attempt_0/-1/stdout.log", "a_run/attempt_x/0/stdout.log", "a_run/attempt_0/²/stdout.log", "stray/stdout.log",
    ):  # fmt: skip
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    os.utime(tmp_path / "b_run" / "attempt_0", (100, 100))
    assert [(stream, path[len(str(tmp_path)) + 1 :]) for stream, path in rank_logs(str(tmp_path))] == [
        ("rank0", "b_run/attempt_0/0/stdout.log"),
        ("rank0.err", "b_run/attempt_0/0/stderr.log"),
        ("rank0.attempt1", "b_run/attempt_1/0/stdout.log"),
        ("rank12.run1", "a_run/attempt_0/12/stdout.log"),
    ]
    assert rank_logs(str(tmp_path / "nothing")) == []


def test_without_inotify_files_are_looked_at_more_often_while_they_grow() -> None:
    watch = Watch(inotify=False)
    assert watch.descriptor == -1
    waits = [watch.interval(busy=False) for _ in range(30)]
    assert waits == sorted(waits)
    assert waits[0] < 0.004
    assert waits[-1] == 0.05
    assert watch.interval(busy=True) == 0.002


def test_announcements_that_do_not_come_are_not_relied_on(tmp_path: Path) -> None:
    watch = Watch()
    if watch.descriptor < 0:
        pytest.skip("no inotify here")
    watch.add(str(tmp_path))
    assert watch.interval(busy=False) == 0.25
    (tmp_path / "a").write_bytes(b"x")
    for _ in range(10):
        watch.missed()  # Announced by now: nothing was missed.
    assert watch.descriptor >= 0
    watch.drain()
    for _ in range(3):
        watch.missed()
    assert watch.descriptor < 0
    assert watch.interval(busy=False) <= 0.05
    watch.close()
