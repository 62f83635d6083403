"""The real ``torchrun``, with gloo on two CPU ranks: launched, followed live, failed and stopped, here and over a real sshd."""

from __future__ import annotations

import re
import secrets
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import sshd
from tests.support.cli import command, environment, rdiag
from tests.support.job_host import end_jobs, marked

pytestmark = pytest.mark.ssh

PATIENCE = 120
TRAIN = """
import os, sys, time
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, steps, culprit = dist.get_rank(), int(sys.argv[1]), int(sys.argv[2])
torch.manual_seed(0)
weights = torch.zeros(4, requires_grad=True)
inputs = torch.randn(64, 4)
wanted = inputs @ torch.tensor([1.0, 2.0, 3.0, 4.0])
optimizer = torch.optim.SGD([weights], lr=0.1)
for step in range(steps):
    loss = ((inputs[rank::2] @ weights - wanted[rank::2]) ** 2).mean()
    optimizer.zero_grad()
    loss.backward()
    dist.all_reduce(weights.grad)
    weights.grad /= 2
    optimizer.step()
    print(f"step={step} loss={loss.item():.6f}", flush=True)
    print(f"rank {rank} was here", file=sys.stderr, flush=True)
    if rank == culprit and step == 2:
        raise RuntimeError("a planted fault")
    # The first step is read by the test before the second begins.
    while step == 0 and not os.path.exists(sys.argv[3]):
        time.sleep(0.01)
    time.sleep(0.02)
dist.destroy_process_group()
"""
TORCHRUN = str(Path(sys.executable).with_name("torchrun"))


class Place:
    """Where the job runs, and what is seen of it there."""

    def __init__(self, name: str, work: Path, home: Path) -> None:
        self.name = name
        self.work = work
        self.cache = home / ".cache" / "rdiag"
        self.go = work / "go"
        # Numbers of attempts are not used again, and the server is not this test's alone.
        self.train = f"train-{secrets.token_hex(3)}"
        self.job = f"{self.train}.v1"

    def launch(self, *, steps: int, culprit: int = -1, redirect: str = "--tee") -> list[str]:
        return command(
            "launch", "--host", self.name, "--name", self.train, "--file", "train.py", "--env", "OMP_NUM_THREADS=1", "--",
            TORCHRUN, "--standalone", "--nproc_per_node", "2", "--log-dir", "{logs}", redirect, "3",
            "train.py", str(steps), str(culprit), str(self.go),
        )  # fmt: skip

    def start(self, arguments: list[str]) -> subprocess.Popen[str]:
        return subprocess.Popen(
            arguments, cwd=self.work, env=environment(self.work), text=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=(self.work / "stderr").open("w"),
        )  # fmt: skip

    def said(self) -> str:
        """Return what the client wrote to stderr."""
        return (self.work / "stderr").read_text()

    def copy(self, ending: str) -> bytes:
        return (self.work / "rdiag-logs" / f"{self.job}{ending}").read_bytes()

    def remote(self, name: str) -> bytes:
        (path,) = (self.cache / "jobs" / self.job).glob(name)
        return path.read_bytes()


@pytest.fixture(params=["local", "there"])
def place(request: pytest.FixtureRequest, tmp_path: Path, zsh_server: sshd.TestSshd) -> Iterator[Place]:
    (tmp_path / "hosts.yaml").write_text(
        "hosts:\n  local: {transport: local}\n"
        f"  there: {{address: 127.0.0.1, port: {zsh_server.port}, user: {zsh_server.user}, identity_file: {zsh_server.identity_file}, "
        f"known_hosts: {zsh_server.known_hosts}, environment: {{python: {sys.executable}}}}}\n"
    )
    (tmp_path / "train.py").write_text(TRAIN)
    one = Place(request.param, tmp_path, tmp_path if request.param == "local" else zsh_server.home)
    yield one
    end_jobs(one.cache)
    if request.param == "there":
        rdiag("clean", "--host", "there", "--older-than", "0s", home=tmp_path)


def losses(text: bytes) -> list[int]:
    return [int(step) for step in re.findall(rb"^step=(\d+) loss=", text, re.MULTILINE)]


