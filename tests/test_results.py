from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from remote_diag.errors import ProbeError
from remote_diag.exitcodes import ExitCode
from remote_diag.probe import Probe, load
from remote_diag.results import parse

SOURCE = '''\
"""A probe with every kind of field."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

EFFECTS = ()
STRICT = {"extra": "forbid", "allow_inf_nan": False, "use_attribute_docstrings": True}


@dataclass(frozen=True)
class Params:
    """Nothing."""

    __pydantic_config__ = STRICT


@dataclass(frozen=True)
class Rank:
    """One rank."""

    __pydantic_config__ = STRICT

    gbps: float
    """GB/s."""
    pair: tuple[int, str]
    """A number and its name."""


@dataclass(frozen=True)
class Result:
    """All kinds."""

    __pydantic_config__ = STRICT

    count: int
    """A count."""
    share: float
    """Between 0 and 1."""
    name: str
    """A name."""
    seen: bool
    """Whether."""
    verdict: Literal["same", "different"]
    """Which."""
    missing: int | None
    """Perhaps a count."""
    ranks: tuple[Rank, ...]
    """Shape [ranks]."""
    by_name: dict[str, Rank]
    """By name."""

    def __post_init__(self) -> None:
        if self.count < 0:
            raise ValueError("count is negative")
        if self.count == 13:
            raise KeyError("a bug in the probe")


def run(params, context):
    """Run."""
'''
RANK = {"gbps": 3, "pair": [1, "one"]}
GOOD: dict[str, Any] = {
    "count": 3,
    "share": 0.5,
    "name": "caf\u00e9 \U0001f600 \u0000 \u001b[31m",
    "seen": True,
    "verdict": "same",
    "missing": None,
    "ranks": [RANK, {"gbps": 1.5, "pair": [2, "two"]}],
    "by_name": {"": RANK, "a.b": RANK},
}


@pytest.fixture(scope="module")
def probe(tmp_path_factory: pytest.TempPathFactory) -> Probe[Any, Any]:
    path: Path = tmp_path_factory.mktemp("probe") / "all_kinds.py"
    path.write_text(SOURCE)
    return load(path)


def encoded(value: object, **options: Any) -> bytes:
    return json.dumps(value, **options).encode()


def refusal(probe: Probe[Any, Any], data: bytes) -> ProbeError:
    with pytest.raises(ProbeError) as caught:
        parse(probe, data)
    error = caught.value
    assert error.exit_code is ExitCode.PROBE_ERROR
    assert error.message.startswith("the result of all-kinds is invalid: ")
    assert len(error.message) < 600
    assert error.message.isprintable()
    assert error.hint
    return error


def test_a_result_comes_back_as_the_probe_returned_it(probe: Probe[Any, Any]) -> None:
    for ascii_only in (True, False):
        result = parse(probe, encoded(GOOD, ensure_ascii=ascii_only))
        assert type(result) is probe.Result
        assert result.ranks[0].gbps == 3.0
        assert type(result.ranks[0].gbps) is float
        assert result.ranks[1].pair == (2, "two")
        assert json.loads(json.dumps(dataclasses.asdict(result))) == {**GOOD, "ranks": GOOD["ranks"]}


def test_cut_at_every_byte(probe: Probe[Any, Any]) -> None:
    data = encoded(GOOD)
    for length in range(len(data)):
        refusal(probe, data[:length])


def test_followed_or_preceded_by_anything(probe: Probe[Any, Any]) -> None:
    data = encoded(GOOD)
    for junk in (b"x", b"{}", b"\0", b"\xef\xbb\xbf", data):
        refusal(probe, data + junk)
        refusal(probe, junk + data)


