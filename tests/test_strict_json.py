from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remote_diag.strict_json import MAX_DEPTH, StrictJsonError, loads, path_text

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)

REFUSED = {
    "nan": (b'{"a": [1, {"b": NaN}]}', "a[1].b: NaN is not a number in JSON"),
    "infinity": (b'{"a": -Infinity}', "a: -Infinity is not a number in JSON"),
    "overflow": (b'{"a": 1e999}', "a: the number 1e999 is too large"),
    "overflow-negative": (b"[-1e400]", "[0]: the number -1e400 is too large"),
    "huge-integer": (b'{"a": 1' + b"0" * 400 + b"}", "a: the number 1000"),
    "huge-integer-5000": (b'{"a": ' + b"9" * 5000 + b"}", "(5000 characters) is too large"),
    "edge-integer": (f"[{2**1024}]".encode(), "is too large"),
    "duplicate": (b'{"x": {"a": 1, "b": 2, "a": 1}}', 'x: the key "a" appears twice'),
    "duplicate-escaped": (b'{"a": 1, "\\u0061": 2}', 'the value itself: the key "a" appears twice'),
    "bom": (b"\xef\xbb\xbf{}", "not JSON"),
    "utf-16": ("{}".encode("utf-16"), "not UTF-8"),
    "utf-16-without-mark": ('{"a":1}'.encode("utf-16-le"), "not JSON"),
    "latin": (b'{"a": "\xe4"}', "byte 7 is not UTF-8"),
    "encoded-surrogate": (b'"\xed\xa0\x80"', "not UTF-8"),
    "junk-before": (b"Welcome!\n{}", "not JSON"),
    "junk-after": (b"{} {}", "not JSON"),
    "nothing": (b"", "not JSON"),
    "comment": (b"{} // x", "not JSON"),
    "single-quotes": (b"{'a': 1}", "not JSON"),
    "trailing-comma": (b"[1,]", "not JSON"),
    "control": (b'"a\nb"', "not JSON"),
    "leading-zero": (b"[01]", "not JSON"),
    "lone-backslash": (b"[" * 101 + b"\\", "nested deeper"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused_and_where(case: str) -> None:
    data, message = REFUSED[case]
    with pytest.raises(StrictJsonError) as caught:
        loads(data)
    assert message in str(caught.value)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("depth", [MAX_DEPTH + 1, 200, 1000, 100_000])
@pytest.mark.parametrize(("opening", "closing"), [("[", "]"), ('{"a":', "}"), ('[{"[": ', "}]")])
def test_deep_nesting_is_refused_before_anything_recurses(depth: int, opening: str, closing: str) -> None:
    with pytest.raises(StrictJsonError, match="nested deeper than 100"):
        loads((opening * depth + "1" + closing * depth).encode())


def test_as_deep_as_allowed() -> None:
    assert loads(b"[" * MAX_DEPTH + b"]" * MAX_DEPTH) is not None


def test_brackets_in_texts_are_no_nesting() -> None:
    for text in ("[" * 500, "\\" * 501 + "[" * 500, '"[' * 300, "{\\\"[" * 300):
        assert loads(json.dumps([text]).encode()) == [text]


def test_a_long_text_without_end_takes_no_long_time() -> None:
    data = b'["' + b'\\"' * 2_000_000 + b"[" * 200
    with pytest.raises(StrictJsonError, match="not JSON"):
        loads(data)


@given(VALUES)
def test_everything_else_is_read_as_the_standard_library_reads_it(value: Any) -> None:
    assert loads(json.dumps(value).encode()) == value
    assert loads(json.dumps(value, ensure_ascii=False).encode()) == value


@given(st.binary(max_size=60) | st.text(alphabet='{}[]",:\\0123456789eE+-.truefalsn \n', max_size=40).map(str.encode))
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    try:
        value = loads(data)
    except StrictJsonError:
        return
    assert json.loads(data) == value


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ((), "the value itself"),
        (("a", 3, "b_c"), "a[3].b_c"),
        ((0, "a"), "[0].a"),
        (("a", "x y", "\x1b[31m"), 'a["x y"]["\\\\x1b[31m"]'),
        (("a", "k" * 100), f'a["{"k" * 60}… (40 more)"]'),
    ],
)
def test_paths_are_readable_and_harmless(path: tuple[str | int, ...], text: str) -> None:
    assert path_text(path) == text


def test_long_paths_are_cut() -> None:
    assert len(path_text(("a",) * 1000)) < 100
