"""``rdiag metrics`` as a process: over jobs of this machine and of one behind sshd, in a pipe and on a terminal."""

from __future__ import annotations

import csv
import io
import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest

from .support.cli import Ran, command, environment, rdiag
from .support.jobs import FakeJob
from .support.sshd import TestSshd, wait_until

RUN = b"".join(b"step=%d loss=%.2f lr=1e-05\n" % (step, 6.0 - step * 0.05) for step in range(40))

STEADY = """
for step in range(1000):
    put(b"step=%d loss=2.0\\n" % step)
    time.sleep(0.01)
end()
"""


@pytest.fixture
def job(tmp_path: Path) -> Iterator[FakeJob]:
    """A job of this machine, running."""
    made = FakeJob(tmp_path, "tune.v1")
    yield made
    made.close()


def metrics(home: Path, *arguments: str) -> Ran:
    return rdiag("metrics", "tune", *arguments, home=home)


class Following:
    """A running ``rdiag metrics -f``, whose output is read as it comes."""

    def __init__(self, home: Path, *arguments: str, stdout: int | IO[bytes] = subprocess.PIPE) -> None:
        self.out = bytearray()
        self.err = bytearray()
        self.process = subprocess.Popen(
            command("metrics", "tune", "-f", *arguments),
            cwd=home,
            env=environment(home, TERM="xterm-256color"),
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=subprocess.PIPE,
        )
        pairs = ((self.process.stdout, self.out), (self.process.stderr, self.err))
        self._threads = [threading.Thread(target=self._read, args=pair, daemon=True) for pair in pairs if pair[0]]
        for thread in self._threads:
            thread.start()

    @staticmethod
    def _read(stream: IO[bytes], into: bytearray) -> None:
        while data := os.read(stream.fileno(), 65536):
            into.extend(data)

    def __enter__(self) -> Following:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        for thread in self._threads:
            thread.join(5)
        for stream in (self.process.stdout, self.process.stderr):
            if stream is not None:
                stream.close()

    def end(self) -> int:
        code = self.process.wait(30)
        for thread in self._threads:
            thread.join(5)
        assert b"Traceback" not in self.err, self.err.decode()
        return code


def test_a_table_of_series(job: FakeJob, tmp_path: Path) -> None:
    job.append(RUN)
    job.append(b"\rstep 1: loss=9.5\rstep 2: loss=9.0\n", "stderr")
    job.end()
    ran = metrics(tmp_path)
    assert (ran.code, ran.err) == (0, "")
    rows = [one.split() for one in ran.out.splitlines()]
    assert rows[0] == ["local:", "tune.v1:", "exited:", "ok"]
    assert rows[1] == ["series", "log", "first", "min", "max", "last", "count", "course"]
    assert rows[2][:7] == ["loss", "stdout", "6", "4.05", "6", "4.05", "40"]
    assert rows[3][:7] == ["loss", "stderr", "9.5", "9", "9.5", "9", "2"]
    assert (tmp_path / "rdiag-logs" / "tune.v1.log").read_bytes() == RUN
    assert metrics(tmp_path).out == ran.out


def test_programs_get_every_point_or_one_object(job: FakeJob, tmp_path: Path) -> None:
    job.append(RUN + b"{'loss': nan, 'epoch': 1.5}\n")
    job.end("failed", exit_code=3)
    ran = metrics(tmp_path, "--csv")
    assert ran.code == 1
    assert "rdiag: fail: loss: is nan from line 41 on" in ran.err
    points = list(csv.DictReader(io.StringIO(ran.out)))
    assert len(points) == 81
    assert points[0] == {
        "stream": "stdout", "line": "1", "metric": "loss", "position": "", "split": "", "rank": "", "step": "0", "epoch": "",
        "value": "6.0",
    }  # fmt: skip
    assert (points[-1]["epoch"], points[-1]["value"]) == ("1.5", "nan")
    ran = metrics(tmp_path, "--json")
    answer = ran.json
    assert (ran.code, answer["state"], answer["exit_code"], answer["status"]) == (1, "failed", 3, "fail")
    loss = next(one for one in answer["series"] if one["label"] == "loss")
    assert (loss["first"], loss["last"], loss["count"], loss["not_finite"]) == (6.0, 4.05, 40, 1)
    assert [point["step"] for point in loss["points"]] == list(range(40))
    assert [one["code"] for one in answer["findings"]] == ["not-finite"]


def test_what_is_not_possible_is_said_before_anything_is_asked(tmp_path: Path) -> None:
    assert metrics(tmp_path, "--csv", "--json").code == 2
    assert metrics(tmp_path, "--plot", "a.pdf").code == 2
    assert metrics(tmp_path, "--vocab", "1").code == 2
    nothing = metrics(tmp_path)
    assert nothing.code == 10
    assert "tune" in nothing.err


def test_a_job_without_numbers_is_unknown(job: FakeJob, tmp_path: Path) -> None:
    job.append(b"hello\n")
    job.end()
    ran = metrics(tmp_path, "--plot", "empty.html")
    assert (ran.code, "no loss, accuracy or learning rate in 1 lines" in ran.out) == (10, True)
    assert "rdiag logs tune\n" in ran.out
    assert "no numbers" in (tmp_path / "empty.html").read_text()


