from __future__ import annotations

import io
from dataclasses import dataclass, replace

import pytest
from rich.console import Console

from remote_diag.findings import Finding
from remote_diag.outcome import Outcome, Timing
from remote_diag.views import outcome as views
from remote_diag.views.outcome import fields, footer, render


@dataclass(frozen=True)
class Inner:
    share: float
    label: str


@dataclass(frozen=True)
class Result:
    count: int
    missing: str | None
    items: tuple[int, ...]
    inner: tuple[Inner, ...]
    table: dict[str, int]


FINDING = Finding(
    level="fail",
    code="too-few",
    message="half of it is gone " * 6,
    subject="disk \x1b[2J",
    value=3,
    unit="rows",
    threshold=7,
    threshold_source="the manual",
    evidence=("line one",),
    action="put it back",
)


def outcome(*findings: Finding, **more: object) -> Outcome[Result]:
    result = Result(3, None, (1, 2), (Inner(0.5, "a\u202eb"),), {"k": 1})
    return Outcome(
        "gpu8", "mine", "run", "fail", result, findings, Timing(0.1, 0.0, 0.2, 0.3), **more  # type: ignore[arg-type]
    )


def shown(value: object, width: int = 80) -> str:
    stream = io.StringIO()
    Console(file=stream, width=width, markup=False, color_system=None).print(value)
    return stream.getvalue()


def test_what_differs_in_its_own_address_alone_comes_once() -> None:
    def finding(bus: str) -> Finding:
        line = f"Unable to determine the device handle for GPU{bus.upper()}: Unknown Error"
        return Finding("fail", "lost", "it is lost", subject=f"gpu 0 {bus} GPU-00ab", evidence=(line,), action=f"nvidia-smi -r -i {bus}")

    one, other = finding("0000:1b:00.0"), finding("0000:43:00.0")
    assert list(views.alike([one])) == [(one, ["gpu 0 0000:1b:00.0 GPU-00ab"])]
    ((common, subjects),) = views.alike([one, other])
    assert subjects == [one.subject, other.subject]
    assert common.evidence == ("Unable to determine the device handle for GPU BUS_ID: Unknown Error",)
    assert common.action == "nvidia-smi -r -i BUS_ID"
    assert len(list(views.alike([one, replace(other, action=one.action)]))) == 2


def test_changes_that_differ_in_the_thing_alone_come_once() -> None:
    changes = [
        Finding("degraded", "changed", f"gpus[GPU-{name}].power_limit_w was 700.0 and is {now}", subject=f"gpus[GPU-{name}].power_limit_w")
        for name, now in (("aa", 600.0), ("bb", 600.0), ("cc", 500.0))
    ]
    lines = shown(views.findings(changes)).splitlines()
    assert [line.rstrip() for line in lines] == [
        "degraded gpus[...].power_limit_w was 700.0 and is 600.0",
        "         applies to 2: GPU-aa, GPU-bb",
        "degraded gpus[GPU-cc].power_limit_w was 700.0 and is 500.0",
    ]


def test_verdict_then_findings_then_fields() -> None:
    text = shown(render(outcome(FINDING)))
    first, *rest = text.splitlines()
    assert first.startswith("gpu8: mine: fail")
    assert "fail     disk \\x1b[2J: half of it is gone" in text
    assert "measured 3 rows; threshold 7 rows (the manual)" in text
    assert "next: put it back" in text
    for field in ("count", "missing", "items", "inner[0].share", "inner[0].label", "table.k"):
        assert any(line.startswith(field) for line in rest), field
    assert "\x1b" not in text
    assert "\u202e" not in text


def test_what_is_wrapped_stays_under_its_finding() -> None:
    lines = shown(render(outcome(FINDING)), width=60).splitlines()
    start = next(index for index, line in enumerate(lines) if line.startswith("fail"))
    end = next(index for index, line in enumerate(lines) if "next:" in line)
    assert all(line.startswith(" " * 9) for line in lines[start + 1 : end + 1])


def test_what_could_not_be_measured_is_called_unknown() -> None:
    assert "missing         unknown" in shown(render(outcome()))


def test_the_command_to_copy_is_never_wrapped() -> None:
    lines = footer(outcome(kept="/cache/runs/1", rerun="python /probe_main.py /cache/runs/1", notes=("a \x07 note",)))
    assert lines == [
        "note: a \\x07 note",
        "kept on gpu8: /cache/runs/1",
        "run it again there: python /probe_main.py /cache/runs/1",
    ]


@pytest.mark.parametrize("width", range(30, 100))
def test_a_command_that_could_reset_every_gpu_is_not_broken(width: int) -> None:
    action = "end what runs on it, then reset it: nvidia-smi -r -i 0000:d1:00.0; where that is not supported, reboot the host"
    text = shown(render(outcome(replace(FINDING, action=action))), width)
    lines = text.splitlines()
    assert max(map(len, lines)) <= width
    assert width < 50 or any("nvidia-smi -r -i 0000:d1:00.0;" in line for line in lines)
    assert " ".join(action.split()) in " ".join(text.split())


def test_a_large_result_is_cut_short_and_says_so() -> None:
    @dataclass(frozen=True)
    class Row:
        number: int

    @dataclass(frozen=True)
    class Large:
        table: dict[str, int]
        rows: tuple[Row, ...]

    table = fields(Large({"k" * 5000: 0, **{str(number): 0 for number in range(299)}}, (Row(1),) * 1000))
    assert table.row_count == 2 * (views._MANY + 1)
    names, values = ([str(cell) for cell in column._cells] for column in table.columns)
    assert max(map(len, names)) < 150
    assert values[views._MANY] == "... and 200 more; --json prints them all"
    assert names[-1] == "rows"


def test_what_differs_in_nothing_but_its_subject_comes_once() -> None:
    off = [
        Finding("degraded", "off", "persistence is off", subject=f"gpu {index} 0000:0{index}:00.0 GPU-0{index}-5eed", value=False, action="turn it on")
        for index in range(4)
    ]
    other = replace(off[3], evidence=("off since yesterday",))
    lines = shown(render(outcome(off[0], FINDING, off[1], off[2], other)), 160).splitlines()
    told = [line.strip() for line in lines]
    assert told.count("next: turn it on") == 2
    assert "degraded persistence is off" in told
    assert "applies to 3: gpu 0 0000:00:00.0, gpu 1 0000:01:00.0, gpu 2 0000:02:00.0" in told
    assert "degraded gpu 3 0000:03:00.0 GPU-03-5eed: persistence is off" in told
    # That it is off has been said.
    assert not any("measured False" in line for line in told)
    assert told.index("degraded persistence is off") < next(place for place, line in enumerate(told) if line.startswith("fail "))
