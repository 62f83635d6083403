"""GPUs under load, as nvidia-smi tells: values or what stands in their place, and what they mean."""

from __future__ import annotations

from pathlib import Path
from typing import Any

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
    load.judge(context, load.summary([(0.5, found)]))
    return codes(context)


def seen(folder: Path, *lines: str) -> tuple[dict[str, Any], RecordingContext]:
    """Return the fields of a Load after several samples, half a second apart, and what is found in them."""
    context = RecordingContext(folder)
    (found,) = load.summary([(0.5 * number, load.parse(line)[0]) for number, line in enumerate(lines, 1)])
    load.judge(context, [found])
    return found, context


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


SLOWED = LINE.replace("0x0000000000000004", "0x0000000000000048")
IDLE = "00000000:1B:00.0, 1, 5, 16, 16, 180, 31, 30, 0x0000000000000001"


def test_what_is_seen_in_most_samples_lasts(tmp_path: Path) -> None:
    found, context = seen(tmp_path, LINE, SLOWED, SLOWED, LINE, SLOWED)
    assert (found["samples"], found["idle_samples"], found["throttle"]) == (5, 0, ("power cap", "hardware slowdown", "thermal slowdown by hardware"))
    assert {"reason": "hardware slowdown", "samples": 3, "share": 0.6, "first_s": 1.0, "last_s": 2.5} in found["held"]
    (told,) = context.findings
    assert (told.level, told.code, told.value, told.threshold) == ("fail", "throttled", 0.6, 0.5)
    assert "in 3 of 5 samples" in told.message
    assert told.evidence[0] == "hardware slowdown: in 3 of 5 samples, first after 1.0 s and last after 2.5 s"


@pytest.mark.parametrize(
    ("lines", "level", "words"),
    [
        ((LINE, LINE, SLOWED, LINE), "degraded", "in 1 of 4 samples"),
        ((SLOWED,), "fail", "in 1 sample, the only one"),
        ((SLOWED, SLOWED), "fail", "in all 2 samples"),
        ((IDLE, SLOWED, IDLE), "fail", "in 1 sample, the only one"),
        ((LINE.replace("04", "20"), LINE), "degraded", "hot, in 1 of 2 samples"),
    ],
)
def test_the_number_of_samples_is_told(tmp_path: Path, lines: tuple[str, ...], level: str, words: str) -> None:
    (told,) = seen(tmp_path, *lines)[1].findings
    assert (told.level, told.code) == (level, "throttled")
    assert words in told.message


def test_samples_of_an_idle_gpu_count_for_nothing(tmp_path: Path) -> None:
    found, context = seen(tmp_path, IDLE, LINE, LINE, IDLE)
    assert (found["samples"], found["idle_samples"], found["pcie_gen"], found["clock_sm_mhz"]) == (2, 2, 5, 2430.0)
    assert context.findings == []
    found, context = seen(tmp_path, IDLE, IDLE)
    assert (found["samples"], codes(context)) == (0, {"load-unknown": "unknown"})
    assert "2 samples" in context.findings[0].message


@pytest.mark.parametrize(
    ("gens", "value", "low", "expected"),
    [
        ((1, 5, 5), 5, 0, {}),
        ((1, 3, 5), 5, 0, {}),
        ((5, 4, 5), 4, 1, {"link-slow": "degraded"}),
        ((1, 5, 3), 3, 1, {"link-slow": "degraded"}),
        ((3, 4, 4), 3, 3, {"link-slow": "degraded"}),
    ],
)
def test_a_link_may_wake_up_and_must_then_stay(
    tmp_path: Path, gens: tuple[int, ...], value: int, low: int, expected: dict[str, str]
) -> None:
    found, context = seen(tmp_path, *(LINE.replace(", 5, 5, 16", f", {gen}, 5, 16") for gen in gens))
    assert (found["pcie_gen"], found["link_low_samples"], codes(context)) == (value, low, expected)
    if expected:
        assert context.findings[0].evidence == (f"the link was below that in {'all 3' if low == 3 else '1 of 3'} samples",)


def test_what_one_sample_does_not_tell_another_does(tmp_path: Path) -> None:
    found, context = seen(tmp_path, LINE.replace("0x0000000000000004", "[Unknown Error]").replace("412.50", "[N/A]"), LINE)
    assert (found["missing"], found["power_w"], context.findings) == ({}, 412.5, [])
    assert found["held"] == ({"reason": "power cap", "samples": 1, "share": 1.0, "first_s": 1.0, "last_s": 1.0},)


def test_a_busy_gpu_is_looked_at_several_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    smi = FakeSmi(tmp_path, rtx_pro_6000(2))
    smi.write()
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(load, "_INTERVAL", 0.05)
    monkeypatch.setattr(load, "_MOST", 3)
    samples, problem = load.watch(600.0, [])
    assert (len(samples), problem) == (3, None)
    assert [len(found) for _, found in samples] == [2, 2, 2]
    assert [moment for moment, _ in samples] == sorted({moment for moment, _ in samples})
    # What nvidia-smi says when the load is over is not counted.
    samples, problem = load.watch(0.001, [])
    assert samples == []
    assert "may have been idle again" in str(problem)


def test_an_answer_that_fails_later_costs_none_before(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([(load.parse(LINE)[0], None), ([], "nvidia-smi did not answer within 10 s")])
    monkeypatch.setattr(load, "sample", lambda *_: next(answers))
    monkeypatch.setattr(load, "_INTERVAL", 0.0)
    samples, problem = load.watch(600.0, [])
    assert (len(samples), problem) == (1, "nvidia-smi did not answer within 10 s")


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
