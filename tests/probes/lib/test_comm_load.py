"""GPUs under load, as nvidia-smi tells: values or what stands in their place, and what they mean."""

from __future__ import annotations

from pathlib import Path

import pytest

from probes.lib.comm import load
from remote_diag.testing import RecordingContext
from tests.support.fake_smi import SENTINELS, FakeSmi, rtx_pro_6000

LINE = "00000000:1B:00.0, 5, 5, 16, 16, 2430, 412.50, 61, 0x0000000000000004"


def codes(context: RecordingContext) -> dict[str, str]:
    return {finding.code: finding.level for finding in context.findings}


def judged(line: str, folder: Path) -> dict[str, str]:
    context = RecordingContext(folder)
    found, damaged = load.parse(line)
    assert not damaged
    load.judge(context, found)
    return codes(context)


def test_values() -> None:
    (found,), damaged = load.parse(LINE + "\n")
    assert damaged == []
    assert found == {
        "bus_id": "0000:1b:00.0", "pcie_gen": 5, "pcie_gen_max": 5, "pcie_width": 16, "pcie_width_max": 16, "clock_sm_mhz": 2430.0,
        "power_w": 412.5, "temperature_c": 61.0, "throttle": ("power cap",), "missing": {},
    }  # fmt: skip


@pytest.mark.parametrize("sentinel", [text for text in SENTINELS if "," not in text])
@pytest.mark.parametrize("place", range(1, 9))
def test_what_stands_in_the_place_of_a_value_is_kept(place: int, sentinel: str, tmp_path: Path) -> None:
    cells = LINE.split(", ")
    cells[place] = sentinel
    (found,), _ = load.parse(", ".join(cells))
    name = load._FIELDS[place - 1][0]
    assert found["missing"] == {name: sentinel or "empty"}
    assert found[name] in (None, ())
    known = sentinel in ("[N/A]", "N/A", "[Not Supported]", "[Requested functionality has been deprecated]")
    assert judged(", ".join(cells), tmp_path) == ({} if known else {"load-unknown": "unknown"})


@pytest.mark.parametrize(
    "line", ["", "Unable to determine the device handle for GPU0000:02:00.0: Unknown Error", LINE + ", 7", LINE[:40], "[N/A]" + LINE[16:]]
)
def test_lines_that_are_no_gpu(line: str) -> None:
    found, damaged = load.parse(line)
    assert found == []
    assert damaged == ([line] if line else [])


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        (", 5, 5, 16, 16", ", 5, 5, 16, 16", {}),
        (", 5, 5, 16, 16", ", 4, 5, 16, 16", {"link-slow": "degraded"}),
        (", 5, 5, 16, 16", ", 5, 5, 8, 16", {"link-narrow": "degraded"}),
        ("0x0000000000000004", "0x0000000000000000", {}),
        ("5, 5, 16, 16, 2430, 412.50, 61, 0x0000000000000004", "1, 5, 16, 16, 180, 31, 30, 0x0000000000000001", {"load-unknown": "unknown"}),
        ("0x0000000000000004", "0x0000000000000020", {"throttled": "degraded"}),
        ("0x0000000000000004", "0x0000000000000008", {"throttled": "fail"}),
        ("0x0000000000000004", "0x00000000000000c4", {"throttled": "fail"}),
    ],
)
def test_what_it_means(old: str, new: str, expected: dict[str, str], tmp_path: Path) -> None:
    assert judged(LINE.replace(old, new), tmp_path) == expected


def test_unknown_reasons_are_shown() -> None:
    assert load.reasons("0x0000000000000200") == ("unknown reason 0x200",)
    assert load.reasons("4") is None


def test_a_driver_is_asked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    smi = FakeSmi(tmp_path, rtx_pro_6000(2))
    smi.write()
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    found, problem = load.sample(10.0)
    assert problem is None
    assert len(found) == 2
    assert found[0]["pcie_gen_max"] == 5
    (kept,), _ = load.sample(10.0, [found[1]["bus_id"]])
    assert kept["bus_id"] == found[1]["bus_id"]
