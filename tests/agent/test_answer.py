"""A result becomes strict JSON, or the field that cannot is named."""

from __future__ import annotations

import enum
import json
from dataclasses import dataclass
from typing import Any

import pytest

from remote_diag.agent.answer import BadResult, encode


@dataclass(frozen=True)
class Row:
    score: Any


@dataclass(frozen=True)
class Result:
    rows: Any = ()


def test_dataclasses_tuples_and_dicts_become_json() -> None:
    result = Result(rows=(Row(1), Row(2.5), {"é": [None, True, "\u2028\n"], "": ()}))
    assert json.loads(encode(result, 1000)) == {
        "rows": [{"score": 1}, {"score": 2.5}, {"é": [None, True, "\u2028\n"], "": []}]
    }


class Float32:
    """Looks like a numpy scalar."""

    dtype = "float32"
    shape = ()

    def tolist(self) -> float:
        return 1.0


class Color(enum.IntEnum):
    RED = 1


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = (value,)
    return value


@pytest.mark.parametrize(
    ("value", "path", "hint"),
    [
        ((Row(1), Row(float("nan"))), "Result.rows[1].score is nan", "None"),
        ({"a": float("-inf")}, "Result.rows['a'] is -inf", "None"),
        (Row(Float32()), "Result.rows.score is a", "value.item()"),
        (b"x", "Result.rows is a bytes", "hex()"),
        ({1: 2}, "Result.rows has the key 1 of type int", None),
        ({1, 2}, "Result.rows is a set", "sorted"),
        (Color.RED, "Result.rows is a", "int(value)"),
        (1 << 2000, "Result.rows is an integer of 2001 bits", None),
        ("caf\udce9", "Result.rows holds bytes that are no text: 'caf\\udce9'", "fsencode"),
        ({"caf\udce9": 1}, "a key of Result.rows holds bytes", "fsencode"),
        (object(), "Result.rows is a object", "frozen dataclasses"),
        (Row, "Result.rows is a type", "frozen dataclasses"),
        (nested(150), "nested more than 100 deep", None),
        ("x" * 2000, "the result has 2011 bytes as JSON; 1000 are allowed", "summarise"),
    ],
)
def test_what_cannot_be_read_back_is_refused_by_name(value: Any, path: str, hint: str | None) -> None:
    with pytest.raises(BadResult) as refused:
        encode(Result(rows=value), 1000)
    assert path in str(refused.value)
    assert refused.value.hint is None if hint is None else hint in str(refused.value.hint)


def test_numpy_is_refused_with_the_conversion() -> None:
    numpy = pytest.importorskip("numpy")
    for value, hint in ((numpy.float64(1), "item()"), (numpy.int64(1), "item()"), (numpy.arange(3), "tolist()")):
        with pytest.raises(BadResult, match="numpy") as refused:
            encode(Result(rows=Row(value)), 1000)
        assert hint in str(refused.value.hint)


def test_a_cycle_ends() -> None:
    cycle: list[Any] = []
    cycle.append(cycle)
    with pytest.raises(BadResult, match="deep"):
        encode(Result(rows=cycle), 1000)
