"""Traces as torch.profiler writes them, with intervals that a test chose."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

ALL_REDUCE = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
GEMM = "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm>(cutlass::Params)"


def kernel(name: str, start: float, length: float, *, device: int = 0, stream: int = 7, **arguments: Any) -> dict[str, Any]:
    """Return a kernel; times in us."""
    return {
        "ph": "X", "cat": "kernel", "name": name, "pid": device, "tid": stream, "ts": start, "dur": length,
        "args": {
            "queued": 0, "device": device, "context": 1, "stream": stream, "correlation": 9, "registers per thread": 96,
            "shared memory": 0, "blocks per SM": 0.24, "grid": [32, 1, 1], "block": [288, 1, 1], **arguments,
        },
    }  # fmt: skip


def all_reduce(start: float, length: float, elements: int | None = None, **more: Any) -> dict[str, Any]:
    """Return a kernel of NCCL; with ``elements`` as a profiler of a program without CUDA graphs records it."""
    recorded: dict[str, Any] = {}
    if elements is not None:
        recorded = {
            "Collective name": "allreduce", "In msg nelems": elements, "Out msg nelems": elements, "Group size": 8,
            "dtype": "BFloat16", "Process Group Name": "0", "Process Group Ranks": "[0, 1, 2, 3, 4, 5, 6, 7]",
        }  # fmt: skip
    return kernel(ALL_REDUCE, start, length, stream=20, **recorded, **more)


def copy(start: float, length: float, device: int = 0) -> dict[str, Any]:
    """Return a copy to the GPU."""
    event = kernel("Memcpy HtoD (Pinned -> Device)", start, length, device=device)
    return {**event, "cat": "gpu_memcpy"}


def annotation(name: str, start: float, length: float, device: int | None = None) -> dict[str, Any]:
    """Return a span of the program; of a GPU's work if ``device`` is given."""
    if device is None:
        return {
            "ph": "X", "cat": "user_annotation", "name": name, "pid": 4711, "tid": 4711, "ts": start, "dur": length,
            "args": {"External id": 5, "Ev Idx": 3},
        }  # fmt: skip
    return {
        "ph": "X", "cat": "gpu_user_annotation", "name": name, "pid": device, "tid": 7, "ts": start, "dur": length,
        "args": {"External id": 5},
    }  # fmt: skip


def operator(start: float, length: float, name: str = "aten::mm") -> dict[str, Any]:
    """Return an event of the CPU, as most events of a trace are."""
    return {
        "ph": "X", "cat": "cpu_op", "name": name, "pid": 4711, "tid": 4711, "ts": start, "dur": length,
        "args": {"External id": 17, "Record function id": 0, "Concrete Inputs": ["", "[4096, 4096]"], "Ev Idx": 17},
    }  # fmt: skip


def process_name() -> dict[str, Any]:
    """Return an event that names a process."""
    return {"name": "process_name", "ph": "M", "ts": 0, "pid": 4711, "tid": 0, "args": {"name": "python \"cat\": \"kernel\""}}


def kineto_event(event: dict[str, Any], *, lines: bool = False) -> str:
    """Return an event laid out as libkineto does it; today one key a line (``lines``), before torch 2.12 or so not."""
    head = ", ".join(f"{json.dumps(key)}: {json.dumps(event[key])}" for key in event if key not in {"ts", "dur", "args"})
    times = ", ".join(f'"{key}": {event[key]!r}' for key in ("ts", "dur") if key in event)
    arguments = ", ".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in event.get("args", {}).items())
    if lines:
        head, times = head.replace(', "', ',\n    "'), times.replace(", ", ",\n    ") + "\n    "
    return f'  {{\n    {head},\n    {times},\n    "args": {{\n      {arguments}\n    }}\n  }}'


def kineto_text(events: Iterable[dict[str, Any]], group: dict[str, Any] | None = None, *, lines: bool = False) -> Iterator[str]:
    """Yield a whole trace in pieces."""
    yield '{\n  "schemaVersion": 1,\n  "deviceProperties": [\n    {\n      "id": 0, "name": "NVIDIA H200"\n    }\n  ],\n'
    if group is not None:
        yield f'  "distributedInfo": {json.dumps(group)},\n'
    yield '  "traceEvents": [\n'
    for place, event in enumerate(events):
        yield (",\n" if place else "") + kineto_event(event, lines=lines)
    yield '\n  ],\n  "traceName": "trace.json",\n  "displayTimeUnit": "ms"\n}\n'


LAYOUTS = ("kineto", "kineto-lines", "compact", "indented", "array", "gzip")


def write_trace(path: Path, events: list[dict[str, Any]], layout: str = "kineto", group: dict[str, Any] | None = None) -> Path:
    """Write a trace in one of :data:`LAYOUTS`, and return its path."""
    whole = {"schemaVersion": 1, **({"distributedInfo": group} if group else {}), "traceEvents": events, "traceName": "t"}
    if layout in {"kineto", "kineto-lines"}:
        path.write_text("".join(kineto_text(events, group, lines=layout == "kineto-lines")))
    elif layout == "gzip":
        path.write_bytes(gzip.compress("".join(kineto_text(events, group)).encode()))
    elif layout == "array":
        path.write_text(json.dumps(events))
    else:
        path.write_text(json.dumps(whole, indent=1) if layout == "indented" else json.dumps(whole, separators=(",", ":")))
    return path
