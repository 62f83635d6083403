"""``rdiag launch``, ``jobs``, ``stop`` and ``clean`` as processes: what they print, and their exit codes."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from remote_diag.cli.jobs import host_with
from remote_diag.cli.settings import Settings
from remote_diag.errors import UsageProblem
from remote_diag.jobs import JobRecord
from remote_diag.views.jobs import age, gpus, render, state
from tests.support.cli import Ran, command, environment, rdiag
from tests.support.job_host import PYTHON, end_jobs, marked
from tests.support.sshd import wait_until


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    """A home whose local host runs jobs; nothing is left behind."""
    yield tmp_path
    end_jobs(cache(tmp_path))


def cache(home: Path) -> Path:
    return home / ".cache" / "rdiag"


def launch(home: Path, *arguments: str, name: str = "job") -> Ran:
    return rdiag("launch", "--name", name, *arguments, home=home)


def test_detached_and_json_as_programs_rely_on_it(home: Path) -> None:
    ran = launch(home, "--detach", "--json", "--", "/bin/sleep", "1000")
    assert ran.code == 0, ran.err
    answer = ran.json
    assert {name: answer[name] for name in ("job", "host", "state")} == {"job": "job.v1", "host": "local", "state": "running"}
    assert answer["log"] == str(cache(home) / "jobs" / "job.v1" / "stdout.log")
    (listed,) = rdiag("jobs", "--json", home=home).json
    for name in ("job", "host", "state", "exit_code", "signal", "started_at", "ended_at", "gpus"):
        assert name in listed
    assert listed["state"] == "running"
    stopped = rdiag("stop", "job", "--grace", "1", "--json", home=home)
    assert (stopped.code, stopped.json["state"], stopped.json["stopped"]) == (0, "stopped", True)
    (listed,) = rdiag("jobs", "--json", home=home).json
    assert (listed["state"], listed["signal"], listed["exit_code"]) == ("stopped", 15, None)
    assert listed["ended_at"] is not None


@pytest.mark.parametrize(("code", "expected"), [(0, 0), (3, 11)])
def test_following_it_ends_with_the_job(home: Path, code: int, expected: int) -> None:
    (home / "train.py").write_text(f"import sys, time\nprint('loss 1')\ntime.sleep(0.3)\nprint('loss 0')\nsys.exit({code})\n")
    ran = launch(home, "--file", "train.py", "--", PYTHON, "train.py")
    assert ran.code == expected, ran.err
    assert ran.out == "loss 1\nloss 0\n"
    assert (home / "rdiag-logs" / "job.v1.log").read_text() == "loss 1\nloss 0\n"
    assert ("exit status 3" if code else "job.v1 exited on local") in ran.err


def test_a_job_file_and_a_second_attempt(home: Path) -> None:
    (home / "folder").mkdir()
    (home / "folder" / "train.py").write_text("import os\nprint(os.environ['A'], os.environ['B'])\n")
    (home / "folder" / "job.yaml").write_text(
        f"name: finetune\ncommand: ['{PYTHON}', train.py]\nfiles: [train.py]\nenv: {{A: 5e-5, B: file}}\nneeds: {{disk: 1 MB}}\n"
    )
    assert rdiag("launch", "folder/job.yaml", home=home).out == "5e-5 file\n"
    ran = rdiag("launch", "folder/job.yaml", "--env", "B=option", "--json", home=home)
    assert (ran.json["job"], ran.json["state"], ran.json["last_line"]) == ("finetune.v2", "exited", "5e-5 option")
    listed = rdiag("jobs", "finetune", home=home).out
    assert "finetune.v1" in listed
    assert "finetune.v2" in listed


def test_ctrl_c_leaves_the_job_running_and_says_how_to_come_back(home: Path) -> None:
    client = subprocess.Popen(
        command("launch", "--name", "job", "--", "/bin/sh", "-c", "echo here; exec sleep 1000"),
        env=environment(home), cwd=home, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert client.stdout is not None
    assert client.stdout.readline() == b"here\n"
    client.send_signal(signal.SIGINT)
    _, err = client.communicate(timeout=30)
    assert client.returncode == 130
    assert b"rdiag logs job.v1 -f --host local" in err
    assert b"rdiag stop job.v1 --host local" in err
    assert marked("job.v1", cache(home))


def test_what_does_not_start_is_an_error_of_the_environment(home: Path) -> None:
    ran = launch(home, "--", "no-such-program")
    assert ran.code == 7
    assert "rdiag: error: local: start: cannot start no-such-program" in ran.err
    assert rdiag("jobs", home=home).out == "no jobs on local\n"


def test_a_name_that_runs_is_refused_and_force_is_said(home: Path) -> None:
    launch(home, "--detach", "--", "/bin/sleep", "1000")
    refused = launch(home, "--detach", "--json", "--", "/bin/sleep", "1000")
    assert refused.code == 9
    assert refused.json["error"]["code"] == "REFUSED"
    forced = launch(home, "--detach", "--force", "--", "/bin/sleep", "1000")
    assert forced.code == 0
    assert "forced: job.v1 is running" in forced.err
    assert "job.v2 is running on local" in forced.out


def test_gpus_that_cannot_be_asked_are_refused(home: Path) -> None:
    ran = launch(home, "--gpus", "8", "--detach", "--", "/bin/true")
    assert ran.code == 9
    assert "whether the GPUs are free" in ran.err


def test_stop_tells_when_something_survives(home: Path) -> None:
    from tests.agent.test_jobs_stop import frozen

    pid = launch(home, "--detach", "--json", "--", "/bin/sleep", "1000").json["pid"]
    with frozen([pid]):
        ran = rdiag("stop", "job", "--grace", "0", home=home)
    assert ran.code == 12
    assert "job.v1 is NOT stopped" in ran.out
    assert f"pid {pid}  sleep  state D" in ran.out


def test_stop_of_what_is_not_there_or_over(home: Path) -> None:
    assert rdiag("stop", "nothing", home=home).code == 10
    launch(home, "--", "/bin/false")
    ran = rdiag("stop", "job", home=home)
    assert (ran.code, ran.out) == (0, "job.v1 was not running on local; it is failed: exit status 1\n")


def test_clean(home: Path) -> None:
    launch(home, "--", "/bin/true")
    assert "job job.v1" in rdiag("clean", "--older-than", "0", "--dry-run", home=home).out
    assert "0 things removed" in rdiag("clean", home=home).out
    assert "job job.v1" in rdiag("clean", "--older-than", "0s", home=home).out
    assert rdiag("jobs", "--json", home=home).json == []
    assert rdiag("clean", "--older-than", "soon", home=home).code == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--", "python", "train.py"), "a command needs --name"),
        (("--name", "A", "--", "x"), "cannot be the name of a job"),
        (("--name", "a", "--env", "x", "--", "x"), "is not KEY=VALUE"),
        (("--name", "a", "--workdir", "x", "--", "x"), "begins with /"),
        (("--name", "a", "--gpus", "x", "--", "x"), "a count like 8"),
        (("--name", "a"), "Missing argument"),
        (("--file", "a", "job.yaml"), "--file belongs to --name"),
    ],
)
def test_usage(home: Path, arguments: tuple[str, ...], message: str) -> None:
    ran = rdiag("launch", *arguments, home=home)
    assert ran.code == 2
    assert message in ran.err


def test_a_bad_job_file_is_a_matter_of_configuration(home: Path) -> None:
    (home / "job.yaml").write_text("name: a\ncommand: python\n")
    ran = rdiag("launch", "job.yaml", home=home)
    assert ran.code == 3
    assert "job.yaml:2:10: command" in ran.err


def test_a_rehearsal_contacts_nothing(home: Path) -> None:
    (home / "train.py").write_text("x")
    ran = launch(home, "--file", "train.py", "--dry-run", "--json", "--gpus", "0-1", "--", "python", "train.py")
    request = ran.json["request"]
    assert request["argv"] == ["python", "train.py"]
    assert request["files"][0]["path"] == "train.py"
    assert request["gpus"] == [0, 1]
    assert not cache(home).exists()


def test_an_unreachable_host_does_not_hide_the_others(home: Path) -> None:
    (home / "hosts.yaml").write_text("hosts:\n  local: {transport: local}\n  gone: {address: 127.0.0.1, port: 1}\n")
    launch(home, "--", "/bin/true")
    ran = rdiag("jobs", "--host", "all", "--json", home=home)
    assert ran.code == 4
    assert [one["job"] for one in ran.json] == ["job.v1"]
    assert "gone: " in ran.err


def test_a_job_is_looked_for_where_it_was_launched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from remote_diag.job_records import remember
    from tests.support.home import make_private_home

    work = make_private_home(monkeypatch, tmp_path)
    (work / "hosts.yaml").write_text("hosts:\n  a: {address: 127.0.0.1}\n  b: {address: 127.0.0.1}\n")
    assert host_with(Settings(), "job").name == "local"
    remember("a", "job.v1", "0" * 32)
    remember("forgotten", "job.v1", "0" * 32)
    assert host_with(Settings(), "job").name == "a"
    assert host_with(Settings(hosts=("b",)), "job").name == "b"
    remember("b", "job.v1", "0" * 32)
    with pytest.raises(UsageProblem, match="on several hosts"):
        host_with(Settings(), "job")


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        (JobRecord("h", "a.v1", "running"), "running"),
        (JobRecord("h", "a.v1", "failed", exit_code=3), "failed (exit 3)"),
        (JobRecord("h", "a.v1", "failed", signal=9), "failed (signal 9)"),
        (JobRecord("h", "a.v1", "failed", signal=9, oom_killed=True), "failed (out of memory)"),
        (JobRecord("h", "a.v1", "exited", exit_code=0), "exited"),
    ],
)
def test_states_for_people(record: JobRecord, expected: str) -> None:
    assert state(record) == expected


@pytest.mark.parametrize(("seconds", "expected"), [(5, "5s"), (250, "4m 10s"), (3725, "1h 02m"), (200_000, "2d 7h"), (-5, "0s")])
def test_ages(seconds: float, expected: str) -> None:
    assert age(JobRecord("h", "a.v1", "running", started_at=1000.0), 1000.0 + seconds) == expected
    assert age(JobRecord("h", "a.v1", "lost", started_at=1000.0), 1000.0 + seconds) == "-"


@pytest.mark.parametrize(
    ("value", "expected"), [(None, "-"), ((), "none"), ((3,), "3"), ((0, 1, 2, 3), "0-3"), ((0, 2), "0,2")]
)
def test_gpus_for_people(value: tuple[int, ...] | None, expected: str) -> None:
    assert gpus(JobRecord("h", "a.v1", "running", gpus=value)) == expected


def test_a_long_last_line_leaves_room_for_everything_else(capsys: pytest.CaptureFixture[str]) -> None:
    records = [JobRecord("gpu8", "finetune.v1", "exited", last_line="word " * 60), JobRecord("gpu8", "b.v2", "running", last_line="x" * 300)]
    Console(width=80, color_system=None).print(render(records))
    _, first, second = capsys.readouterr().out.splitlines()
    assert first.split()[:6] == ["finetune.v1", "gpu8", "exited", "-", "-", "word"]
    assert second.split()[:5] == ["b.v2", "gpu8", "running", "-", "-"]


def test_what_a_job_writes_cannot_steer_the_terminal(home: Path) -> None:
    launch(home, "--detach", "--", "/bin/sh", "-c", r"printf '\033]0;gotcha\007\n'")
    assert wait_until(lambda: "exited" in rdiag("jobs", home=home).out, 10)
    time.sleep(0)
    listed = rdiag("jobs", home=home).out
    assert "\\x1b]0;gotcha" in listed
    assert "\x1b" not in listed
