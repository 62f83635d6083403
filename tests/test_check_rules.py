
from __future__ import annotations

from dataclasses import replace

import pytest
from rich.console import Console

from remote_diag import check_rules as rules
from remote_diag.check import CheckFacts, CheckReport
from remote_diag.check_places import place
from remote_diag.errors import AuthError, UnreachableError
from remote_diag.findings import Finding, status
from remote_diag.host import Host
from remote_diag.host_survey import Clock, Limit, Place, Survey
from remote_diag.outcome import Timing
from remote_diag.transport.base import ConnectionFacts
from remote_diag.views.check import render, sentence

GIB = 1 << 30
HEALTHY_PLACE = Place(
    wanted="/c",
    path="/c",
    mount_point="/",
    file_system="ext4",
    mount_options=("rw",),
    total_bytes=100 * GIB,
    free_bytes=50 * GIB,
    total_inodes=10**6,
    free_inodes=10**6,
    writable=True,
    executable=True,
)
HEALTHY = Survey(
    answered=True,
    complete=True,
    exit_status=0,
    shell_seconds=0.02,
    shell="/bin/zsh",
    account_shell="/bin/zsh",
    parent="sshd",
    system="Linux",
    hostname="gpu8",
    user="me",
    uid=1000,
    umask=0o022,
    directory="/home/me",
    home="/home/me",
    home_exists=True,
    path="/bin",
    clock=Clock(0.01, 0.02),
    limits={"open_files": Limit(1024, 1 << 20), "processes": Limit(10**5, 10**5)},
    cache=HEALTHY_PLACE,
    temporary=HEALTHY_PLACE,
)


def judged(survey: Survey, host: Host | None = None, *, sftp_broken: bool = False) -> dict[str, Finding]:
    return {finding.code: finding for finding in rules.survey(survey, host or Host("h"), sftp_broken=sftp_broken)}


def test_nothing_is_wrong_with_a_healthy_host() -> None:
    findings = judged(HEALTHY)
    assert {finding.level for finding in findings.values()} == {"ok"}
    assert all(finding.action is None for finding in findings.values())


@pytest.mark.parametrize(
    ("change", "code", "level"),
    [
        ({"umask": 0o002}, "umask", "ok"),
        ({"umask": 0o000}, "umask", "degraded"),
        ({"umask": 0o777}, "umask", "degraded"),
        ({"umask": None}, "umask", "unknown"),
        ({"clock": Clock(1.5, 0.1)}, "clock", "ok"),
        ({"clock": Clock(-86400.0, 0.5)}, "clock", "degraded"),
        ({"clock": Clock(2.1, 0.5)}, "clock", "unknown"),
        ({"clock": Clock(0.0, 5.0)}, "clock", "unknown"),
        ({"clock": None}, "clock", "unknown"),
        ({"shell_seconds": 3.0}, "shell-start", "degraded"),
        ({"shell_seconds": None}, "shell-start", "unknown"),
        ({"home_exists": False}, "home", "degraded"),
        ({"home": None}, "home", "unknown"),
        ({"limits": {}}, "limits", "unknown"),
        ({"limits": {"open_files": Limit(256, 1 << 20)}}, "open-files", "degraded"),
        ({"limits": {"open_files": Limit(1024, 2048)}}, "open-files", "degraded"),
        ({"limits": {"open_files": Limit(None, None)}}, "open-files", "ok"),
        ({"limits": {"processes": Limit(200, 400)}}, "processes", "degraded"),
        ({"limits": {"file_bytes": Limit(1 << 30, None)}}, "file-size", "degraded"),
        ({"limits": {"locked_memory_bytes": Limit(65536, 65536)}}, "locked-memory", "ok"),
        ({"limits": {"locked_memory_bytes": Limit(65536, 65536)}, "gpu_devices": 8}, "locked-memory", "degraded"),
        ({"complete": False, "stopped_at": "/mnt/dead"}, "survey", "degraded"),
        ({"temporary": None}, "temporary", "unknown"),
        ({"system": None}, "system", "unknown"),
        ({"kill_user_processes": True, "linger": False}, "after-logout", "degraded"),
        ({"kill_user_processes": True, "linger": None}, "after-logout", "degraded"),
        ({"kill_user_processes": True, "linger": True}, "after-logout", "ok"),
    ],
)
def test_what_each_level_is_given_for(change: dict[str, object], code: str, level: str) -> None:
    finding = judged(replace(HEALTHY, **change))[code]  # type: ignore[arg-type]
    assert finding.level == level
    if level in {"degraded", "fail"}:
        assert finding.action


