"""What is looked at before a job starts, and what is known when the kernel killed it."""

from __future__ import annotations

import os
import secrets
import stat
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from probes.lib.gpu import where
from remote_diag.agent.jobs.checks import GpuChoice, check_room
from remote_diag.agent.jobs.detach import configured_to_kill, logout_kills, scope_prefix
from remote_diag.agent.jobs.oom import OomCounters
from remote_diag.agent.jobs.supervise import explain
from remote_diag.agent.operations import Failure
from tests.support.agent_driver import AgentDriver, lay_out_bundle
from tests.support.job_host import Ended, JobHost


@pytest.fixture
def host(tmp_path: Path) -> Iterator[JobHost]:
    with JobHost(lay_out_bundle(tmp_path / "cache")) as jobs:
        yield jobs


def program(folder: Path, name: str, text: str) -> None:
    """Put a shell script on the PATH of a test."""
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text("#!/bin/sh\n" + textwrap.dedent(text))
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def gpus(host: JobHost, tmp_path: Path, *, count: int = 4, busy: str = "", extra: str = "") -> None:
    """Give the host an nvidia-smi that knows ``count`` GPUs and the processes ``busy``."""
    rows = "".join(f"{index}, GPU-{index}, 00000000:0{index}:00.0, 97887, 0, 0\\n" for index in range(count))
    program(
        tmp_path / "bin",
        "nvidia-smi",
        f"""
        {extra}
        case $1 in
            --query-gpu=*) printf '{rows}' ;;
            --query-compute-apps=*) printf '{busy}' ;;
        esac
        """,
    )
    host.env = {**os.environ, "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}


def visible(host: JobHost, **fields: Any) -> str:
    """Launch a job that prints which GPUs it sees."""
    report = host.launch(["/bin/sh", "-c", "echo $CUDA_VISIBLE_DEVICES/$CUDA_DEVICE_ORDER; exec sleep 100"],
                         name="gpu-" + secrets.token_hex(3), **fields)  # fmt: skip
    log = Path(report["log"])
    while not log.read_text().endswith("\n"):
        pass
    return log.read_text().strip()


def test_a_job_sees_the_gpus_it_asked_for(host: JobHost, tmp_path: Path) -> None:
    gpus(host, tmp_path)
    assert visible(host, gpus=[1, 3]) == "1,3/PCI_BUS_ID"
    assert host.jobs()[0]["gpus"] == [1, 3]


def test_gpus_promised_to_another_job_are_taken_though_idle(host: JobHost, tmp_path: Path) -> None:
    gpus(host, tmp_path)
    assert visible(host, gpus=2).startswith("0,1/")
    assert visible(host, gpus=1).startswith("2/")
    with pytest.raises(Ended, match=r"2 GPUs are wanted and 1 are free: GPU 0: job gpu-"):
        visible(host, gpus=2)
    with pytest.raises(Ended, match=r"in use: GPU 1: job gpu-"):
        visible(host, gpus=[1])


def test_busy_gpus_name_pid_and_owner(host: JobHost, tmp_path: Path) -> None:
    gpus(host, tmp_path, busy=f"GPU-2, {os.getpid()}, python, 70000 MiB\\n")
    with pytest.raises(Ended) as caught:
        visible(host, gpus=4)
    assert caught.value.outcome == "refused"
    assert f"GPU 2: pid {os.getpid()} (python, user " in caught.value.message
    assert "70000 MiB" in caught.value.message
    assert host.jobs() == []
    assert visible(host, gpus=3).startswith("0,1,3/")


def test_force_is_recorded(host: JobHost, tmp_path: Path) -> None:
    gpus(host, tmp_path, busy="GPU-2, 1, python, 70000 MiB\\n")
    assert visible(host, gpus=[2], force=True).startswith("2/")
    (forced,) = host.jobs()[0]["forced"]
    assert "in use: GPU 2: pid 1" in forced


def test_without_gpus_nothing_is_asked(host: JobHost, tmp_path: Path) -> None:
    gpus(host, tmp_path, extra=f"touch {tmp_path}/asked")
    host.launch(["/bin/true"])
    assert visible(host, gpus=0) == "/PCI_BUS_ID"
    assert not (tmp_path / "asked").exists()


@pytest.mark.parametrize(
    ("wanted", "message"), [(9, "9 GPUs are wanted and this host has 4"), ([4], "there is no GPU 4; this host has 0, 1, 2, 3")]
)
def test_gpus_that_do_not_exist(host: JobHost, tmp_path: Path, wanted: Any, message: str) -> None:
    gpus(host, tmp_path)
    with pytest.raises(Ended, match=message):
        visible(host, gpus=wanted, force=True)


def test_an_nvidia_smi_that_fails_is_no_permission(host: JobHost, tmp_path: Path) -> None:
    gpus(host, tmp_path, extra="echo driver lost; exit 9")
    with pytest.raises(Ended, match="cannot tell whether the GPUs are free: it failed: driver lost"):
        visible(host, gpus=1)
    assert visible(host, gpus=2, force=True).startswith("0,1/")


class Nobody:
    """A client that says nothing."""

    def next(self, wait: float, *_: int) -> None:
        time.sleep(wait)


def test_nvidia_smi_is_found_where_probes_find_it(tmp_path: Path, host: JobHost, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(host, tmp_path, count=2)
    monkeypatch.setattr(where, "_MORE_PATH", (str(tmp_path / "bin"),))
    env = {"PATH": str(tmp_path)}
    choice = GpuChoice(1, {**host.env, **env}, [], force=False, peer=Nobody(), smi_lock=None)  # type: ignore[arg-type]
    assert choice.choose() == [0]
    monkeypatch.setattr(where, "_MORE_PATH", ())
    with pytest.raises(Failure, match="nvidia-smi is not on the PATH"):
        choice.choose()


def test_too_little_room_starts_nothing(host: JobHost) -> None:
    with pytest.raises(Ended, match=r"free; the job needs 1048576\.0 GiB") as caught:
        host.launch(["/bin/true"], needs={"disk_bytes": 1 << 50, "shm_bytes": 0})
    assert caught.value.outcome == "environment"
    with pytest.raises(Ended, match="/dev/shm"):
        host.launch(["/bin/true"], needs={"disk_bytes": 0, "shm_bytes": 1 << 50})
    assert host.jobs() == []
    assert len(host.launch(["/bin/true"], needs={"disk_bytes": 1 << 50, "shm_bytes": 0}, force=True)["forced"]) == 1


def test_shared_memory_matters_to_jobs_with_gpus(tmp_path: Path) -> None:
    assert check_room(str(tmp_path), 0, None, has_gpus=False) == []
    (problem,) = check_room(str(tmp_path), 0, 1 << 50, has_gpus=True)
    assert problem.startswith("/dev/shm has ")


# -- out of memory


@pytest.mark.parametrize(
    ("cgroup", "counter"),
    [
        ("0::/a/b\n", "a/b/memory.events"),
        ("0::/outside/path\n", "memory.events"),
        ("0::/x\n", "unified/x/memory.events"),
        ("4:memory:/a\n0::/\n", "memory/a/memory.oom_control"),
        ("4:cpu,memory:/outside\n", "memory/memory.oom_control"),
    ],
)
def test_the_counter_of_the_cgroup_is_found(tmp_path: Path, cgroup: str, counter: str) -> None:
    (tmp_path / "cgroup").write_text(cgroup)
    file = tmp_path / "fs" / counter
    file.parent.mkdir(parents=True)
    file.write_text("low 0\noom_kill 3\n")
    (tmp_path / "vmstat").write_text("nr_free_pages 5\noom_kill 10\n")
    counters = OomCounters(str(tmp_path / "cgroup"), str(tmp_path / "fs"), str(tmp_path / "vmstat"))
    assert counters.source == str(file)
    file.write_text("low 0\noom_kill 5\n")
    assert counters.evidence() == {"source": str(file), "cgroup": 2, "host": 0}


def test_no_counter_is_not_no_kill(tmp_path: Path) -> None:
    counters = OomCounters(str(tmp_path / "no"), str(tmp_path / "no"), str(tmp_path / "no"))
    assert counters.evidence() == {"source": None, "cgroup": None, "host": None}


def test_how_a_failure_is_explained() -> None:
    nothing = {"source": None, "cgroup": None, "host": None}
    assert explain(3, None, nothing) == "exit status 3"
    assert "killed 2 process(es) of its cgroup (/x)" in explain(1, None, {"source": "/x", "cgroup": 2, "host": 2})
    assert "on this host" in explain(None, 9, {"source": "/x", "cgroup": 0, "host": 1})
    assert "rdiag did not send" in explain(None, 9, {"source": "/x", "cgroup": 0, "host": 0})


@pytest.fixture
def small_memory() -> Iterator[Path]:
    """A memory cgroup of 48 MiB; skips where none can be made."""
    name = "rdiag-test-" + secrets.token_hex(4)
    for root, limit in ((Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"), (Path("/sys/fs/cgroup"), "memory.max")):
        group = root / name
        try:
            group.mkdir()
            (group / limit).write_text(str(48 << 20))
        except OSError:
            if group.is_dir():
                group.rmdir()
            continue
        yield group
        group.rmdir()
        return
    pytest.skip("no memory cgroup can be made here")


@pytest.mark.parametrize("who", ["the command itself", "a child of it"])
def test_a_kill_for_lack_of_memory_is_told_from_others(host: JobHost, small_memory: Path, who: str) -> None:
    def confine(driver: AgentDriver) -> None:
        (small_memory / "cgroup.procs").write_text(str(driver.process.pid))

    host.on_agent = confine
    eat = "data = []\nwhile True: data.append(bytearray(1 << 20))\n"
    if who == "a child of it":
        eat = f"import os, sys\npid = os.fork()\nif not pid:\n    exec({eat!r})\nsys.exit(1 if os.waitpid(pid, 0)[1] else 0)\n"
    host.python(eat)
    host.on_agent = lambda _: None
    judged = host.wait_for("job.v1", "failed")
    assert "out of memory: the kernel killed 1 process(es) of its cgroup" in judged["message"]
    assert (judged["signal"], judged["exit_code"]) == ((9, None) if who == "the command itself" else (None, 1))
    described = host.job("job.v1")
    assert described["oom_killed"] is True
    assert described["oom"]["cgroup"] == 1


# -- a logout that kills


@pytest.mark.parametrize(
    ("text", "kills"),
    [("[Login]\nKillUserProcesses=yes\n", True), ("[Login]\n#KillUserProcesses=yes\n", False), ("KillUserProcesses = no\n", False)],
)
def test_the_configuration_of_logind(tmp_path: Path, text: str, *, kills: bool) -> None:
    (tmp_path / "logind.conf").write_text(text)
    assert configured_to_kill((str(tmp_path / "logind.conf"), str(tmp_path / "no"))) is kills
    (tmp_path / "logind.conf.d").mkdir()
    (tmp_path / "logind.conf.d" / "50.conf").write_text("KillUserProcesses=yes\n")
    assert configured_to_kill((str(tmp_path / "logind.conf"), str(tmp_path / "logind.conf.d"))) is True


def test_outside_a_session_of_logind_nothing_kills(tmp_path: Path) -> None:
    (tmp_path / "cgroup").write_text("0::/system.slice/sshd.service\n")
    program(tmp_path / "bin", "busctl", "echo b true")
    assert logout_kills({"PATH": str(tmp_path / "bin")}, str(tmp_path / "cgroup")) is False


@pytest.mark.parametrize(("answer", "uid", "kills"), [("b true", 1000, True), ("b false", 1000, False), ("b true", 0, False)])
def test_logind_itself_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: str, uid: int, *, kills: bool
) -> None:
    (tmp_path / "cgroup").write_text("0::/user.slice/user-1000.slice/session-4.scope\n")
    program(tmp_path / "bin", "busctl", f"echo {answer}")
    monkeypatch.setattr(os, "geteuid", lambda: uid)
    assert logout_kills({"PATH": f"{tmp_path / 'bin'}:/bin:/usr/bin"}, str(tmp_path / "cgroup")) is kills


@pytest.mark.parametrize("linger", ["yes", "no"])
def test_a_scope_of_the_user_and_lingering(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, linger: str) -> None:
    monkeypatch.setattr("remote_diag.agent.jobs.detach.logout_kills", lambda _: True)
    program(tmp_path / "bin", "systemd-run", "exit 0")
    program(tmp_path / "bin", "loginctl", f"echo Linger={linger}")
    prefix, warning = scope_prefix("job.v1", {"PATH": f"{tmp_path / 'bin'}:/bin:/usr/bin"})
    assert prefix[:5] == [str(tmp_path / "bin" / "systemd-run"), "--user", "--scope", "--quiet", "--collect"]
    assert prefix[-1] == "--"
    assert (warning is None) == (linger == "yes")
    assert warning is None or "enable-linger" in warning


def test_without_systemd_run_there_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("remote_diag.agent.jobs.detach.logout_kills", lambda _: True)
    prefix, warning = scope_prefix("job.v1", {"PATH": str(tmp_path)})
    assert prefix == []
    assert warning is not None


def test_a_job_starts_through_a_scope(host: JobHost, tmp_path: Path) -> None:
    """With programs that say what logind and systemd would say; the scope itself cannot be had here."""
    program(tmp_path / "bin", "busctl", "echo b true")
    program(tmp_path / "bin", "loginctl", "echo Linger=yes")
    program(tmp_path / "bin", "systemd-run", f"""
        echo "$@" >{tmp_path}/said
        while [ "$1" != -- ]; do shift; done
        shift
        exec "$@"
        """)  # fmt: skip
    source = host.bundle / "agent" / "jobs" / "detach.py"
    text = source.read_text().replace("os.geteuid() != 0", "True")
    text = text.replace('r"/session-[^/]+\\.scope"', 'r""')
    assert text != source.read_text()
    source.write_text(text)
    from remote_diag.agent.digest import bundle_digest

    host.bundle = host.bundle.rename(host.cache / bundle_digest(str(host.bundle)))
    host.env = {**os.environ, "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}
    report = host.launch(["/bin/sleep", "100"])
    assert report["state"] == "running"
    assert report["warning"] is None
    assert (tmp_path / "said").read_text().startswith("--user --scope --quiet --collect --unit rdiag-job.v1-")
    assert host.stop("job.v1")["stopped"] is True
