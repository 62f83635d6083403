from __future__ import annotations

import itertools

import pytest

from remote_diag.agent.protocol import LEVELS as AGENT_LEVELS
from remote_diag.exitcodes import ExitCode
from remote_diag.findings import LEVELS, Finding, Level, exit_code, status


def findings(*levels: Level) -> list[Finding]:
    return [Finding(level, "some-code", "a message") for level in levels]


@pytest.mark.parametrize(
    ("levels", "skipped", "expected"),
    [
        ((), False, "ok"),
        ((), True, "skipped"),
        (("ok",), False, "ok"),
        (("skipped",), False, "skipped"),
        (("skipped", "skipped"), False, "skipped"),
        (("ok", "skipped"), False, "ok"),
        (("ok",), True, "skipped"),
        (("unknown", "ok"), False, "unknown"),
        (("unknown",), True, "unknown"),
        (("degraded", "unknown"), False, "degraded"),
        (("degraded", "fail", "unknown"), False, "fail"),
        (("fail",), True, "fail"),
    ],
)
def test_the_worst_finding_decides(levels: tuple[Level, ...], skipped: bool, expected: str) -> None:
    for order in itertools.permutations(levels):
        assert status(findings(*order), skipped=skipped) == expected


def test_could_not_measure_is_never_ok() -> None:
    for levels in itertools.product(LEVELS, repeat=2):
        answer = status(findings(*levels))
        if "unknown" in levels:
            assert answer in {"unknown", "degraded", "fail"}
        assert (exit_code(answer) is ExitCode.OK) == (answer == "ok")


def test_each_status_has_its_exit_code() -> None:
    assert [(level, int(exit_code(level))) for level in LEVELS] == [
        ("ok", 0),
        ("degraded", 1),
        ("fail", 1),
        ("unknown", 10),
        ("skipped", 10),
    ]


def test_host_and_client_know_the_same_levels() -> None:
    assert LEVELS == AGENT_LEVELS