def test_a_training_is_followed_live_and_each_rank_has_a_copy_of_its_own(place: Place) -> None:
    client = place.start(place.launch(steps=6))
    assert client.stdout is not None
    timer = threading.Timer(PATIENCE, client.kill)
    timer.start()
    try:
        seen = [client.stdout.readline()]
        # Nobody goes on before this line has arrived: what follows is not what was there at the end.
        while seen[-1] and "step=0" not in seen[-1]:
            seen.append(client.stdout.readline())
        assert client.poll() is None
        place.go.touch()
        rest = client.stdout.read()
        assert client.wait() == 0, place.said()
    finally:
        timer.cancel()
    # What torchrun writes of both ranks to one stream may meet in one line there; here it is shown as it is there.
    shown = [line for line in ("".join(seen) + rest).splitlines() if not line.startswith("stderr: ")]
    assert shown == place.remote("stdout.log").decode().splitlines()
    for rank in (0, 1):
        assert losses(place.copy(f".rank{rank}.log")) == list(range(6))
        assert place.copy(f".rank{rank}.log") == place.remote(f"ranks/*/attempt_0/{rank}/stdout.log")
        assert place.copy(f".rank{rank}.err.log") == place.remote(f"ranks/*/attempt_0/{rank}/stderr.log")
        assert place.copy(f".rank{rank}.err.log").count(b"rank %d was here\n" % rank) == 6
    assert place.copy(".log") == place.remote("stdout.log")
    assert place.copy(".err.log") == place.remote("stderr.log")
    merged = rdiag("logs", place.train, "--rank", "0", "--rank", "1", "--host", place.name, home=place.work)
    assert sum(line.startswith("rank 0: step=") for line in merged.out.splitlines()) == 6
    assert sum(line.startswith("rank 1: step=") for line in merged.out.splitlines()) == 6
    assert "rank 1 stderr: rank 1 was here" in merged.out
    read = rdiag("metrics", place.train, "--host", place.name, "--json", home=place.work).json
    by_rank = {(one["stream"], one["rank"]): one["count"] for one in read["series"] if one["metric"] == "loss"}
    assert by_rank["rank0", 0] == by_rank["rank1", 1] == 6


def test_a_failed_rank_fails_the_job_and_is_named(place: Place) -> None:
    place.go.touch()
    client = place.start(place.launch(steps=1000, culprit=1, redirect="--redirects"))
    out, _ = client.communicate(timeout=PATIENCE)
    err = place.said()
    assert client.returncode == 11, err
    assert f"{place.job} failed" in err
    assert "exit status 1" in err
    assert err.splitlines()[-1] == "rdiag: rank 1 failed first, by torchrun's root cause"
    assert "stderr: Root Cause (first observed failure):" in out
    assert b"RuntimeError: a planted fault" in place.copy(".rank1.err.log")
    assert b"a planted fault" not in place.copy(".rank0.err.log")
    (listed,) = rdiag("jobs", place.train, "--host", place.name, "--json", home=place.work).json
    assert (listed["state"], listed["exit_code"]) == ("failed", 1)
    read = rdiag("metrics", place.train, "--host", place.name, "--json", home=place.work)
    assert read.code == 1
    (finding,) = [one for one in read.json["findings"] if one["code"] == "first-failing-rank"]
    assert finding["value"] == 1


def test_stop_ends_torchrun_and_its_ranks(place: Place) -> None:
    place.go.touch()
    client = place.start(place.launch(steps=100_000))
    assert client.stdout is not None
    line = client.stdout.readline()
    while line and "step=1 " not in line:
        line = client.stdout.readline()
    # torchrun and two ranks, at least.
    assert len(marked(place.job, place.cache)) >= 3
    stopped = rdiag("stop", place.train, "--host", place.name, "--json", home=place.work, timeout=PATIENCE)
    assert (stopped.code, stopped.json["stopped"], stopped.json["survivors"]) == (0, True, [])
    assert stopped.json["signalled"] >= 3
    assert marked(place.job, place.cache) == []
    client.communicate(timeout=PATIENCE)
    assert client.returncode == 11
    assert f"{place.job} stopped" in place.said()
    (listed,) = rdiag("jobs", place.train, "--host", place.name, "--json", home=place.work).json
    assert listed["state"] == "stopped"
