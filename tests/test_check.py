
from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from remote_diag import check as check_module
from remote_diag.check import CheckReport, check
from remote_diag.events import Event, Progress
from remote_diag.exitcodes import ExitCode
from remote_diag.findings import Finding
from remote_diag.host import Environment, Host
from tests.support.cli import rdiag
from tests.support.home import make_private_home
from tests.support.sshd import NOISE, TestSshd, free_port

ServerMaker = Callable[..., TestSshd]
OURS = Environment("python", sys.executable)
"""The interpreter of the tests: it has numpy and safetensors."""
BY_PROBE = ("python", "numpy", "safetensors", "torch", "shared-memory")


@pytest.fixture(autouse=True)
def _private_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    make_private_home(monkeypatch, tmp_path)


def rows(report: CheckReport, code: str) -> list[Finding]:
    return [finding for finding in report.findings if finding.code == code]


def row(report: CheckReport, code: str) -> Finding:
    found = rows(report, code)
    assert len(found) == 1, (code, [finding.code for finding in report.findings])
    return found[0]


def levels(report: CheckReport, *codes: str) -> set[str]:
    return {finding.level for code in codes for finding in rows(report, code)}


def left_behind(home: Path) -> list[str]:
    return [path.name for pattern in ("check.*", "rdiag-check.*") for path in home.rglob(pattern)]


def assert_not_reached(report: CheckReport) -> None:
    assert levels(report, "round-trip", "login-shell", "disk-space", "sftp", "agent", "gpus", *BY_PROBE) == {"skipped"}
    assert row(report, "config").level == "ok"
    assert report.status == "fail"
    assert report.result is not None
    assert report.result.survey is None


def test_this_machine(tmp_path: Path) -> None:
    told: list[Event] = []
    report = check(Host("local", transport="local", environment=OURS), on_event=told.append)
    assert report.error is None
    assert levels(report, *BY_PROBE, "sftp", "agent", "cache", "clock", "umask", "noexec") == {"ok"}
    assert not rows(report, "host-key")
    assert not rows(report, "auth")
    assert report.result is not None
    assert report.result.agent is not None
    assert report.result.agent.executable == sys.executable
    assert report.result.environment.python_version == sys.version.split()[0]
    assert [event.done for event in told if isinstance(event, Progress)] == sorted(
        event.done for event in told if isinstance(event, Progress)
    )
    assert left_behind(tmp_path) == []


@pytest.mark.ssh
@pytest.mark.parametrize("shell", ["zsh", "fish", "tcsh"])
def test_a_healthy_host(start_sshd: ServerMaker, shell: str) -> None:
    with start_sshd(shell=shell) as server:
        report = check(server.host(environment=OURS))
        bad = [finding for finding in report.findings if finding.level not in {"ok", "skipped"}]
        assert [finding for finding in bad if finding.code not in {"shell-start", "disk-space"}] == []
        assert report.error is None
        assert row(report, "login-shell").message.endswith(shell)
        assert row(report, "login-noise").value == 0
        assert "publickey" in row(report, "auth").message
        key = row(report, "host-key")
        assert any(line.startswith("SHA256:") for line in key.evidence)
        assert any(str(server.known_hosts) in line for line in key.evidence)
        assert {"connect", "host-key", "auth"} <= set(report.timing.phases)
        for phase in ("connect", "host-key", "auth"):
            assert phase in row(report, "connect").evidence[0]
        assert any("OpenSSH" in line for line in row(report, "connect").evidence)
        assert isinstance(row(report, "round-trip").value, float)
        assert row(report, "sftp").message == "a file was carried and read back"
        assert report.result is not None
        assert report.result.survey is not None
        assert report.result.survey.complete
        assert report.result.survey.home == str(server.home)
        assert left_behind(server.home) == []


