from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from probes import comm_share
from remote_diag.findings import status
from remote_diag.outcome import Outcome, Timing
from remote_diag.testing import RecordingContext
from remote_diag.views.comm_share import duration, render
from tests.probes.test_comm_share import verify_steps
from tests.support.profiler_traces import all_reduce, write_trace


def shown(tmp_path: Path, width: int = 80, **params: Any) -> str:
    context = RecordingContext(tmp_path)
    result = comm_share.run(comm_share.Params(**params), context)
    found = tuple(context.findings)
    outcome: Outcome[Any] = Outcome("gpu8", "comm-share", "run", status(found), result, found, Timing(0, 0, 0, 0))
    page = io.StringIO()
    Console(file=page, width=width, color_system=None).print(render(outcome))
    return page.getvalue()


def test_verdict_first_then_tables_in_80_columns(tmp_path: Path) -> None:
    text = shown(tmp_path, path=str(write_trace(tmp_path / "t.json", verify_steps())), step="verify")
    lines = text.splitlines()
    assert max(map(len, lines)) <= 80
    head = "gpu8: comm-share: degraded - communication takes 97.0 % of verify on GPU 0, 93.0 % exposed"
    assert " ".join(" ".join(lines[:2]).split()) == head
    assert any(line.split() == ["exposed", "9.3", "ms", "93.0", "%"] for line in lines)
    place = next(number for number, line in enumerate(lines) if line.startswith("10 single steps"))
    assert lines[place + 2].split() == ["communication", "97.0", "%", "97.0", "%", "97.0", "%"]
    row = next(line for line in lines if line.startswith("all_reduce (nccl)"))
    assert row.split()[2:] == ["100", "97.0", "%", "93.0", "%", "97", "us", "97", "us", "100.0", "%", "0.0", "%"]
    assert any("32,768" in line for line in lines)


def test_a_long_name_of_a_kernel_costs_no_number(tmp_path: Path) -> None:
    event = {**all_reduce(0, 9), "name": "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"}
    lines = shown(tmp_path, path=str(write_trace(tmp_path / "t.json", [event]))).splitlines()
    row = next(line for line in lines if line.startswith("ncclDevKernel_AllReduce"))
    assert max(map(len, lines)) <= 80
    assert "calls" in next(line for line in lines if line.startswith("kernel"))
    assert row.rstrip().endswith("%")
    assert row.split()[:2] == ["ncclDevKernel_AllReduce_Sum_bf16_RING_LL", "nccl"]


def test_a_name_cannot_steer_the_terminal(tmp_path: Path) -> None:
    event = {**all_reduce(0, 9), "name": "nccl\x1b[2J\u202eAllReduce"}
    text = shown(tmp_path, path=str(write_trace(tmp_path / "t.json", [event])))
    assert not {"\x1b", "\u202e"} & set(text)
    assert "?" in next(line for line in text.splitlines() if line.startswith("all_reduce (nccl)"))


def test_nothing_to_show() -> None:
    outcome: Outcome[Any] = Outcome("gpu8", "comm-share", "run", "skipped", None, (), Timing(0, 0, 0, 0), message="why")
    page = io.StringIO()
    Console(file=page, width=80).print(render(outcome))
    assert page.getvalue() == "gpu8: comm-share: skipped - why\n"


@pytest.mark.parametrize(("us", "text"), [(None, "-"), (0.5, "0.5 us"), (97, "97 us"), (12345, "12.35 ms"), (9e6, "9 s")])
def test_durations(us: float | None, text: str) -> None:
    assert duration(us) == text
