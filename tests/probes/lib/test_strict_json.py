from __future__ import annotations

import pytest

from probes.lib.strict_json import count, parse_object


def test_an_object_is_read() -> None:
    assert parse_object(b'{"a": [1, 2.5, null, {"b": "\xc3\xa9"}]}') == {"a": [1, 2.5, None, {"b": "é"}]}


def test_infinity_in_a_config_is_no_reason_to_refuse_it() -> None:
    assert parse_object(b'{"a": Infinity, "vocab_size": 5}')["vocab_size"] == 5


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b"[1]", "not a JSON object"),
        (b'"x"', "not a JSON object"),
        (b'{"a": 1, "a": 2}', "twice"),
        (b'{"x": {"a": 1, "a": 2}}', "twice"),
        (b'{"a": "\xff"}', "not UTF-8"),
        ('{"a": 1}'.encode("utf-16"), "not UTF-8"),
        (b'{"a": ' + b"9" * 100 + b"}", "a number of 100 digits"),
        (b'{"a": 1.' + b"9" * 100_000 + b"}", "characters"),
        (b'{"a": ' + b"[" * 200_000, "too deeply"),
        (b'{"a": 1} x', "not JSON"),
        (b'{"a": [' + b"{}," * 700_000 + b"1]}", "more than 700000 objects"),
        (b'{"a": [' + b"[]," * 700_000 + b"1]}", "more than 700000 objects"),
    ],
)
def test_everything_else_is_refused_in_words(data: bytes, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        parse_object(data)


def test_counts() -> None:
    assert [count(value) for value in (3, 0, -1, True, 2.0, "3", None)] == [3, 0, None, None, None, None, None]
