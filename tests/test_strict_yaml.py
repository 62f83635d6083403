from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remote_diag.errors import ConfigError
from remote_diag.strict_yaml import MAX_BYTES, MAX_DEPTH, Document, load, load_file


def read(text: str | bytes) -> Document:
    return load(text.encode() if isinstance(text, str) else text, source="f.yaml")


def refusal(text: str | bytes) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        read(text)
    return caught.value


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("true", True),
        ("False", False),
        ("null", None),
        ("~", None),
        ("", None),
        ("0", 0),
        ("-7", -7),
        ("+8", 8),
        ("163840", 163840),
        ("10.0", 10.0),
        (".5", 0.5),
        ("1e-5", 1e-5),
        ("2.5E+3", 2500.0),
        ("~/x", "~/x"),
        ("1.2.3", "1.2.3"),
        ("fe80::1", "fe80::1"),
        ("203.0.113.7:22", "203.0.113.7:22"),
        ("node", "node"),
        ("nothing", "nothing"),
        ("'no'", "no"),
        ('"22:22"', "22:22"),
        ("'8'", "8"),
        ('"\\ud83d\\ude00"', "😀"),
        ("it's", "it's"),
    ],
)
def test_a_scalar_is_what_it_looks_like(written: str, meant: Any) -> None:
    value = read(f"a: {written}\n").data
    assert value == {"a": meant}
    assert isinstance(value, dict)
    assert type(value["a"]) is type(meant)


@pytest.mark.parametrize(
    "written",
    [
        *("yes", "No", "ON", "off", "y", "N"),
        *("22:22", "1:30:00", "-1:2", "190:20:30.15"),
        *("0755", "08", "-012", "0x1F", "0b101", "0o17", "1_000"),
        *("2024-01-31", "2024-1-2", "2001-12-14t21:59:43.10-05:00"),
        *(".inf", "-.INF", ".NaN", "1e999", "00.5", "1_0.5"),
        *("<<", "="),
        "5" * 5000,
    ],
)
def test_a_scalar_that_readers_disagree_about_is_refused(written: str) -> None:
    error = refusal(f"a:\n  b: {written}\n")
    assert error.message.startswith("f.yaml:2:6: ")
    assert error.hint
    assert len(error.message) < 400
    # The same text in quotes is text.
    assert read(f"a: '{written}'\n").data == {"a": written}


@pytest.mark.parametrize(
    ("text", "place", "part"),
    [
        ("a: 1\nb: 2\na: 3\n", "3:1", "duplicate key 'a'; the first is at line 1"),
        ("x: {a: 1, 'a': 2}\n", "1:11", "duplicate key 'a'"),
        ("a: &x 1\n", "1:4", "anchor &x"),
        ("a: *x\n", "1:4", "alias *x"),
        ("a: !!python/object:os.system x\n", "1:4", "tag"),
        ("a: ! x\n", "1:4", "tag"),
        ("&k a: 1\n", "1:1", "anchor &k"),
        ("*k : 1\n", "1:1", "a key must be text"),
        ("<<: {a: 1}\n", "1:1", "merge keys"),
        ("1: a\n", "1:1", "a key must be text"),
        ("~: a\n", "1:1", "a key must be text"),
        ("?\n: a\n", "1:2", "a key must be text; this one is empty"),
        ("? [a]\n: b\n", "1:3", "a key must be text"),
        ("on: a\n", "1:1", "'on' without quotes"),
        ("a: 1\n---\nb: 1\n", "2:1", "second document"),
        ("%TAG ! tag:x,2000:\n---\na: 1\n", "1:1", "directives"),
        ("a:\tb\n", "1:3", "a tab"),
        ("a:\n\tb: 1\n", "2:1", "a tab"),
        ("a: 'x\n", "2:1", "unexpected end"),
        ("a: [1,\n", "2:1", "expected the node content"),
        ("a: [1,\nb: [2\n", "3:1", "(while parsing a flow sequence, which begins at line 2)"),
        ("a: @x\n", "1:4", "cannot start any token"),
        ('a: "\\ud83d"\n', "1:4", "surrogate"),
        ('a: "\\q"\n', "1:6", "unknown escape character"),
        ("a: b\x07\n", "1:5", "U+0007"),
        ("a: \ufeffb\n", "1:4", "U+FEFF"),
        ("a: b\x85\n", "1:5", "U+0085"),
        ("ä: 'ü😀' x\n", "1:9", "expected <block end>"),
        (b"a: 1\r\nb: \xe4\r\n", "2:4", "0xe4 is not UTF-8"),
        (b"\xef\xbb\xbfa: \xff\n", "1:4", "0xff is not UTF-8"),
        (b"\xff\xfea\0", "1:1", "UTF-16"),
        ("[" * (MAX_DEPTH + 1), f"1:{MAX_DEPTH + 1}", "nested more than"),
        ("- " * 2000 + "x", f"1:{2 * MAX_DEPTH + 1}", "nested more than"),
    ],
)
def test_a_refusal_names_the_place(text: str | bytes, place: str, part: str) -> None:
    error = refusal(text)
    assert error.message.startswith(f"f.yaml:{place}: ")
    assert part in error.message
    assert error.hint


