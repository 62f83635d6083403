from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remote_diag import errors, exitcodes
from remote_diag.exitcodes import ExitCode, fold

CODES = st.sampled_from(list(ExitCode))


def test_numbers_never_change() -> None:
    assert {code.name: int(code) for code in ExitCode} == {
        "OK": 0,
        "FINDINGS": 1,
        "USAGE": 2,
        "CONFIG": 3,
        "UNREACHABLE": 4,
        "AUTH": 5,
        "HOST_KEY": 6,
        "ENVIRONMENT": 7,
        "PROBE_ERROR": 8,
        "REFUSED": 9,
        "UNKNOWN_STATE": 10,
        "JOB_FAILED": 11,
        "NOT_STOPPED": 12,
        "INTERNAL": 70,
        "LOCAL_IO": 74,
        "DEADLINE": 124,
        "HANGUP": 129,
        "INTERRUPTED": 130,
        "BROKEN_PIPE": 141,
        "TERMINATED": 143,
    }


def test_every_code_has_a_place_in_the_order() -> None:
    assert sorted(exitcodes._SEVERITY) == sorted(ExitCode)


def test_fold_of_nothing_is_ok() -> None:
    assert fold([]) is ExitCode.OK


@given(st.lists(CODES, min_size=1))
def test_fold_is_one_of_its_inputs_and_ignores_order_and_repetition(codes: list[ExitCode]) -> None:
    folded = fold(codes)
    assert folded in codes
    assert fold(reversed(codes)) is folded
    assert fold(codes * 2) is folded


@pytest.mark.parametrize("pair", list(itertools.combinations(ExitCode, 2)))
def test_ok_never_hides_anything(pair: tuple[ExitCode, ExitCode]) -> None:
    if ExitCode.OK in pair:
        assert fold(pair) is not ExitCode.OK


def test_unknown_outranks_findings_and_a_swapped_key_outranks_a_dead_host() -> None:
    assert fold([ExitCode.FINDINGS, ExitCode.UNKNOWN_STATE]) is ExitCode.UNKNOWN_STATE
    assert fold([ExitCode.UNREACHABLE, ExitCode.HOST_KEY]) is ExitCode.HOST_KEY


def test_every_error_class_has_its_own_code_and_is_drawn_in_the_tree() -> None:
    classes = [
        value
        for value in vars(errors).values()
        if isinstance(value, type) and issubclass(value, errors.RdiagError) and value is not errors.RdiagError
    ]
    assert len(classes) >= 12
    for kind in classes:
        assert kind.__name__ in str(errors.__doc__)
        error = kind("cause", host="h", hint="do this")
        assert error.as_dict()["exit"] == int(kind.exit_code)
        assert error.one_line() == f"h: {kind.default_phase}: cause"
        assert kind.default_phase in errors.PHASES


def test_an_error_never_carries_raw_control_characters() -> None:
    error = errors.ProbeError("bad \x1b[2J", host="h", hint="a\nb\x07", details=("\x9b31m",))
    assert error.message == "bad \\x1b[2J"
    assert error.hint == "a\nb\\x07"
    assert error.details == ("\\x9b31m",)