CHANGES: dict[str, tuple[dict[str, Any], str]] = {
    "text-for-int": ({"count": "12"}, 'count: Input should be a valid integer (got "12")'),
    "float-for-int": ({"count": 12.0}, "count: Input should be a valid integer"),
    "bool-for-int": ({"count": True}, "count: Input should be a valid integer (got true)"),
    "text-for-float": ({"share": "0.5"}, "share: "),
    "null-for-float": ({"share": None}, "share: Input should be a valid number (got null)"),
    "int-for-text": ({"name": 3}, "name: "),
    "int-for-bool": ({"seen": 1}, "seen: "),
    "text-for-bool": ({"seen": "true"}, "seen: "),
    "another-literal": ({"verdict": "Same"}, "verdict: "),
    "text-for-none": ({"missing": ""}, "missing: "),
    "object-for-array": ({"ranks": {}}, "ranks: "),
    "inside-array": ({"ranks": [RANK, {**RANK, "gbps": "1"}]}, "ranks[1].gbps: "),
    "pair-too-long": ({"ranks": [{**RANK, "pair": [1, "a", 2]}]}, "ranks[0].pair: "),
    "extra-inside": ({"by_name": {"x y": {**RANK, "more": 1}}}, 'by_name["x y"].more: is no field of it'),
    "missing-inside": ({"by_name": {"x": {"gbps": 1}}}, "by_name.x.pair: is missing"),
    "extra": ({"more": 1}, "more: is no field of it"),
    "extra-hostile": ({"\x1b[2J" * 50: 1}, "is no field of it"),
    "invariant": ({"count": -1}, "count is negative"),
    "bug-in-invariant": ({"count": 13}, "KeyError: 'a bug in the probe'"),
    "huge-integer": ({"count": 10**400}, "count: the number 1000"),
}


@pytest.mark.parametrize("case", CHANGES)
def test_what_does_not_fit_is_refused_by_its_path(case: str, probe: Probe[Any, Any]) -> None:
    change, message = CHANGES[case]
    assert message in refusal(probe, encoded({**GOOD, **change})).message


@pytest.mark.parametrize("name", GOOD)
def test_no_field_may_lack(name: str, probe: Probe[Any, Any]) -> None:
    data = encoded({key: value for key, value in GOOD.items() if key != name})
    assert f"{name}: is missing" in refusal(probe, data).message


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (b'"share": 0.5', b'"share": NaN', "share: NaN is not a number"),
        (b'"share": 0.5', b'"share": Infinity', "share: Infinity is not a number"),
        (b'"share": 0.5', b'"share": 1e999', "share: the number 1e999 is too large"),
        (b'"count": 3', b'"count": 3, "count": 3', 'the key "count" appears twice'),
        (b'"count": 3', b'"count": 3, "\\u0063ount": 4', 'the key "count" appears twice'),
        (b'"gbps": 3', b'"gbps": 3, "gbps": 3', 'ranks[0]: the key "gbps" appears twice'),
        (b'"name": "', b'"name": "\\ud800', ""),
        (b'"name": "', b'"name": "\\udc00', "surrogate"),
        (b'"name": "', b'"name": "\xff', "not UTF-8"),
        (b'"count": 3', b'"count": ' + b"[" * 200 + b"]" * 200, "nested deeper than 100"),
        (b'"count": 3', b'"count": ' + b"9" * 5000, "count: the number 9999"),
    ],
)
def test_bytes_that_dumps_never_writes(old: bytes, new: bytes, message: str, probe: Probe[Any, Any]) -> None:
    data = encoded(GOOD)
    assert old in data
    error = refusal(probe, data.replace(old, new, 1))
    assert message in error.message


@pytest.mark.parametrize("data", [b"", b"null", b"[]", b"3", b'"text"', b"{}", b"[" * 100_000, b"\xff" * 100])
def test_something_else_altogether(data: bytes, probe: Probe[Any, Any]) -> None:
    refusal(probe, data)


def test_several_problems_are_all_told_and_bounded(probe: Probe[Any, Any]) -> None:
    error = refusal(probe, encoded({f"x{number}": 1 for number in range(1000)}))
    assert len(error.details) == 10
    assert error.details[-1].endswith(" more")


def test_too_large_is_refused_unread(probe: Probe[Any, Any]) -> None:
    error = refusal(probe, b" " * (8 * 1024 * 1024) + encoded(GOOD))
    assert "bytes; at most" in error.message
