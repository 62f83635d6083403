"""Writes what nccl-tests prints and writes, in each of its generations, for times that a simple model gives.

Written after the formats, not after anybody's output: `GENERATIONS` are the layouts of its table since 2018.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

GENERATIONS = ("2.11", "2.13", "2.13.4", "2.16", "2.17", "2.19")
GPU = "NVIDIA RTX PRO 6000 Blackwell Server Edition"
_PLAIN = {"broadcast", "reduce", "sendrecv"}
_REDUCES = {"all_reduce", "reduce_scatter", "reduce"}
_ROOTED = {"broadcast", "reduce"}
_PARTS = {"all_gather", "reduce_scatter", "alltoall"}


@dataclass(frozen=True)
class Run:
    """What is written about."""

    collective: str = "all_reduce"
    ranks: int = 8
    sizes: tuple[int, ...] = (32 << 10, 4 << 20, 1 << 29)
    """Each the same factor above the one before."""
    gbs: float = 40.0
    """Bus bandwidth at large sizes, GB/s."""
    floor_us: float = 24.0
    wrong: int = 0
    """Wrong elements in the second size, in both placements."""
    validation: int = 1
    gpu: str = GPU
    hosts: int = 1
    single_calls: bool = False
    """Whether times of single calls are written (2.19)."""

    def factor(self) -> float:
        if self.collective in _PLAIN:
            return float(self.ranks > 1)
        return (2 if self.collective == "all_reduce" else 1) * (self.ranks - 1) / self.ranks

    def time_us(self, size: int, *, in_place: bool) -> float:
        bandwidth = self.gbs / (self.factor() or 1)
        return (self.floor_us + size / bandwidth / 1000) * (0.99 if in_place else 1.0)

    def but(self, **other: Any) -> Run:
        return replace(self, **other)

    @property
    def step(self) -> int:
        return self.sizes[1] // self.sizes[0] if len(self.sizes) > 1 and self.sizes[0] else 2

    def count(self, size: int) -> int:
        return size // 4 // (self.ranks if self.collective in _PARTS else 1)

    def wrong_at(self, place: int) -> int:
        return self.wrong if place == 1 else 0


def text(run: Run, generation: str = "2.17") -> str:
    """Return what a program of that generation prints."""
    return "\n".join([*head(run, generation), *rows(run, generation), *foot(run, generation)]) + "\n"


def head(run: Run, generation: str) -> list[str]:
    new = generation in {"2.16", "2.17", "2.19"}
    lines = []
    if generation in {"2.17", "2.19"}:
        lines.append(f"# nccl-tests version {generation}.6 nccl-headers=22809 nccl-library=22809")
    if new:
        lines.append(f"# Collective test starting: {run.collective}_perf")
    more = "" if generation == "2.11" else " agg iters: 1"
    graph = "" if generation == "2.11" else " graph: 0"
    sizes = f"minBytes {run.sizes[0]} maxBytes {run.sizes[-1]} step: {run.step}(factor)"
    lines += [
        f"# nThread 1 nGpus {run.ranks} {sizes} warmup iters: 5 iters: 20{more} validation: {run.validation}{graph}",
        "#",
        "# Using devices",
    ]
    lines += [_device(run, rank, generation) for rank in range(run.ranks)]
    labels = _labels(run.collective, generation)
    check = "error" if generation == "2.11" else "#wrong"
    side = ["time", "algbw", "busbw", check, *(["i_min", "i_max", "i_p99", "i_cv%"] if run.single_calls else [])]
    lines += [
        "#",
        f"#{'out-of-place':>66}{'in-place':>40}",
        "#" + " ".join(f"{name:>11}" for name in [*labels, *side, *side]),
        f"#{'(B)':>12}{'(elements)':>14}{'(us)':>30}{'(GB/s)':>8}{'(GB/s)':>8}{'(us)':>19}{'(GB/s)':>8}{'(GB/s)':>8}",
    ]
    return lines


def _device(run: Run, rank: int, generation: str) -> str:
    group = "" if generation in {"2.11", "2.13"} else " Group  0"
    bus = f"0x{16 * (rank + 1) % 256:02x}" if generation in {"2.11", "2.13", "2.13.4"} else f"0000:{16 * (rank + 1) % 256:02x}:00"
    host = f"host{rank * run.hosts // run.ranks}"
    return f"#  Rank {rank:2d}{group} Pid {4000 + rank} on {host:>12} device {rank:2d} [{bus}] {run.gpu}"


def _labels(collective: str, generation: str) -> list[str]:
    if generation != "2.11":
        return ["size", "count", "type", "redop", "root"]
    reduces = ["redop"] if collective in _REDUCES | {"alltoall"} else []
    return ["size", "count", "type", *reduces, *(["root"] if collective in _ROOTED else [])]


def rows(run: Run, generation: str) -> list[str]:
    return [_row(run, place, size, generation) for place, size in enumerate(run.sizes)]


def _row(run: Run, place: int, size: int, generation: str) -> str:
    cells = [str(size), str(run.count(size)), "float"]
    redop = "sum" if run.collective in _REDUCES else "none"
    if generation != "2.11":
        cells += [redop, "0" if run.collective in _ROOTED else "-1"]
    else:
        cells += [redop] if run.collective in _REDUCES else [""] if run.collective == "alltoall" else []
        cells += ["0"] if run.collective in _ROOTED else []
    for in_place in (False, True):
        time = run.time_us(size, in_place=in_place)
        algbw = size / time / 1000
        cells += [_time(time), f"{algbw:.2f}", f"{algbw * run.factor():.2f}", _check(run, place, generation, in_place=in_place)]
        if run.single_calls:
            cells += [_time(0.98 * time), _time(1.03 * time), _time(1.02 * time), "1.20"]
    return " " + " ".join(f"{cell:>11}" for cell in cells)


def _check(run: Run, place: int, generation: str, *, in_place: bool) -> str:
    if not run.validation or (in_place and run.collective in {"alltoall", "sendrecv"}):
        return "N/A"
    if generation == "2.11":
        return "1e+00" if run.wrong_at(place) else "0e+00"
    return str(run.wrong_at(place))


def _time(value: float) -> str:
    return f"{value:.2f}" if value < 100 else f"{value:.1f}" if value < 10_000 else f"{value:.0f}"


def foot(run: Run, generation: str) -> list[str]:
    bad = 2 * run.wrong if len(run.sizes) > 1 else 0
    lines = [f"# Out of bounds values : {bad} {'FAILED' if bad else 'OK'}", "# Avg bus bandwidth    : 17.4321", "#"]
    return lines + ([f"# Collective test concluded: {run.collective}_perf"] if generation in {"2.16", "2.17", "2.19"} else [])


# JSON ----------------------------------------------------------------------------------------------------------------


def document(run: Run, version: int = 3, env: Sequence[str] = ("NCCL_DEBUG=WARN",)) -> dict[str, Any]:
    """Return what `-J` writes, as an object."""
    typo = version == 1
    bad = 2 * run.wrong
    devices = [
        {"rank": rank, "group": 0, "pid": 4000, "hostname": "host0", "device": rank, "device_hex": f"0000:{16 * (rank + 1) % 256:02x}:00",
         "device_info": run.gpu}
        for rank in range(run.ranks)
    ]  # fmt: skip
    average = {"bandwidith" if typo else "bandwidth": 17.4, "okay": "unchecked"}
    return {
        "version": version, "start_time": "2026-03-01 10:00:00", "args": [f"./{run.collective}_perf", "-J", "x.json"],
        "env": list(env), "nccl_version": 22809,
        "config": {
            "nthreads": 1, "ngpus": run.ranks, "minimum_bytes": run.sizes[0], "maximum_bytes": run.sizes[-1], "step_factor": run.step,
            "warmup_iters": 1, "iterations": 20, "aggregated_iterations": 1, "validation": run.validation, "graph": 0,
            "blocking_collectives": "false", "devices": devices,
        },
        "results": [_result(run, place, size, version) for place, size in enumerate(run.sizes)],
        "out_of_bounds": {"count": bad, "okay": "false" if bad else "true"},
        "average_bus_bandwidith" if typo else "average_bus_bandwidth": average,
        "errors": [""], "end_time": "2026-03-01 10:00:09",
    }  # fmt: skip


def _result(run: Run, place: int, size: int, version: int) -> dict[str, Any]:
    found: dict[str, Any] = {
        "size": size, "count": run.count(size), "type": "float", "redop": "sum" if run.collective in _REDUCES else "none",
        "root": "    -1", "actual_iterations": 20, "experiment_name": "AllReduce",
    }  # fmt: skip
    for name in ("out_of_place", "in_place"):
        time = run.time_us(size, in_place=name == "in_place")
        algbw = size / time / 1000
        found[name] = {
            "time": round(time, 6), "alg_bw": round(algbw, 6), "bus_bw": round(algbw * run.factor(), 6),
            "nwrong": float(run.wrong_at(place)) if run.validation else None,
        }  # fmt: skip
        if run.single_calls and version > 1:
            found[name + "_per_iter"] = {
                "skipped_iterations": 0, "min_us": 0.98 * time, "max_us": 1.03 * time, "avg_us": time, "p50_us": time,
                "p95_us": 1.02 * time, "p99_us": 1.03 * time, "stdev_us": 0.012 * time, "cv_pct": 1.2, "times_us": [time] * 20,
            }  # fmt: skip
    return found


def json_text(run: Run, version: int = 3, env: Sequence[str] = ("NCCL_DEBUG=WARN",)) -> str:
    """Return what `-J` writes."""
    return json.dumps(document(run, version, env)).replace("/", "\\/")
