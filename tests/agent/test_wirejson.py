"""The small JSON of the supervisor agrees with the standard package wherever that is strict."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remote_diag.agent import wirejson

values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters()),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@given(values)
def test_both_directions_agree_with_the_package(value: Any) -> None:
    assert json.loads(wirejson.encode(value)) == value
    assert wirejson.decode(json.dumps(value).encode("ascii")) == value


@pytest.mark.parametrize("text", [b"", b"{", b"{}x", b"NaN", b"[Infinity]", b"\xff", b"'a'", b'"\x01"', b"[" * 100_000])
@pytest.mark.parametrize("scanner", ["c", "package"])
def test_what_is_not_json_is_refused(text: bytes, scanner: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if scanner == "package":
        monkeypatch.setitem(sys.modules, "_json", None)
    with pytest.raises(ValueError, match=r".+"):
        wirejson.decode(text)


def test_the_package_stands_in_for_a_missing_c_module(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "_json", None)
    assert wirejson.decode(wirejson.encode({"a": [1, 2.5, "é\n"]})) == {"a": [1, 2.5, "é\n"]}


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_numbers_that_json_lacks_are_refused(value: float) -> None:
    with pytest.raises(ValueError, match="not JSON"):
        wirejson.encode({"a": [value]})


def test_other_types_are_refused() -> None:
    with pytest.raises(TypeError, match="bytes"):
        wirejson.encode(b"")


@pytest.mark.parametrize("text", ["{", "[", '{"a"', '"a', "{1}", "[1,]", "tru"])
def test_damaged_text_is_a_value_error_where_the_json_package_is_not_loaded(text: str) -> None:
    program = (
        "import sys; sys.path.insert(0, sys.argv[2]); from agent import wirejson\n"
        "assert 'json' not in sys.modules\n"
        "try: wirejson.decode(sys.argv[1].encode())\n"
        "except ValueError: print('refused')\n"
    )
    package = str(Path(wirejson.__file__).parents[1])
    done = subprocess.run([sys.executable, "-I", "-S", "-c", program, text, package], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("refused\n", "")
