"""A driver that hangs keeps one nvidia-smi, however many commands are run against it: here, and behind a real sshd with zsh."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.cli import Ran, command, environment, rdiag
from tests.support.fake_smi import FakeSmi, rtx_pro_6000
from tests.support.sshd import TestSshd

KINDS = ("local", "zsh")


class Host:
    """A host with a driver, and ``rdiag`` in front of it."""

    def __init__(self, smi: FakeSmi, home: Path, inventory: Path, path: str, cache: Path) -> None:
        self.smi, self.home, self._inventory, self.path, self.cache = smi, home, inventory, path, cache

    def arguments(self, name: str, *more: str) -> list[str]:
        before, rest = (more[: more.index("--")], more[more.index("--") :]) if "--" in more else (more, ())
        return [name, *before, "-H", "box", "-i", str(self._inventory), "--json", *rest]

    def rdiag(self, name: str, *more: str) -> Ran:
        return rdiag(*self.arguments(name, *more), home=self.home, PATH=self.path)


@contextmanager
def a_host(kind: str, tmp_path: Path, start_sshd: Callable[..., TestSshd]) -> Iterator[Host]:
    smi = FakeSmi(tmp_path / "driver", rtx_pro_6000())
    smi.lspci()
    smi.kernel_log()
    inventory, cache = tmp_path / "hosts.yaml", tmp_path / "on-host"
    defaults = f"defaults: {{environment: {{python: {sys.executable}}}, cache_dir: {cache}}}\n"
    if kind == "local":
        inventory.write_text(defaults + "hosts:\n  box: {transport: local, gpus: 8}\n")
        yield Host(smi, tmp_path, inventory, smi.path, cache)
        return
    with start_sshd(shell=kind, env={"PATH": smi.path}) as server:
        inventory.write_text(
            defaults + f"hosts:\n  box: {{address: 127.0.0.1, port: {server.port}, user: {server.user}, gpus: 8,\n"
            f"    identity_file: {server.identity_file}, known_hosts: {server.known_hosts}}}\n"
        )
        yield Host(smi, tmp_path, inventory, "/usr/bin:/bin", cache)


def hang_of(ran: Ran) -> dict[str, object]:
    """Return the finding that the driver hangs."""
    (finding,) = [one for one in ran.json["findings"] if one["code"] == "driver-hangs"]
    return dict(finding)


@pytest.mark.parametrize("kind", KINDS)
def test_one_instance_whatever_is_run_and_another_one_once_it_is_gone(
    kind: str, tmp_path: Path, start_sshd: Callable[..., TestSshd]
) -> None:
    with a_host(kind, tmp_path, start_sshd) as host:
        with host.smi.hanging(killable=False):
            first = host.rdiag("gpu")
            assert len(host.smi.calls()) == 1
            running = host.smi.running()
            if not running:
                pytest.skip("no freezer cgroup (version 1) can be made here")
            assert hang_of(first)["level"] == "fail"
            (pid,) = running
            words = f"pid {pid} (killed and still there, state D"

            second = host.rdiag("gpu")
            assert (second.code, second.json["status"]) == (first.code, first.json["status"]), second.out + second.err
            assert hang_of(second)["level"] == "fail"
            assert words in str(hang_of(second)["evidence"])
            assert f"/proc/{pid}/stack" in str(hang_of(second)["action"])
            assert second.json["result"]["gpus"] == []

            topo = host.rdiag("topo")
            assert topo.json["status"] not in {"ok", "degraded"}, topo.out
            assert words in topo.out

            active = host.rdiag("nccl")
            assert active.code == 9, active.out + active.err
            assert "cannot tell whether the GPUs are free" in active.out + active.err
            assert words in active.out + active.err
            assert "--force" in active.out + active.err

            launched = host.rdiag("launch", "--gpus", "2", "--name", "job", "--detach", "--", "/bin/true")
            assert launched.code == 9, launched.out + launched.err
            assert "cannot tell whether the GPUs are free" in launched.out + launched.err
            assert words in launched.out + launched.err

            assert len(host.smi.calls()) == 1
            assert host.smi.running() == [pid]

            forced = host.rdiag("launch", "--gpus", "2", "--name", "job", "--force", "--", "/bin/true")
            assert forced.code == 0, forced.out + forced.err
            assert len(host.smi.calls()) == 1
        fine = host.rdiag("gpu")
        assert (fine.code, fine.json["status"]) == (0, "ok"), fine.out + fine.err
        assert len(host.smi.calls()) > 2


@pytest.mark.parametrize("kind", KINDS)
def test_the_lock_outlives_an_agent_that_is_killed(kind: str, tmp_path: Path, start_sshd: Callable[..., TestSshd]) -> None:
    """Nobody is left that could kill what it had asked: the next one does, or says that it cannot."""
    with a_host(kind, tmp_path, start_sshd) as host:
        with host.smi.hanging(killable=False):
            argv = command(*host.arguments("launch", "--gpus", "1", "--name", "job", "--detach", "--", "/bin/true"))
            with subprocess.Popen(
                argv, env=environment(host.home, PATH=host.path), cwd=host.home, stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            ) as process:  # fmt: skip
                until = time.monotonic() + 30
                while not host.smi.running() and time.monotonic() < until:
                    time.sleep(0.02)
                (pid,) = host.smi.running()
                agent = parent(pid)
                assert b"/agent" in Path(f"/proc/{agent}/cmdline").read_bytes()
                os.kill(agent, signal.SIGKILL)
                process.communicate(timeout=60)
            for _ in range(2):
                ran = host.rdiag("gpu")
                assert ran.json["status"] in {"fail", "unknown"}
                if state(pid) == "D":
                    assert hang_of(ran)["level"] == "fail"
                    assert f"pid {pid} (killed and still there, state D" in str(hang_of(ran)["evidence"])
                    assert len(host.smi.calls()) == 1
        fine = host.rdiag("gpu")
        assert (fine.code, fine.json["status"]) == (0, "ok"), fine.out + fine.err


def parent(pid: int) -> int:
    """Return the parent of a process."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def state(pid: int) -> str:
    """Return the state of a process; empty when there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


@pytest.mark.parametrize("kind", KINDS)
def test_at_the_same_time_everybody_gets_an_answer(kind: str, tmp_path: Path, start_sshd: Callable[..., TestSshd]) -> None:
    with a_host(kind, tmp_path, start_sshd) as host:
        host.rdiag("gpu")
        answers: list[Ran] = []
        threads = [threading.Thread(target=lambda: answers.append(host.rdiag("gpu"))) for _ in range(3)]
        for thread in threads:
            thread.start()
        launched = host.rdiag("launch", "--gpus", "2", "--name", "job", "--", "/bin/true")
        for thread in threads:
            thread.join()
        assert [(ran.code, ran.json["status"]) for ran in answers] == [(0, "ok")] * 3, [ran.out for ran in answers]
        assert launched.code == 0, launched.out + launched.err


def test_clean_spares_locks_that_may_be_in_use(tmp_path: Path, start_sshd: Callable[..., TestSshd]) -> None:
    with a_host("local", tmp_path, start_sshd) as host:
        host.rdiag("gpu")
        (mine,) = host.cache.glob("nvidia-smi.*.lock")
        names = [f"nvidia-smi.00000000-0000-0000-0000-00000000000{number}.lock" for number in range(3)]
        for name in names:
            (host.cache / name).touch()
            (host.cache / (name + ".next")).touch()
        for name in (mine.name, *names[:2]):
            for path in (host.cache / name, host.cache / (name + ".next")):
                os.utime(path, (1e9, 1e9))
        with subprocess.Popen(["flock", "-x", str(host.cache / names[1]), "sh", "-c", "echo; exec cat"], stdin=-1, stdout=-1) as holder:
            assert holder.stdout is not None
            holder.stdout.readline()
            cleaned = host.rdiag("clean", "--older-than", "0s")
            holder.communicate()
        assert cleaned.code == 0, cleaned.out + cleaned.err
        left = {path.name for path in host.cache.glob("nvidia-smi.*")}
        assert left == {mine.name, mine.name + ".next", names[1], names[2], names[2] + ".next"}