@pytest.mark.ssh
def test_noise_alone_is_told_and_harmless(start_sshd: ServerMaker) -> None:
    with start_sshd(shell="bash", noise=NOISE) as server:
        report = check(server.host(environment=OURS))
    noise = row(report, "login-noise")
    assert (noise.level, noise.value) == ("ok", len(NOISE))
    assert noise.evidence[0] == "Welcome!"
    assert "\\x1b[31mRDIAG1 forged" in noise.evidence[1]
    assert "\x1b" not in repr(report.as_dict())
    assert levels(report, "sftp", "agent", "python") == {"ok"}


@pytest.mark.ssh
def test_noise_that_breaks_sftp_is_named_as_the_cause(start_sshd: ServerMaker) -> None:
    with start_sshd(shell="zsh", noise=NOISE, sftp="noisy") as server:
        report = check(server.host(environment=OURS))
    noise, sftp = row(report, "login-noise"), row(report, "sftp")
    assert noise.level == sftp.level == "degraded"
    assert "breaks SFTP" in noise.message
    assert any("login-noise" in line for line in sftp.evidence)
    assert levels(report, "agent", "python", "numpy") == {"ok"}
    assert report.exit_code == ExitCode.FINDINGS


@pytest.mark.ssh
def test_no_sftp(start_sshd: ServerMaker) -> None:
    with start_sshd(shell="zsh", sftp=False) as server:
        report = check(server.host(environment=OURS))
    assert row(report, "sftp").level == "degraded"
    assert "Subsystem sftp" in (row(report, "sftp").action or "")
    assert levels(report, "login-noise", "agent", "python") == {"ok"}
    assert report.exit_code == ExitCode.FINDINGS
    assert report.error is None


@pytest.mark.ssh
@pytest.mark.parametrize(
    ("environment", "said"),
    [
        (Environment("python", "/nonexistent/python3"), "no Python interpreter was found"),
        (Environment("venv", "/nonexistent/venv"), "the virtual environment has no bin/python"),
    ],
)
def test_no_python_leaves_everything_else(zsh_server: TestSshd, environment: Environment, said: str) -> None:
    report = check(zsh_server.host(environment=environment))
    agent = row(report, "agent")
    assert agent.level == "fail"
    assert said in agent.message
    assert "hosts.yaml" in (agent.action or "")
    assert levels(report, *BY_PROBE) == {"skipped"}
    assert levels(report, "auth", "login-shell", "sftp", "cache", "clock", "umask") == {"ok"}
    assert row(report, "gpus").evidence == ("seen from the login shell, as no probe runs",)
    assert report.exit_code == ExitCode.ENVIRONMENT


@pytest.mark.ssh
def test_expected_gpus_are_held_against_the_inventory(zsh_server: TestSshd) -> None:
    real = len([name for name in os.listdir("/dev") if name.startswith("nvidia") and name[6:].isdigit()])
    for environment in (OURS, Environment("venv", "/nonexistent")):
        finding = row(check(zsh_server.host(environment=environment, gpus=real + 3)), "gpus")
        assert (finding.level, finding.threshold, finding.threshold_source) == ("degraded", real + 3, "gpus in hosts.yaml")


def test_nobody_listens() -> None:
    port = free_port()
    report = check(Host("gone", address="127.0.0.1", port=port, user="nobody"))
    assert row(report, "connect").level == "fail"
    assert report.exit_code == ExitCode.UNREACHABLE
    assert not rows(report, "host-key")
    assert_not_reached(report)


@pytest.mark.ssh
def test_another_host_key(start_sshd: ServerMaker) -> None:
    with start_sshd(shell="bash") as server:
        server.new_host_keys()
        report = check(server.host())
        assert server.commands() == []
    assert row(report, "connect").level == "ok"
    assert row(report, "host-key").level == "fail"
    assert row(report, "host-key").action
    assert not rows(report, "auth")
    assert report.exit_code == ExitCode.HOST_KEY
    assert_not_reached(report)


