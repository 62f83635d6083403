from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remote_diag import messages
from remote_diag.agent.contract import Finding as HostFinding
from remote_diag.findings import Finding
from remote_diag.messages import MessageError
from tests.support.cli import CHECKOUT

HELLO = {
    "protocol": 1,
    "python": "3.11.7",
    "executable": "/usr/bin/python3",
    "bundle": "ab" * 32,
    "cache": "/root/.cache/rdiag",
    "cwd": "/root",
    "user": "root",
    "pid": 4711,
}
END = {
    "outcome": "ok",
    "message": "",
    "hint": None,
    "details": ["one line"],
    "exit_status": 0,
    "signal": None,
    "result_sha256": "0" * 64,
    "result_bytes": 12,
    "survivors": [{"pid": 7, "name": "stuck", "state": "D"}],
    "run_dir": None,
    "elapsed_s": 1.5,
}
FINDING = {
    "level": "fail",
    "code": "little-space",
    "message": "only 1 % is free",
    "subject": "/",
    "value": 0.01,
    "unit": "fraction",
    "threshold": 1,
    "threshold_source": "the caller",
    "evidence": ["df"],
    "action": None,
}
PROGRESS = {"done": 1, "total": None, "unit": "files", "label": "reading"}
STARTED = {"pid": 1, "run_dir": "/x"}
KINDS: dict[str, tuple[Callable[[bytes], object], dict[str, Any]]] = {
    "hello": (messages.parse_hello, HELLO),
    "end": (messages.parse_end, END),
    "finding": (messages.parse_finding, FINDING),
    "progress": (messages.parse_progress, PROGRESS),
    "started": (messages.parse_started, STARTED),
    "need": (messages.parse_need, {"sha256": "f" * 64}),
    "python-too-old": (messages.parse_too_old, {"python": "2.7.18", "executable": "/usr/bin/python"}),
    "bundle-damaged": (messages.parse_damaged, {"bundle": "1", "expected": "2"}),
}


def encoded(value: object) -> bytes:
    return json.dumps(value).encode()


def test_what_a_host_says_is_taken_over() -> None:
    hello = messages.parse_hello(encoded(HELLO))
    assert (hello.python, hello.pid, hello.cache) == ("3.11.7", 4711, "/root/.cache/rdiag")
    end = messages.parse_end(encoded(END))
    assert end.survivors == (messages.Survivor(7, "stuck", "D"),)
    assert (end.details, end.elapsed_s, end.signal) == (("one line",), 1.5, None)
    assert messages.parse_progress(encoded(PROGRESS)) == messages.Progress(1, None, "files", "reading")
    assert messages.parse_started(encoded(STARTED)) == messages.Started(1, "/x")
    assert messages.parse_need(encoded({"sha256": "f" * 64})) == "f" * 64
    assert messages.parse_too_old(encoded(KINDS["python-too-old"][1])) == ("2.7.18", "/usr/bin/python")
    assert messages.parse_damaged(encoded({"bundle": "1", "expected": "2"})) == ("1", "2")


def test_a_finding_survives_the_road_from_the_host() -> None:
    sent = HostFinding("unknown", "no-answer", "nvidia-smi hangs", "gpu 3", 30, "s", 5.0, "the manual", ("a", "b"), "reboot")
    assert messages.parse_finding(sent.to_json()) == Finding(
        "unknown", "no-answer", "nvidia-smi hangs", "gpu 3", 30, "s", 5.0, "the manual", ("a", "b"), "reboot"
    )


@pytest.mark.parametrize("kind", KINDS)
def test_a_message_cut_anywhere_is_no_message(kind: str) -> None:
    parse, fields = KINDS[kind]
    data = encoded(fields)
    parse(data)
    for length in range(len(data)):
        with pytest.raises(MessageError):
            parse(data[:length])


