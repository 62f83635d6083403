"""What a finding may be, at the probe and at the client."""

from __future__ import annotations

import json
from typing import Any

import pytest

from remote_diag.agent.contract import Finding


def test_a_finding_survives_the_wire() -> None:
    finding = Finding(
        "degraded", "bus-bandwidth-low", "Slower than the reference.", "GPU 3", 118.5, "GB/s", 360, "data sheet", ("l1", "l2"), "reseat"
    )
    assert Finding.from_json(finding.to_json()) == finding
    assert Finding.from_json(Finding("ok", "x", "").to_json()) == Finding("ok", "x", "")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("level", value) for value in ["good", "", None, ["ok"]]),
        *(("code", value) for value in ["", "Upper", "a b", "-a", "a--b", "a_b", "x" * 65, None]),
        *(("message", value) for value in [None, 1, "x" * 5000]),
        *(("subject", value) for value in [1, b"x"]),
        *(("value", value) for value in [float("nan"), float("inf"), [1], b"x", object()]),
        ("threshold", float("nan")),
        *(("evidence", value) for value in ["text", ("a", 1), ("x",) * 101]),
    ],
)
def test_a_field_that_does_not_fit_is_named(field: str, value: Any) -> None:
    good: dict[str, Any] = {"level": "ok", "code": "fine", "message": "All is well."}
    with pytest.raises(ValueError, match=field):
        Finding(**{**good, field: value})


def test_numbers_of_other_libraries_are_refused_by_their_name() -> None:
    class float32:  # noqa: N801 - named as numpy names its own
        pass

    with pytest.raises(ValueError, match=r"value must be a number.*float32"):
        Finding("ok", "fine", "", value=float32())  # type: ignore[arg-type]


def test_text_without_an_encoding_becomes_visible() -> None:
    assert Finding("ok", "fine", "caf\udce9").message == "caf\\udce9"


def test_a_finding_too_large_for_a_frame_is_refused() -> None:
    with pytest.raises(ValueError, match="bytes"):
        Finding("ok", "fine", "", evidence=("x" * 4000,) * 20).to_json()


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"[]",
        b"{}",
        json.dumps({**Finding("ok", "x", "").as_dict(), "more": 1}).encode(),
        json.dumps({**Finding("ok", "x", "").as_dict(), "evidence": "x"}).encode(),
        Finding("ok", "x", "").to_json().replace(b'"level"', b'"level": "fail", "level"'),
        b"[" * 100_000,
    ],
)
def test_anything_else_on_the_wire_is_refused(payload: bytes) -> None:
    with pytest.raises(ValueError, match=r".+"):
        Finding.from_json(payload)