@pytest.mark.parametrize(
    ("change", "code", "level"),
    [
        ({"free_bytes": GIB - 1}, "disk-space", "degraded"),
        ({"free_bytes": GIB}, "disk-space", "ok"),
        ({"free_bytes": 0}, "disk-space", "fail"),
        ({"free_bytes": None}, "disk-space", "unknown"),
        ({"free_inodes": 999}, "inodes", "degraded"),
        ({"free_inodes": 0}, "inodes", "fail"),
        ({"free_inodes": None}, "inodes", "ok"),
        ({"free_inodes": None, "free_bytes": None}, "inodes", "unknown"),
        ({"executable": False, "error": "Permission denied"}, "noexec", "degraded"),
        ({"mount_options": ("rw", "noexec")}, "noexec", "degraded"),
        ({"executable": None}, "noexec", "skipped"),
        ({"writable": False, "error": "No space left on device"}, "cache", "degraded"),
        ({"writable": None}, "cache", "unknown"),
    ],
)
def test_directories(change: dict[str, object], code: str, level: str) -> None:
    findings = {finding.code: finding for finding in place(replace(HEALTHY_PLACE, **change), "cache")}  # type: ignore[arg-type]
    assert findings[code].level == level
    if level in {"degraded", "fail"}:
        assert findings[code].action
    if "error" in change:
        assert change["error"] in findings[code].evidence


@pytest.mark.parametrize(
    ("noise", "stderr", "sftp_broken", "level"),
    [(0, 0, True, "ok"), (10, 0, False, "ok"), (10, 0, True, "degraded"), (0, 10, True, "ok")],
)
def test_noise_is_blamed_only_where_it_does_harm(noise: int, stderr: int, sftp_broken: bool, level: str) -> None:
    survey = replace(HEALTHY, noise_bytes=noise, stderr_bytes=stderr)
    assert judged(survey, sftp_broken=sftp_broken)["login-noise"].level == level


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"exit_status": 1, "noise_bytes": 5, "noise": ("not available",)}, "not available"),
        ({"exit_status": 0}, "says nothing"),
        ({"exit_status": None}, "does not come to run"),
    ],
)
def test_no_answer_from_the_shell(change: dict[str, object], said: str) -> None:
    findings = judged(Survey(**change))  # type: ignore[arg-type]
    assert list(findings) == ["login-shell"]
    assert findings["login-shell"].level == "fail"
    assert said in findings["login-shell"].message
    assert findings["login-shell"].action


def facts(**phases: float) -> ConnectionFacts:
    return ConnectionFacts(transport="ssh", target="me@gpu8:22", phase_seconds=phases, host_key_fingerprint="SHA256:x")


def test_a_slow_phase_is_named() -> None:
    finding = next(rules.connection(facts(connect=0.1, auth=9.0), None))
    assert (finding.level, finding.value, finding.threshold) == ("degraded", 9.0, rules.SLOW_PHASE_S)
    assert "auth" in finding.message


@pytest.mark.parametrize(
    ("error", "codes"),
    [
        (UnreachableError("no such name", phase="resolve"), {"connect": "fail"}),
        (UnreachableError("refused", phase="connect"), {"connect": "fail"}),
        (UnreachableError("changed", phase="host-key"), {"connect": "ok", "host-key": "fail"}),
        (AuthError("denied"), {"connect": "ok", "host-key": "ok", "auth": "fail"}),
        (UnreachableError("odd", phase="config"), {"config": "fail"}),
    ],
)
def test_what_was_reached_before_an_error_is_ok(error: UnreachableError, codes: dict[str, str]) -> None:
    assert {finding.code: finding.level for finding in rules.connection(facts(), error)} == codes


def report(*findings: Finding) -> CheckReport:
    return CheckReport(
        host="h",
        probe="check",
        run_id="r",
        status=status(findings),
        answer=CheckFacts(),
        findings=findings,
        timing=Timing(0.0, 0.0, 0.0, 0.0),
    )


def shown(*findings: Finding) -> str:
    console = Console(width=80, record=True, file=open("/dev/null", "w"), markup=False)  # noqa: SIM115, PTH123
    console.print(render(report(*findings)))
    return console.export_text()


def test_the_view_is_bounded_and_hides_what_steers_a_terminal() -> None:
    hostile = "\x1b]0;pwned\x07\u202e" + "x" * 500
    finding = Finding("fail", "sftp", hostile, subject=hostile, value=hostile, evidence=(hostile,), action="[bold]do[/bold]")
    text = shown(finding, Finding("ok", "umask", "0022", evidence=(hostile,), action="not shown"))
    assert not set("\x1b\x07\u202e") & set(text)
    assert max(map(len, text.splitlines())) <= 80
    assert "fix: [bold]do[/bold]" in text
    assert "not shown" not in text


def test_the_first_line_counts_what_is_not_ok() -> None:
    findings = [
        Finding("ok", "a", ""),
        Finding("degraded", "inodes", ""),
        Finding("degraded", "inodes", ""),
        Finding("fail", "agent", ""),
        *(Finding("skipped", f"s{number}", "") for number in range(9)),
    ]
    assert sentence(findings) == (
        "1 failed (agent); 1 degraded (inodes); 9 skipped (s0, s1, s2, s3, s4, s5 and 3 more); 1 ok"
    )