def test_the_deepest_nesting_allowed_is_read() -> None:
    assert read("[" * MAX_DEPTH + "]" * MAX_DEPTH).data is not None


def test_letters_that_are_field_names_may_be_keys() -> None:
    assert read("{n: 1, y: 2}\n").data == {"n": 1, "y": 2}


@pytest.mark.parametrize("text", ["", "\n", "# nothing\n", "---\n", "\ufeff"])
def test_an_empty_file_is_none(text: str) -> None:
    assert read(text).data is None


def test_a_byte_order_mark_moves_no_column() -> None:
    assert read("\ufeffa: b\n").where(("a",)) == "f.yaml:1:4"


def test_positions_of_values_keys_and_items() -> None:
    document = read("hosts:\n  gpu8: {port: 22}\ngroups:\n  lab:\n  - gpu8\n  - 'ü': x\n")
    assert document.where(("hosts", "gpu8", "port")) == "f.yaml:2:16"
    assert document.where(("hosts", "gpu8", "port"), key=True) == "f.yaml:2:10"
    assert document.where(("groups", "lab", 1, "ü")) == "f.yaml:6:10"
    assert document.where(("groups", "lab", 0)) == "f.yaml:5:5"
    # What is not there is reported where its innermost parent stands.
    assert document.where(("hosts", "gpu8", "user")) == "f.yaml:2:9"
    assert document.where(("groups", "lab", 7, "x")) == "f.yaml:5:3"
    assert document.where(()) == "f.yaml:1:1"


def test_the_source_text_of_plain_scalars_is_kept() -> None:
    document = read("a: +8\nb: '8'\nc: [1.50]\n")
    assert document.text(("a",)) == "+8"
    assert document.text(("b",)) is None
    assert document.text(("c", 0)) == "1.50"
    assert document.text(("c",)) is None
    assert document.text(("x", "y")) is None


def test_an_error_can_be_made_for_any_path() -> None:
    error = read("a: {b: 1}\n").error(("a", "b"), "too small", hint="write 2")
    assert (error.message, error.hint) == ("f.yaml:1:8: too small", "write 2")


def test_messages_show_control_characters_of_the_file_escaped() -> None:
    assert "\\x1b[2J" in refusal('{"\\e[2J": 1, "\\e[2J": 2}').message


def attempt(data: bytes | str) -> ConfigError | None:
    """Return the refusal of ``data``; None when it is read, as something that JSON could hold."""
    try:
        json.dumps(read(data).data, allow_nan=False)
    except ConfigError as error:
        return error
    return None


@given(st.binary(max_size=300))
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    error = attempt(data)
    assert error is None or (error.hint and error.message.startswith("f.yaml:"))


_YAML_TEXT = st.text(st.sampled_from("ab01:-?,[]{}#&*!|>'\"%@`~=<\\xuU \t\n\r.\u2028\ufeffé😀_+e"), max_size=60)


@given(_YAML_TEXT)
def test_any_text_that_looks_like_yaml_is_read_or_refused(text: str) -> None:
    error = attempt(text)
    assert error is None or (error.hint and error.message.startswith("f.yaml:"))


_JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**20), 10**20)
    | st.floats(allow_nan=False, allow_infinity=False)
    # JSON leaves U+007F as it is; YAML allows it only as an escape.
    | st.text(st.characters(exclude_characters="\x7f"), max_size=40),
    lambda inner: st.lists(inner, max_size=4)
    | st.dictionaries(st.text(st.characters(exclude_characters="\x7f"), max_size=20), inner, max_size=4),
    max_leaves=20,
)


@given(_JSON.filter(lambda value: not _has_lone_surrogate(value)))
def test_json_files_are_read_as_they_are(value: Any) -> None:
    assert read(json.dumps(value)).data == value


def _has_lone_surrogate(value: Any) -> bool:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return True
    return False


def test_files_are_read_with_their_name(tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    path.write_text("a: [1]\n")
    assert load_file(path).where(("a", 0)) == f"{path}:1:5"


def test_a_large_document_is_refused() -> None:
    with pytest.raises(ConfigError, match="larger than"):
        read(b" " * (MAX_BYTES + 1))
    assert read(b"#" * MAX_BYTES).data is None
