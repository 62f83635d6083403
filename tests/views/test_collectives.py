"""What people see of measured collectives and of copies."""

from __future__ import annotations

import dataclasses
from typing import Any

from rich.console import Console

from probes import nccl, p2p
from probes.lib.comm import tables
from remote_diag.findings import Finding
from remote_diag.outcome import Outcome, Timing
from remote_diag.views import nccl as nccl_view
from remote_diag.views import p2p as p2p_view

LATENCY = {
    "iterations": 200, "min_us": 20.0, "p50_us": 23.5, "p99_us": 30.25, "max_us": 99.0, "slowest_rank": 3, "slowest_share": 0.5,
}  # fmt: skip


def shown(view: Any, probe: str, answer: Any, *findings: Finding, status: str = "ok", width: int = 100) -> str:
    timing = Timing(connect_s=0.0, upload_s=0.0, run_s=1.0, total_s=1.0)
    console = Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: SIM115, PTH123
    console.print(view.render(Outcome("gpu8", probe, "run", status, answer, findings, timing)))
    return console.export_text()


def measured(**more: Any) -> nccl.Result:
    rows = [
        tables.row("all_reduce", 32 << 10, in_place=True, time_us=22.0, algbw_gbs=1.4, busbw_gbs=2.6, wrong=0, latency=LATENCY),
        tables.row("all_reduce", 1 << 30, in_place=True, time_us=40_000.0, algbw_gbs=26.8, busbw_gbs=46.98, wrong=0),
    ]
    fields = tables.report("measured", "nccl", "all_reduce", rows=rows, complete=True, ranks=8, torch_version="2.9.0",
                           peak_busbw_gbs=46.98, peak_size_bytes=1 << 30)  # fmt: skip
    return nccl.build_result({**fields, **more})


def test_a_collective() -> None:
    text = shown(nccl_view, "nccl", measured())
    assert "gpu8: nccl: ok - all_reduce over 8 ranks, data correct, peak 46.98 GB/s" in text
    (small,) = [line for line in text.splitlines() if line.startswith("  32 KiB") or line.lstrip().startswith("32 KiB")]
    assert small.split() == ["32", "KiB", "in", "0", "23.5", "30.25", "99", "22", "1.40", "2.60"]
    assert "torch 2.9.0" in text


def test_data_of_a_run_that_ended_early_are_said_to_be_checked_in_part() -> None:
    text = shown(nccl_view, "nccl", measured(complete=False, correctness="not_checked"), status="fail")
    assert "over 8 ranks, data checked in part, peak 46.98 GB/s, not complete" in text


def test_wrong_and_unchecked_data_are_told_apart_and_nobody_steers_the_terminal() -> None:
    rows = [
        tables.row("all_reduce", 8, in_place=True, wrong=7),
        tables.row("all_reduce", 32, in_place=False),
    ]
    fields = tables.report("file", "nccl", "all_reduce", rows=rows, complete=False, ranks=None, notes=("\x1b[2Jgone",))
    text = shown(nccl_view, "nccl", nccl.build_result(fields), status="fail")
    assert "WRONG DATA" in text
    assert "not complete" in text
    assert "an unknown number of ranks" in text
    assert "\x1b[2J" not in text
    assert "gone" in text
    assert [line.split()[3] for line in text.splitlines() if " B  " in line] == ["7", "?"]


def test_gpus_under_load() -> None:
    load = {
        "bus_id": "0000:1b:00.0", "pcie_gen": 4, "pcie_gen_max": 5, "pcie_width": 16, "pcie_width_max": 16, "clock_sm_mhz": 2430.0,
        "power_w": None, "temperature_c": 61.0, "throttle": ("power cap",), "missing": {"power_w": "[N/A]"},
        "samples": 5, "idle_samples": 1, "link_low_samples": 5,
        "held": ({"reason": "power cap", "samples": 4, "share": 0.8, "first_s": 0.5, "last_s": 2.5},),
    }  # fmt: skip
    text = shown(nccl_view, "nccl", measured(load=(load,)))
    (line,) = [line for line in text.splitlines() if "0000:1b" in line]
    assert line.split() == ["0000:1b:00.0", "5", "gen", "4/5", "x16/16", "2430", "?", "61", "power", "cap", "80%"]


def pair(source: int, target: int, **more: Any) -> dict[str, Any]:
    fields = {
        "source": source, "target": target, "outcome": "ok", "text": "", "can_access": True, "wrong_bytes": 0, "latency_us": 8.0,
        "bandwidth_gbs": 53.0, "both_ways_gbs": None,
    }  # fmt: skip
    return {**fields, **more}


def copied(*pairs: dict[str, Any], links: tuple[dict[str, Any], ...] = (), gpus: int = 2) -> p2p.Result:
    names = tuple({"index": index, "name": "G", "bus_id": f"0000:0{index}:00.0", "uuid": None} for index in range(gpus))
    return p2p.build_result(
        {"gpus": names, "pairs": pairs, "host_links": links, "complete": True, "correctness": "ok", "torch_version": "2"}
    )


def test_copies() -> None:
    link = {"gpu": 0, "outcome": "wrong", "text": "", "wrong_bytes": 3, "h2d_gbs": 55.25, "d2h_gbs": None}
    text = shown(p2p_view, "p2p", copied(pair(0, 1, can_access=False), pair(1, 0, outcome="hang", bandwidth_gbs=None), links=(link,)))
    assert "copies fail between 1 of 2 pairs" in text
    lines = [line.split() for line in text.splitlines()]
    assert ["gpu", "0", "0000:00:00.0", "53.0*", "8.0-8.0"] in lines
    assert ["gpu", "1", "0000:01:00.0", "HANG", "8.0-8.0"] in lines
    assert ["gpu", "0", "55.2", "?", "WRONG"] in lines


def test_sentences() -> None:
    assert p2p_view.sentence(copied(pair(0, 1), pair(1, 0))) == "every byte arrived, 2 pairs"
    assert p2p_view.sentence(copied(pair(0, 0), gpus=1)) == "every byte arrived, within one GPU"
    left = dataclasses.replace(copied(pair(0, 1, outcome="not-run", bandwidth_gbs=None)), complete=False)
    assert p2p_view.sentence(left) == "not every copy was made"


def test_eight_gpus_fit_a_terminal() -> None:
    pairs = [pair(one, other) for one in range(8) for other in range(8) if one != other]
    text = shown(p2p_view, "p2p", copied(*pairs, gpus=8), width=80)
    assert "…" not in text
    assert all(len(line) <= 80 for line in text.splitlines())
