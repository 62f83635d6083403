"""``rdiag logs`` as a process: killed, frozen, read by half, on a terminal; against logs that are hard to swallow."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import pytest

from .support.cli import Ran, command, environment, rdiag
from .support.jobs import FakeJob
from .support.proxy import Proxy
from .support.sshd import TestSshd, wait_until

pytestmark = pytest.mark.ssh

STEADY = """
until = time.monotonic() + float(arguments[0])
number = 0
while time.monotonic() < until:
    number += 1
    put(b"line %d %s\\n" % (number, b"." * 100))
    time.sleep(0.005)
put(b"the end\\n")
end()
"""
FAST = """
block = b"".join(b"%06d %s\\n" % (number, b"x" * 92) for number in range(10486))
for _ in range(int(arguments[0])):
    put(block)
end()
"""
CLIENT_LIMIT = 130 << 20
"""Bytes that the client may take at most; it takes 60 MiB before it has read anything."""
AGENT_LIMIT = 40 << 20


@pytest.fixture
def inventory(zsh_server: TestSshd, tmp_path: Path) -> Path:
    return write_inventory(tmp_path, zsh_server, zsh_server.port)


def write_inventory(folder: Path, server: TestSshd, port: int) -> Path:
    path = folder / f"hosts-{port}.yaml"
    path.write_text(
        f"hosts:\n  zsh: {{address: 127.0.0.1, port: {port}, user: {server.user},\n"
        f"        identity_file: {server.identity_file}, host_key: {' '.join(server.host_key())}}}\n"
        "  other: {address: 127.0.0.1, port: 1, user: nobody}\n"
    )
    return path


@pytest.fixture
def make_job(zsh_server: TestSshd) -> Iterator[Callable[[str], FakeJob]]:
    jobs: list[FakeJob] = []

    def make(name: str) -> FakeJob:
        jobs.append(FakeJob(zsh_server.home, f"{name}.v1"))
        return jobs[-1]

    yield make
    for job in jobs:
        job.close()


class Client:
    """A running ``rdiag logs``; killed at the end at the latest."""

    def __init__(self, inventory: Path, *arguments: str, stdout: int | IO[bytes] = subprocess.DEVNULL) -> None:
        self.process = subprocess.Popen(
            command("logs", *arguments, "-H", "zsh", "-i", str(inventory)),
            cwd=inventory.parent,
            env=environment(inventory.parent),
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=subprocess.PIPE,
        )

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
        self.process.communicate()

    def end(self, seconds: float = 40.0) -> tuple[int, str]:
        """Return exit status and stderr."""
        _, err = self.process.communicate(timeout=seconds)
        text = err.decode()
        assert "Traceback" not in text, text
        return self.process.returncode, text


class Memory:
    """Watches how much memory processes take at most."""

    def __init__(self, pids: Callable[[], list[int]]) -> None:
        self._pids = pids
        self._stop = threading.Event()
        self.peak = 0
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Memory:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(0.05):
            for pid in self._pids():
                try:
                    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
                        if line.startswith("VmHWM:"):
                            self.peak = max(self.peak, int(line.split()[1]) << 10)
                except OSError:
                    continue


def agents(server: TestSshd) -> list[int]:
    found = []
    for pid in server.session_pids():
        try:
            if b"/agent/__main__.py" in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(pid)
        except OSError:
            continue
    return found


def logs(inventory: Path, *arguments: str, **options: Any) -> Ran:
    return rdiag("logs", *arguments, "-H", "zsh", "-i", str(inventory), home=inventory.parent, **options)


def test_programs_get_a_copy_and_an_object(inventory: Path, make_job: Callable[[str], FakeJob]) -> None:
    job = make_job("programs")
    job.append(b"out \xff\x00\r\n")
    job.append(b"err\n", "stderr")
    job.end("failed", exit_code=3)
    output = inventory.parent / "copy"
    ran = logs(inventory, "programs", "--no-follow", "--output", str(output), "--json")
    assert ran.code == 0, ran.err
    answer = ran.json
    files = {file["stream"]: file for file in answer.pop("files")}
    assert answer == {
        "schema_version": 1, "host": "zsh", "job": "programs.v1", "state": "failed", "exit_code": 3, "signal": None,
    }  # fmt: skip
    assert files["stdout"] == {
        "stream": "stdout", "path": str(output), "bytes": 8, "remote": str(job.stdout), "older": [], "missing": False,
    }  # fmt: skip
    assert output.read_bytes() == b"out \xff\x00\r\n"
    assert output.with_name("copy.err.log").read_bytes() == b"err\n"
    quiet = logs(inventory, "programs", "--output", str(output))
    assert (quiet.code, quiet.out) == (0, "")


def test_what_is_printed_is_safe_and_raw_is_raw(inventory: Path, make_job: Callable[[str], FakeJob]) -> None:
    job = make_job("printed")
    raw = b"\x1b]0;title\x07hello\n 10%\r 50%\r100%\n\x1b[31mred\x1b[0m \xff\nno end"
    job.append(raw)
    job.append(b"complaint\n", "stderr")
    job.end()
    shown = logs(inventory, "printed")
    assert shown.code == 0
    assert shown.out.splitlines() == ["\\x1b]0;title\\x07hello", "100%", "red \\xff", "stderr: complaint", "no end"]
    process = subprocess.run(
        command("logs", "printed", "--raw", "-H", "zsh", "-i", str(inventory)),
        env=environment(inventory.parent), cwd=inventory.parent, capture_output=True, check=True,
    )  # fmt: skip
    assert (process.stdout, process.stderr) == (raw, b"complaint\n")
    assert (inventory.parent / "rdiag-logs" / "printed.v1.log").read_bytes() == raw
    assert logs(inventory, "printed", "--tail", "2").out.splitlines()[0] == "red \\xff"
    assert logs(inventory, "printed", "--since", str(len(raw) - 3)).out.splitlines()[-1] == "end"


def test_a_client_that_is_killed_goes_on_where_it_was(inventory: Path, make_job: Callable[[str], FakeJob]) -> None:
    job = make_job("sigkill")
    job.run(STEADY, 3.0)
    local = inventory.parent / "rdiag-logs" / "sigkill.v1.log"
    size = 0
    for _ in range(3):
        with Client(inventory, "sigkill", "-f") as client:
            assert wait_until(lambda: local.exists() and local.stat().st_size > size + 5_000, 15)  # noqa: B023
            client.process.kill()
        size = local.stat().st_size
    with Client(inventory, "sigkill", "-f") as client:
        assert client.end()[0] == 0
    job.finished()
    assert local.read_bytes() == job.stdout.read_bytes()
    assert [path.name for path in local.parent.iterdir()] == [local.name]


@pytest.mark.parametrize("lost", [False, True], ids=["line-held", "line-lost"])
def test_a_client_that_was_frozen_catches_up(
    inventory: Path, zsh_server: TestSshd, make_job: Callable[[str], FakeJob], lost: bool
) -> None:
    """A laptop that slept: for a moment, or for so long that nothing of the connection was left."""
    job = make_job(f"sleep{lost}".lower())
    job.run(STEADY, 3.0)
    local = inventory.parent / "rdiag-logs" / f"{job.id}.log"
    with Client(inventory, job.id, "-f", "-v") as client:
        assert wait_until(lambda: local.exists() and local.stat().st_size > 10_000, 15)
        client.process.send_signal(signal.SIGSTOP)
        if lost:
            for pid in zsh_server.session_pids():
                os.kill(pid, signal.SIGKILL)
        job.finished()
        assert local.stat().st_size < job.stdout.stat().st_size
        client.process.send_signal(signal.SIGCONT)
        code, err = client.end()
    assert code == 0
    assert ("connected again" in err) == lost
    assert local.read_bytes() == job.stdout.read_bytes()


def test_a_reader_that_goes_away(inventory: Path, make_job: Callable[[str], FakeJob]) -> None:
    job = make_job("head")
    job.run(STEADY, 2.0)
    with Client(inventory, "head", "-f", stdout=subprocess.PIPE) as client:
        assert client.process.stdout is not None
        assert client.process.stdout.readline().startswith(b"line 1 ")
        client.process.stdout.close()
        client.process.stdout = None
        assert client.end() == (141, "")
    assert logs(inventory, "head", "-f", "--output", "head.log").code == 0
    job.finished()
    assert (inventory.parent / "head.log").read_bytes() == job.stdout.read_bytes()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_interrupting_leaves_the_job_alone_and_says_how_to_go_on(
    inventory: Path, zsh_server: TestSshd, make_job: Callable[[str], FakeJob], number: int, code: int
) -> None:
    job = make_job(f"interrupted{code}")
    local = inventory.parent / "rdiag-logs" / f"{job.id}.log"
    with Client(inventory, job.id, "-f") as client:
        job.append(b"running\n")
        assert wait_until(local.exists, 15)
        client.process.send_signal(number)
        status, err = client.end()
    assert status == code
    assert f"{job.id} goes on at zsh" in err
    assert f"rdiag logs {job.id} -f --host zsh" in err
    assert f"rdiag stop {job.id} --host zsh" in err
    assert wait_until(lambda: not agents(zsh_server), 5)
    assert json.loads((job.directory / "state.json").read_text())["state"] == "running"


def test_a_terminal_gets_lines_colours_and_nothing_else(inventory: Path, make_job: Callable[[str], FakeJob]) -> None:
    job = make_job("terminal")
    job.append(b"old\n" * 40_000 + b"\x1b[1;32mgreen\x1b[0m\x1b[2J\n")
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
    with os.fdopen(follower, "wb", buffering=0) as stdout, Client(inventory, "terminal", "-f", stdout=stdout) as client:
        assert wait_until(lambda: b"green" in received, 15)
        job.append(b" 10%|#  ")
        assert wait_until(lambda: b" 10%|#  " in received, 15)
        job.append(b"\r 90%|## ")
        assert wait_until(lambda: b" 90%|## " in received, 15)
        job.append(b"done\n", "stderr")
        job.append(b"\r100%|###\n")
        job.end()
        assert client.end()[0] == 0
    reader.join(5)
    os.close(leader)
    # Only the end of what was there already, in whole lines.
    assert 60_000 < len(received.replace(b"\r\n", b"\n")) < 67_000
    assert received.startswith(b"old\r\n")
    assert b"\x1b[1;32mgreen\x1b[0m\\x1b[2J" in received
    assert b"\x1b[2J" not in received
    assert b"stderr: done\r\n" in received
    assert b"\r\x1b[2K100%|###\r\n" in received


def test_a_line_of_100_megabytes(inventory: Path, zsh_server: TestSshd, make_job: Callable[[str], FakeJob]) -> None:
    job = make_job("line")
    with job.stdout.open("wb") as file:
        for number in range(100):
            file.write(bytes([33 + number % 90]) * 1_000_000)
        file.write(b"\nafter it\n")
    job.end()
    with (
        Client(inventory, "line", stdout=subprocess.PIPE) as client,
        Memory(lambda: [client.process.pid]) as here,
        Memory(lambda: agents(zsh_server)) as there,
    ):
        assert client.process.stdout is not None
        count, last = 0, b""
        while data := client.process.stdout.read(1 << 16):
            count += len(data)
            last = (last + data)[-100:]
        client.process.stdout = None
        assert client.end()[0] == 0
    assert count == 100_000_000 + len(b"\nafter it\n")
    assert last.endswith(b"\nafter it\n")
    assert 0 < here.peak < CLIENT_LIMIT
    assert 0 < there.peak < AGENT_LIMIT
    local = inventory.parent / "rdiag-logs" / "line.v1.log"
    assert subprocess.run(["cmp", local, job.stdout], check=False).returncode == 0
    local.unlink()


def test_a_job_that_writes_faster_than_the_line_carries(
    zsh_server: TestSshd, tmp_path: Path, make_job: Callable[[str], FakeJob]
) -> None:
    job = make_job("fast")
    with Proxy(zsh_server.port, bytes_per_s=8e6) as proxy:
        inventory = write_inventory(tmp_path, zsh_server, proxy.port)
        local = tmp_path / "rdiag-logs" / "fast.v1.log"
        with (
            Client(inventory, "fast", "-f") as client,
            Memory(lambda: [client.process.pid]) as here,
            Memory(lambda: agents(zsh_server)) as there,
        ):
            assert wait_until(local.exists, 15)
            writer = job.run(FAST, 24)
            assert writer.wait(10) == 0
            # All of it was written at once: nobody slowed the job down.
            assert local.stat().st_size < job.stdout.stat().st_size / 2
            assert client.end(30)[0] == 0
    assert 0 < here.peak < CLIENT_LIMIT
    assert 0 < there.peak < AGENT_LIMIT
    assert local.read_bytes() == job.stdout.read_bytes()


def test_a_copy_that_does_not_follow_ends_although_the_job_writes_on(
    inventory: Path, make_job: Callable[[str], FakeJob]
) -> None:
    job = make_job("endless")
    writer = job.run("while True: put(b'y\\n' * 2048); time.sleep(0.0005)")
    assert wait_until(lambda: job.stdout.stat().st_size > 100_000, 10)
    started = time.monotonic()
    assert logs(inventory, "endless", "--output", "endless.log").code == 0
    assert time.monotonic() - started < 15
    assert writer.poll() is None
    writer.kill()
    copy = (inventory.parent / "endless.log").read_bytes()
    assert len(copy) > 100_000
    assert job.stdout.read_bytes().startswith(copy)


def test_what_cannot_be_asked_for(inventory: Path, make_job: Callable[[str], FakeJob]) -> None:
    assert logs(inventory, "nothing").code == 10
    job = make_job("gone")
    job.stdout.unlink()
    job.end()
    assert logs(inventory, "gone").code == 10
    for arguments in (["x", "--tail", "1", "--since", "1"], ["x", "--rank", "one"], ["x", "--since", "1x"],
                      ["x", "--tail", "1", "--output", "f"], ["x", "-H", "other"]):  # fmt: skip
        ran = logs(inventory, *arguments)
        assert ran.code == 2, (arguments, ran)
        assert ran.out == ""