@pytest.mark.ssh
def test_a_key_that_is_not_accepted(start_sshd: ServerMaker, tmp_path: Path) -> None:
    other = tmp_path / "other"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", other], check=True)
    with start_sshd(shell="bash") as server:
        report = check(server.host(identity_file=other))
        assert server.commands() == []
    assert levels(report, "connect", "host-key") == {"ok"}
    assert row(report, "auth").level == "fail"
    assert report.exit_code == ExitCode.AUTH
    assert report.result is not None
    assert (report.result.host_key_fingerprint or "").startswith("SHA256:")
    assert_not_reached(report)


@pytest.mark.ssh
def test_an_account_without_a_shell(start_sshd: ServerMaker, tmp_path: Path) -> None:
    shell = tmp_path / "nologin"
    shell.write_text("#!/bin/sh\necho 'This account is currently not available.'\nexit 1\n")
    shell.chmod(0o755)
    with start_sshd(shell=str(shell)) as server:
        report = check(server.host(environment=OURS))
    login = row(report, "login-shell")
    assert login.level == "fail"
    assert "This account is currently not available." in login.message
    assert "chsh" in (login.action or "")
    assert row(report, "sftp").level != "ok"
    assert row(report, "agent").level == "fail"
    assert report.exit_code == ExitCode.AUTH


@pytest.mark.ssh
def test_a_home_that_cannot_be_written_to(start_sshd: ServerMaker, tmp_path: Path) -> None:
    home = tmp_path / "host home"
    home.mkdir()
    # Root may write everywhere; nobody can make a directory below a file.
    (home / ".cache").write_text("in the way")
    with start_sshd(shell="zsh", home=home) as server:
        report = check(server.host(environment=OURS))
    cache = row(report, "cache")
    assert cache.level == "degraded"
    assert "cache_dir" in (cache.action or "")
    agent = row(report, "agent")
    assert agent.level == "degraded"
    assert levels(report, "python", "numpy", "temporary") == {"ok"}
    assert report.exit_code == ExitCode.FINDINGS
    assert report.result is not None
    assert report.result.agent is not None
    # What was used instead is gone.
    assert not Path(report.result.agent.cache).exists()


@pytest.fixture
def noexec(tmp_path: Path) -> Iterator[Path]:
    """A 64 MiB tmpfs that starts no programs."""
    home = tmp_path / "noexec"
    home.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "noexec,size=64m,nr_inodes=800,mode=700", "tmpfs", home],
        capture_output=True,
        check=False,
    )
    if mounted.returncode:
        pytest.skip(f"a tmpfs cannot be mounted here (needs root): {mounted.stderr.decode().strip()}")
    yield home
    subprocess.run(["umount", "-l", home], check=True)


@pytest.mark.ssh
def test_a_small_home_that_starts_no_programs(start_sshd: ServerMaker, noexec: Path) -> None:
    with start_sshd(shell="zsh", home=noexec) as server:
        report = check(server.host(environment=OURS))
    cache = str(noexec / ".cache/rdiag")
    found = {(finding.code, finding.subject): finding for finding in report.findings}
    programs = found["noexec", cache]
    assert programs.level == "degraded"
    assert any("noexec" in line for line in programs.evidence)
    space, inodes = found["disk-space", cache], found["inodes", cache]
    assert (space.level, space.threshold, space.unit) == ("degraded", 1024, "MiB")
    assert isinstance(space.value, int)
    assert 0 < space.value <= 64
    assert (inodes.level, inodes.threshold) == ("degraded", 1000)
    # rdiag itself is not affected.
    assert levels(report, "agent", "python", "numpy", "cache") == {"ok"}


@pytest.mark.ssh
def test_umask_and_a_missing_home(start_sshd: ServerMaker, tmp_path: Path) -> None:
    shell = tmp_path / "careless"
    shell.write_text('#!/bin/sh\numask 000\nHOME=/nonexistent\nexec /bin/sh "$@"\n')
    shell.chmod(0o755)
    with start_sshd(shell=str(shell)) as server:
        report = check(server.host(environment=OURS))
    assert (row(report, "umask").level, row(report, "umask").value) == ("degraded", "0000")
    assert row(report, "home").level == "degraded"