@pytest.mark.parametrize("kind", KINDS)
def test_every_field_is_needed_and_no_other_allowed(kind: str) -> None:
    parse, fields = KINDS[kind]
    for name in fields:
        with pytest.raises(MessageError, match=f"{kind}: '{name}' is missing"):
            parse(encoded({key: value for key, value in fields.items() if key != name}))
    with pytest.raises(MessageError, match="unknown fields: further"):
        parse(encoded({**fields, "further": 1}))


NOTHING_FITS: list[Any] = [[], {}, [1], {"a": 1}, True, -1, 10**40, "\x1b[2J" * 10_000, 1.5e300]


@pytest.mark.parametrize("kind", KINDS)
def test_wrong_types_and_sizes_are_refused_in_bounded_words(kind: str) -> None:
    parse, fields = KINDS[kind]
    for name, right in fields.items():
        for wrong in NOTHING_FITS:
            if isinstance(right, (list, bool)) and wrong == []:
                continue
            if name in {"value", "threshold"} and not isinstance(wrong, (list, dict)) and not isinstance(wrong, str):
                continue
            if isinstance(right, (int, float)) and name in {"done"} and wrong == -1:
                continue
            if name in {"total"} and wrong == -1:
                continue
            with pytest.raises(MessageError) as caught:
                parse(encoded({**fields, name: wrong}))
            assert len(str(caught.value)) < 500
            assert str(caught.value).isprintable()


@pytest.mark.parametrize(
    ("kind", "change", "part"),
    [
        ("hello", {"protocol": 2}, "speaks protocol 2 and this client protocol 1"),
        ("hello", {"protocol": True}, "'protocol'"),
        ("hello", {"bundle": "AB" * 32}, "64 hex digits"),
        ("hello", {"pid": 0}, "between 1"),
        ("end", {"outcome": "fine"}, "one of ok, probe-error"),
        ("end", {"survivors": [{"pid": 1, "name": "x"}]}, "'state' is missing"),
        ("end", {"survivors": [{"pid": 1, "name": "x", "state": "D", "y": 1}]}, "unknown fields: y"),
        ("end", {"details": ["x"] * 1001}, "at most 1000"),
        ("finding", {"level": "broken"}, "one of ok, degraded"),
        ("finding", {"code": "Two Words"}, "kebab-case"),
        ("finding", {"code": ""}, "kebab-case"),
        ("finding", {"evidence": "text"}, "a list"),
        ("progress", {"done": "1"}, "'done' must be a number"),
    ],
)
def test_each_rule_by_name(kind: str, change: dict[str, Any], part: str) -> None:
    parse, fields = KINDS[kind]
    with pytest.raises(MessageError) as caught:
        parse(encoded({**fields, **change}))
    assert part in str(caught.value)


def test_raw_json_traps() -> None:
    for data in (b"[]", b"null", b'"x"', b"\xff", b"[" * 100_000, b'{"pid": 1, "pid": 1, "run_dir": "x"}'):
        with pytest.raises(MessageError):
            messages.parse_started(data)
    for done in (b"NaN", b"1e999", b"-Infinity", b"9" * 5000):
        with pytest.raises(MessageError, match="done"):
            messages.parse_progress(b'{"done": %s, "total": null, "unit": "", "label": ""}' % done)
    with pytest.raises(MessageError, match="bytes; at most"):
        messages.parse_started(b" " * (messages.MAX_MESSAGE + 1))


def test_lone_surrogates_become_visible() -> None:
    assert messages.parse_started(b'{"pid": 1, "run_dir": "/data/\\udcff"}').run_dir == "/data/\\udcff"


@given(st.binary(max_size=200))
def test_any_bytes_give_a_message_or_a_message_error(data: bytes) -> None:
    for parse, _ in KINDS.values():
        with pytest.raises(MessageError):
            parse(data)


def test_messages_are_read_before_pydantic_is_imported() -> None:
    code = "import sys, remote_diag.messages; assert 'pydantic' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=CHECKOUT, timeout=60)
