"""Cells: what is a value, what is a reason, and what is garbage."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from probes.lib.gpu.busid import bus_id, normalise, same
from probes.lib.gpu.missing import (
    Missing,
    flag,
    garbage,
    hexmask,
    integer,
    known,
    missing,
    number,
    word,
)

SENTINELS = {
    "[N/A]": "not-supported", "N/A": "not-supported", "[n/a]": "not-supported", "[Not Supported]": "not-supported",
    "Not Supported": "not-supported", "[Unknown Error]": "error", "Unknown Error": "error", "ERR!": "error",
    "[GPU is lost]": "gpu-lost", "GPU is lost.  Reboot the system to recover this GPU": "gpu-lost",
    "[GPU requires reset]": "reset-required", "GPU requires reset": "reset-required",
    "[Insufficient Permissions]": "not-permitted",
    "[Requested functionality has been deprecated]": "deprecated",
    "Requested functionality has been deprecated": "deprecated", "": "empty", "   ": "empty", "[]": "empty",
    "-": "not-reported", "[Unknown]": "error",
}  # fmt: skip
READERS = (number, integer, flag, hexmask, word, bus_id)


@pytest.mark.parametrize(("text", "reason"), SENTINELS.items())
def test_every_sentinel_keeps_its_reason_in_every_reader(text: str, reason: str) -> None:
    found = missing(text)
    assert found is not None
    assert found.reason == reason
    for reader in READERS:
        value = reader(text.upper())
        assert isinstance(value, Missing)
        assert value.reason == reason


@pytest.mark.parametrize(
    ("text", "unit", "value"),
    [("41", "", 41.0), ("81559 MiB", "MiB", 81559.0), ("69.85 W", "W", 69.85), ("0 %", "%", 0.0), (" 7 ", "", 7.0)],
)
def test_numbers(text: str, unit: str, value: float) -> None:
    assert number(text, unit) == value


@pytest.mark.parametrize(
    "text",
    [
        "81559 KiB", "81559 mib", "1e5", "nan", "inf", "0x41", "41.", ".5", "4 1", "41,5", "rank0: 41", "41 MiB 41 MiB",
        "٤١", "1" * 30, "--3", "+3", "41 MiB]",
    ],
)  # fmt: skip
def test_what_is_no_number_of_that_unit_is_an_error_never_a_guess(text: str) -> None:
    assert number(text, "MiB") == garbage(text)


def test_units_may_be_demanded_and_ranges_hold() -> None:
    assert number("41", "MiB", bare=False) == garbage("41")
    assert number("41", bare=False) == 41.0, "what has no unit needs none"
    assert number("-3") == garbage("-3")
    assert number("-3", low=None) == -3.0
    assert number("101 %", "%", high=100) == garbage("101 %")


def test_whole_numbers_flags_and_masks() -> None:
    assert integer("18446744073709551615") == 2**64 - 1
    assert isinstance(integer("-1"), Missing)
    assert isinstance(integer("1.0"), Missing)
    assert isinstance(integer("²"), Missing)
    assert [flag(text) for text in ("Yes", "no", "1", "0", "Enabled", "Disabled", "Active", "Not Active")] == [
        True, False, True, False, True, False, True, False,
    ]  # fmt: skip
    for text in ("2", "Not", "Activ", "Yes No", "None"):
        assert isinstance(flag(text), Missing), text
    assert hexmask("0x0000000000000008") == 8
    assert isinstance(hexmask("8"), Missing), "decimal digits would be read as something else"


def test_a_reason_must_be_known_and_its_text_is_bounded() -> None:
    with pytest.raises(ValueError, match="not one of"):
        Missing("because")  # type: ignore[arg-type]
    assert len(garbage("x" * 10000).text) <= 200
    assert known(garbage("x")) is None
    assert known(0) == 0


@given(st.text(max_size=40), st.sampled_from(["", "MiB", "%", "W"]))
def test_a_number_is_read_only_from_what_spells_one(text: str, unit: str) -> None:
    value = number(text, unit, low=None)
    if isinstance(value, float):
        spelt = re.fullmatch(rf"(-?[0-9]+(?:\.[0-9]+)?)\s*(?:{re.escape(unit)})?", text.strip())
        assert spelt is not None
        assert value == float(spelt.group(1))


@given(st.floats(0, 1e9).map(lambda value: round(value, 2)), st.sampled_from(["MiB", "W", "%", "MHz", "us"]))
def test_numbers_survive_being_printed(value: float, unit: str) -> None:
    assert number(f"{value:.2f} {unit}", unit) == pytest.approx(value)


@given(st.text(max_size=60))
def test_no_text_breaks_a_reader(text: str) -> None:
    for reader in READERS:
        reader(text)


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("00000000:1B:00.0", "0000:1b:00.0"), ("0000:1b:00.0", "0000:1b:00.0"), ("1b:00.0", "0000:1b:00.0"),
        ("PCI:0000:1b:00", "0000:1b:00.0"), ("0000:1b:00", "0000:1b:00.0"), ("00000001:00:00.0", "0001:00:00.0"),
        ("00010000:1B:00.0", "00010000:1b:00.0"), ("0000:1b:1f.7", "0000:1b:1f.7"),
    ],
)  # fmt: skip
def test_one_spelling_of_an_address(text: str, address: str) -> None:
    assert normalise(text) == address
    assert bus_id(text) == address
    assert same(text, address)


@pytest.mark.parametrize("text", ["", "1b", "0000:1b:20.0", "0000:1b:00.8", "g000:1b:00.0", "0000:1b:00.0 x", "GPU 0"])
def test_what_is_no_address(text: str) -> None:
    assert normalise(text) is None
    assert not same(text, text)