@pytest.mark.ssh
def test_a_bug_in_one_step_costs_only_that_step(zsh_server: TestSshd, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> Any:
        raise RuntimeError("as the test wants it")

    monkeypatch.setattr(check_module, "survey", broken)
    report = check(zsh_server.host(environment=OURS))
    assert row(report, "login-shell").level == "fail"
    assert levels(report, "sftp", "agent", "python", "numpy") == {"ok"}
    assert report.exit_code == ExitCode.INTERNAL


def inventory(path: Path, *hosts: Host) -> None:
    entries = {
        host.name: {
            "address": host.address,
            "user": host.user,
            "port": host.port,
            "identity_file": str(host.identity_file),
            "known_hosts": str(host.known_hosts),
            **({"environment": {kind: host.environment.value}} if (kind := host.environment.kind) != "default" else {}),
        }
        for host in hosts
    }
    path.write_text(json.dumps({"hosts": entries, "groups": {"lab": list(entries)}}))


@pytest.mark.ssh
def test_the_command_prints_one_object(zsh_server: TestSshd, tmp_path: Path) -> None:
    inventory(tmp_path / "hosts.yaml", zsh_server.host(environment=OURS))
    ran = rdiag("check", "testhost", "-i", str(tmp_path / "hosts.yaml"), "--json", home=tmp_path)
    answer = ran.json
    assert set(answer) >= {"schema_version", "host", "probe", "run_id", "status", "result", "findings", "timing"}
    assert (answer["host"], answer["probe"], answer["schema_version"]) == ("testhost", "check", 1)
    assert answer["result"]["environment"]["executable"] == sys.executable
    assert answer["result"]["survey"]["home"] == str(zsh_server.home)
    assert ran.code == {"ok": 0, "degraded": 1}[answer["status"]]
    assert "error" not in answer


@pytest.mark.ssh
def test_several_hosts_and_one_of_them_gone(zsh_server: TestSshd, tmp_path: Path) -> None:
    gone = zsh_server.host(name="gone", port=free_port(), environment=OURS)
    inventory(tmp_path / "hosts.yaml", zsh_server.host(environment=OURS), gone)
    ran = rdiag("check", "lab", "-i", str(tmp_path / "hosts.yaml"), "--json", home=tmp_path)
    assert ran.code == ExitCode.UNREACHABLE
    first, second = ran.json["hosts"]
    assert first["result"]["agent"]["executable"] == sys.executable
    assert (second["host"], second["status"], second["error"]["exit"]) == ("gone", "fail", 4)


def test_the_table_fits_a_terminal_and_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "hosts.yaml").write_text(f"hosts: {{gone: {{address: 127.0.0.1, port: {free_port()}, user: nobody}}}}\n")
    ran = rdiag("check", "-H", "gone", "-i", str(tmp_path / "hosts.yaml"), home=tmp_path, COLUMNS="80")
    assert ran.code == ExitCode.UNREACHABLE
    lines = ran.out.splitlines()
    assert lines[0].startswith("gone: check: fail - 1 failed (connect)")
    assert max(map(len, lines)) <= 80
    assert "fix: " in ran.out
    assert "the host was not reached" in ran.out


def test_behind_an_unknown_key_there_is_a_host(zsh_server: TestSshd, tmp_path: Path) -> None:
    (tmp_path / "none").touch()
    inventory(tmp_path / "hosts.yaml", zsh_server.host(name="strange", known_hosts=tmp_path / "none"))
    ran = rdiag("check", "strange", "-i", str(tmp_path / "hosts.yaml"), home=tmp_path)
    assert ran.code == ExitCode.HOST_KEY
    assert "rdiag trust strange" in ran.out
    assert "not logged in to the host" in ran.out
    assert "not reached" not in ran.out


def test_an_unknown_host_is_refused_before_anything_is_done(tmp_path: Path) -> None:
    ran = rdiag("check", "nowhere", home=tmp_path)
    assert ran.code in {ExitCode.USAGE, ExitCode.CONFIG}
    assert "nowhere" in ran.err
