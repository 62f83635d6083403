"""Log bytes on a terminal: nothing gets through that steers it, nothing is left out that a person would want."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remote_diag.views.logs import MAX_PENDING, LogView, collapsed, label, styled

ALLOWED = re.compile(r"\x1b\[[0-9;]*m|\r\x1b\[2K")


def shown(*pieces: tuple[str, bytes], terminal: bool = False, color: bool = False, width: int = 80) -> str:
    written: list[str] = []
    view = LogView(written.append, terminal=terminal, color=color, width=width)
    for stream, data in pieces:
        view.add(stream, data)
    view.finish()
    return "".join(written)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (b"plain", "plain"),
        (b"\x1b[31mred\x1b[0m", "\x1b[31mred\x1b[0m\x1b[0m"),
        (b"\x1b[1;38;5;196;48;2;1;2;3mx\x1b[m", "\x1b[1;38;5;196;48;2;1;2;3mx\x1b[m\x1b[0m"),
        (b"\x1b[8mhidden\x1b[0m", "\\x1b[8mhidden\x1b[0m\x1b[0m"),
        (b"\x1b[5mblink", "\\x1b[5mblink"),
        (b"\x1b[38;5;999mx", "\\x1b[38;5;999mx"),
        (b"\x1b[38;2;1mx", "\\x1b[38;2;1mx"),
        (b"\x1b[38mx", "\\x1b[38mx"),
        (b"\x1b[2J\x1b[H\x1b]0;owned\x07", "\\x1b[2J\\x1b[H\\x1b]0;owned\\x07"),
        (b"\x9b31m\xc2\x9b31m", "\\x9b31m\\x9b31m"),
        ("\u202egnp.exe".encode(), "\\u202egnp.exe"),
        (b"\xff\xfe", "\\xff\\xfe"),
    ],
)
def test_only_usual_colours_reach_a_terminal(line: bytes, expected: str) -> None:
    assert styled(line, color=True) == expected


def test_without_colours_they_are_left_out() -> None:
    assert styled(b"\x1b[1;31mred\x1b[0m \x1b[2Jx", color=False) == "red \\x1b[2Jx"


@given(st.lists(st.tuples(st.sampled_from(["stdout", "stderr", "rank3"]), st.binary(max_size=60))), st.booleans())
def test_no_bytes_whatever_steer_the_terminal(pieces: list[tuple[str, bytes]], terminal: bool) -> None:
    text = ALLOWED.sub("", shown(*pieces, terminal=terminal, color=True))
    assert all(character == "\n" or (character >= " " and not "\x7f" <= character < "\xa0") for character in text)


@given(st.binary(max_size=300), st.integers(1, 7))
def test_how_bytes_are_cut_changes_nothing(data: bytes, size: int) -> None:
    pieces = [("stdout", data[start : start + size]) for start in range(0, len(data), size)]
    assert shown(*pieces) == shown(("stdout", data))


def test_progress_bars_become_their_last_state() -> None:
    assert collapsed(b" 1%\r 50%\r100%\r") == b"100%"
    assert shown(("stdout", b" 1%|\r50%|\r"), ("stdout", b"99%|\r100%|\nnext\r\n")) == "100%|\nnext\n"
    # Only updates, for hours: memory stays bounded.
    assert shown(*[("stdout", b"\r%06d" % number) for number in range(50_000)]) == "049999\n"


def test_lines_of_several_logs_are_never_mixed() -> None:
    text = shown(
        ("stdout", b"begin"), ("stderr", b"Traceback\n"), ("rank3", b"r3\n"), ("stdout", b" end\n"), ("rank1.attempt2.err", b"e")
    )
    assert text == "stderr: Traceback\nrank 3: r3\nbegin end\nrank 1 attempt2 stderr: e\n"
    assert label("stdout") == ""


def test_a_long_line_is_shown_in_pieces_and_whole() -> None:
    euros = "€".encode() * 100_000
    text = shown(*[("stdout", euros[start : start + 8192]) for start in range(0, len(euros), 8192)], ("stdout", b"\nnext\n"))
    assert text == "€" * 100_000 + "\nnext\n"
    broken = shown(("stdout", b"x" * (MAX_PENDING + 1)), ("stderr", b"meanwhile\n"), ("stdout", b"y\n"))
    assert broken == "x" * MAX_PENDING + "\nstderr: meanwhile\nxy\n"


def test_an_unfinished_line_is_drawn_and_taken_back() -> None:
    text = shown(("stdout", b"50%"), ("stderr", b"oops\n"), ("stdout", b"\r100%\n"), terminal=True, width=40)
    assert text == "\r\x1b[2K50%\r\x1b[2Kstderr: oops\n\r\x1b[2K50%\r\x1b[2K100%\n"
    assert shown(("stdout", b"z" * 500), terminal=True, width=40).startswith("\r\x1b[2K" + "z" * 39 + "\r\x1b[2K")


def test_what_was_held_back_is_drawn_later() -> None:
    written: list[str] = []
    called: list[None] = []
    view = LogView(written.append, terminal=True, later=lambda: called.append(None))
    view.add("stdout", b"1%")
    view.add("stdout", b"\r2%")
    assert written[-1].endswith("1%")
    assert called
    view.redraw()
    assert written[-1].endswith("2%")


def test_the_rest_of_a_line_whose_beginning_is_elsewhere_is_left_out() -> None:
    written: list[str] = []
    view = LogView(written.append, terminal=False)
    view.skipped("stdout")
    view.add("stdout", b"d of a line")
    view.add("stdout", b"\nwhole\n")
    view.finish()
    assert "".join(written) == "whole\n"