def test_lines_and_alerts_come_while_it_runs(job: FakeJob, tmp_path: Path) -> None:
    job.append(b"step=0 loss=9.0 lr=1e-05\n" * 4)
    with Following(tmp_path, "--vocab", "1000", "--plot", "loss.html") as following:
        assert wait_until(lambda: b"step 0  loss 9  lr 1e-05\n" in following.out, 20)
        assert b"uniform" not in following.err
        job.append(b"step=1 loss=9.0 lr=1e-05\n")
        assert wait_until(lambda: b"confidently wrong: mapping or shift, not warm-up" in following.err, 20)
        job.append(b"[rank1]: Watchdog caught collective operation timeout: WorkNCCL\n", "stderr")
        assert wait_until(lambda: b"rank 1 failed first" in following.err, 20)
        job.append(b"step=2 loss=8.5")
        job.end("failed", exit_code=1)
        assert following.end() == 1
    assert b"step 2  loss 8.5\n" in following.out
    assert b"local: tune.v1: failed: fail\n" in following.out.replace(b" \n", b"\n")
    assert (tmp_path / "loss.html").read_text().count("<svg") == 2


def test_silence_is_told(job: FakeJob, tmp_path: Path) -> None:
    job.append(b"step=0 loss=2.0\n")
    with Following(tmp_path, "--stall", "0.02") as following:
        assert wait_until(lambda: b"degraded: no line for 0.02 minutes while the job runs" in following.err, 20)
        job.append(b"step=1 loss=1.9\n")
        assert wait_until(lambda: b"step 1" in following.out, 20)
        job.end()
        assert following.end() == 1
    assert b"then it went on" in following.out


def test_interrupted_it_shows_what_there_is_and_how_to_come_back(job: FakeJob, tmp_path: Path) -> None:
    job.append(RUN)
    with Following(tmp_path) as following:
        assert wait_until(lambda: b"step 39" in following.out, 20)
        following.process.send_signal(signal.SIGINT)
        assert following.end() == 130
    assert b"series" in following.out
    assert b"tune.v1 goes on at local" in following.err
    assert b"rdiag metrics tune.v1 -f --host local" in following.err


def test_a_reader_that_goes_away(job: FakeJob, tmp_path: Path) -> None:
    job.run(STEADY)
    done = subprocess.run(
        ["sh", "-c", '{ "$@"; echo "$?" >&3; } 3>code | head -n 1', "sh", *command("metrics", "tune", "--csv", "-f")],
        cwd=tmp_path, env=environment(tmp_path), stdin=subprocess.DEVNULL, capture_output=True, timeout=60, check=True,
    )  # fmt: skip
    assert done.stdout.startswith(b"stream,")
    assert (done.stderr, (tmp_path / "code").read_text()) == (b"", "141\n")


def test_a_terminal_gets_a_chart_that_moves(job: FakeJob, tmp_path: Path) -> None:
    job.append(RUN)
    leader, follower = os.openpty()
    received = bytearray()

    def receive() -> None:
        try:
            while data := os.read(leader, 1 << 16):
                received.extend(data)
        except OSError:
            return

    reader = threading.Thread(target=receive, daemon=True)
    reader.start()
    with os.fdopen(follower, "wb", buffering=0) as stdout, Following(tmp_path, stdout=stdout) as following:
        assert wait_until(lambda: b"tune.v1: running" in received and "█".encode() in received, 20)
        job.append(b"step=40 loss=nan\n")
        assert wait_until(lambda: b"+1 NaN" in received, 20)
        assert wait_until(lambda: b"rdiag: fail: loss: is nan" in received, 20)
        job.append(b"step=41 loss=\x1b]0;x\x07 loss=1.25\n")
        assert wait_until(lambda: b"1.25" in received, 20)
        job.end()
        assert following.end() == 1
    reader.join(5)
    os.close(leader)
    assert b"]0;" not in received
    assert b"local: tune.v1: exited" in received
    assert following.err == b""


@pytest.mark.ssh
def test_over_ssh(zsh_server: TestSshd, tmp_path: Path) -> None:
    job = FakeJob(zsh_server.home, "metricsssh.v1")
    job.append(RUN)
    for rank in (0, 1):
        log = job.directory / "ranks" / "none_abc" / "attempt_0" / str(rank) / "stderr.log"
        log.parent.mkdir(parents=True)
        log.write_bytes(b"step=1 acc=0.5\n" * (rank + 1))
    job.end()
    inventory = tmp_path / "hosts.yaml"
    inventory.write_text(
        f"hosts:\n  zsh: {{address: 127.0.0.1, port: {zsh_server.port}, user: {zsh_server.user},\n"
        f"        identity_file: {zsh_server.identity_file}, host_key: {' '.join(zsh_server.host_key())}}}\n"
    )
    ran = rdiag("metrics", "metricsssh", "-H", "zsh", "-i", str(inventory), "--json", home=tmp_path)
    assert ran.code == 0, ran.err
    assert (ran.json["host"], ran.json["job"]) == ("zsh", "metricsssh.v1")
    assert [(one["stream"], one["label"], one["rank"], one["count"]) for one in ran.json["series"]] == [
        ("stdout", "loss", None, 40), ("rank0.err", "acc", 0, 1), ("rank1.err", "acc", 1, 2), ("stdout", "lr", None, 40),
    ]  # fmt: skip
