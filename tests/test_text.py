from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remote_diag.text import last_lines, safe


@given(st.one_of(st.text(), st.binary()))
def test_nothing_that_comes_out_can_steer_a_terminal(value: str | bytes) -> None:
    shown = safe(value)
    assert all(unicodedata.category(character) not in {"Cc", "Cs"} for character in shown)
    assert not set(shown) & set("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069\u200e\u200f\u061c\u2028\u2029")
    shown.encode("utf-8")


@given(st.text(st.characters(categories=("L", "N", "P", "S", "Zs"))))
def test_ordinary_text_passes_unchanged(value: str) -> None:
    assert safe(value) == value


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (b"\x1b[31mred\x1b[0m", "\\x1b[31mred\\x1b[0m"),
        (b"\x1b]0;title\x07", "\\x1b]0;title\\x07"),
        ("a\u202eb", "a\\u202eb"),
        ("\x9b31m", "\\x9b31m"),
        (b"caf\xc3\xa9 \xff", "café \\xff"),
        ("\ud800", "\\ud800"),
        ("a\tb\rc\nd", "a b\\x0dc\\x0ad"),
        ("\U000e0001", "\\U000e0001"),
    ],
)
def test_examples(value: str | bytes, shown: str) -> None:
    assert safe(value) == shown


def test_newlines_pass_only_when_asked_for() -> None:
    assert safe("a\nb", keep_newlines=True) == "a\nb"
    assert safe("a\nb") == "a\\x0ab"


def test_the_limit_says_how_much_was_cut() -> None:
    assert safe("x" * 10, limit=4) == "xxxx… (6 more)"
    assert safe("xxxx", limit=4) == "xxxx"


def test_last_lines_shows_the_last_state_of_a_progress_bar() -> None:
    output = b"one\n\n 10%\r 50%\r100%\r\nlast\x1b[0m\n"
    assert last_lines(output) == ["one", "100%", "last\\x1b[0m"]
    assert last_lines(output, count=1) == ["last\\x1b[0m"]
    assert last_lines(b"") == []
