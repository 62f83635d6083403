"""comm-share beside json.load, on a trace of 2 GB: seconds and peak memory of a process of its own each.

The trace is a synthetic one, a tenth of its events kernels, in a layout of libkineto or another one. The share must come out
exactly; then these must hold: peak below 300 MB, and no slower than json.load. With ``--rounds`` both run in turn, so
that what else the machine does meets both; the medians count.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from tests.support import profiler_traces as traces  # noqa: E402

MEMORY_LIMIT = 300e6
STEP_US = 1000.0
SHARE = 0.5


LAYOUTS = ("kineto", "kineto-old", "compact", "indented", "last", "gzip")
"""kineto: one key a line, today's; kineto-old: several a line; compact: one line; indented: json.dump's indent=1; last:
compact, and what is beside the events comes before them; gzip: kineto, compressed."""
KINDS = ("all", "gpu", "tiny")
"""all: nine of ten events are of the CPU; gpu: kernels only; tiny: short kernels of NCCL that record nothing, only."""


def step_events(number: int, kind: str) -> Iterator[dict[str, Any]]:
    """Yield the events of one step: half of it is all-reduce, a quarter of that behind computation if there is any."""
    begin = number * STEP_US
    if kind == "tiny":
        yield traces.annotation(f"ProfilerStep#{number}", begin, STEP_US)
        for place in range(100):
            event = traces.kernel("ncclDevKernel_AllReduce", begin + 10 * place, 5)
            yield {**event, "args": {"device": 0}}
        return
    cpu_events = 180 if kind == "all" else 0
    yield traces.annotation(f"ProfilerStep#{number}", begin, STEP_US)
    for place in range(cpu_events):
        yield traces.operator(begin + place, 0.9, f"aten::op_{place % 50}")
    for place in range(10):
        yield traces.all_reduce(begin + 100 * place, 50, elements=16384)
        yield traces.kernel(traces.GEMM, begin + 100 * place + 37.5, 40)


def write(path: Path, size: int, layout: str, kind: str) -> tuple[int, int]:
    """Write a trace of ``size`` bytes of JSON, and return them and its steps."""
    steps = written = 0
    with gzip.open(path, "wt", encoding="utf-8", compresslevel=1) if layout == "gzip" else path.open("w", encoding="utf-8") as file:
        begin, separator, end = _frame(layout)
        written += file.write(begin)
        while written < size:
            texts = (_text(event, layout) for event in step_events(steps, kind))
            written += file.write((separator if steps else "") + separator.join(texts))
            steps += 1
        written += file.write(end)
    return written, steps


def _frame(layout: str) -> tuple[str, str, str]:
    """Return what stands before, between and behind the events."""
    if layout in {"compact", "last"}:
        properties = '"schemaVersion": 1, "traceName": "t"'
        return ("{" + properties + ', "traceEvents": [', ",", "]}") if layout == "last" else ('{"traceEvents": [', ",", "], " + properties + "}")
    if layout == "indented":
        return '{\n "schemaVersion": 1,\n "traceEvents": [\n', ",\n", '\n ],\n "traceName": "t"\n}\n'
    return '{\n  "schemaVersion": 1,\n  "traceEvents": [\n', ",\n", '\n  ],\n  "traceName": "t"\n}\n'


def _text(event: dict[str, Any], layout: str) -> str:
    if layout in {"compact", "last"}:
        return json.dumps(event)
    if layout == "indented":
        return "  " + json.dumps(event, indent=1).replace("\n", "\n  ")
    return traces.kineto_event(event, lines=layout != "kineto-old")


def share_of(path: Path) -> float:
    """Return what the probe says."""
    from probes import comm_share
    from remote_diag.testing import RecordingContext

    with tempfile.TemporaryDirectory() as folder:
        context = RecordingContext(folder, seconds=3600)
        result = comm_share.run(comm_share.Params(path=str(path)), context)
    (device,) = result.devices
    assert result.complete
    assert device.step_us == device.steps * STEP_US
    assert abs(device.overlapped_us - (device.communication_us / 4 if device.compute_us else 0.0)) < 1e-3
    return device.communication_share


def load(path: Path) -> float:
    """Read it the plain way; returns a number so that both are alike."""
    with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as file:
        return float(len(json.load(file)["traceEvents"]))


def measured(job: Callable[[Path], float], path: Path) -> tuple[float, float, float]:
    """Return what ``job`` returns, its seconds and its peak memory in bytes; in a child of its own."""
    receiving, sending = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            begun = time.monotonic()
            value = job(path)
            seconds = time.monotonic() - begun
            # The peak since this program started, not that of whoever started it.
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
            os.write(sending, json.dumps([value, seconds, peak]).encode())
            code = 0
        finally:
            os._exit(code)
    os.close(sending)
    with os.fdopen(receiving, "rb") as pipe:
        answer = pipe.read()
    _, status = os.waitpid(child, 0)
    if status or not answer:
        raise SystemExit(f"bench: {job.__name__} ended with wait status {status}")
    value, seconds, peak = json.loads(answer)
    return value, seconds, peak


def main() -> int:
    """Measure, print, and return 1 if an aim is missed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--bytes", type=float, default=2e9, help="size of the trace (2e9)")
    parser.add_argument("--layout", choices=LAYOUTS, default="kineto", help="how the file is laid out (kineto: today's)")
    parser.add_argument("--kind", choices=KINDS, default="all", help="gpu: kernels only; tiny: short kernels of NCCL only")
    parser.add_argument("--rounds", type=int, default=1, help="how often both read it, in turn (1)")
    parser.add_argument("--no-json", action="store_true", help="leave json.load out, which takes six times the size in memory")
    parser.add_argument("--folder", default=None, help="where the trace is written")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        path = Path(folder) / ("trace.json.gz" if options.layout == "gzip" else "trace.json")
        size, steps = write(path, int(options.bytes), options.layout, options.kind)
        print(f"{size / 1e9:.2f} GB of JSON, {steps:,} steps, layout {options.layout}, events {options.kind}", flush=True)
        runs = [(measured(share_of, path), None if options.no_json else measured(load, path)) for _ in range(options.rounds)]
    value, seconds, peak = (statistics.median(ours[column] for ours, _ in runs) for column in range(3))
    print(f"comm-share  {seconds:7.1f} s  {size / seconds / 1e6:6.0f} MB/s  peak {peak / 1e6:7.0f} MB  share {value:.6f}")
    missed = [name for name, bad in (("share", abs(value - SHARE) > 1e-9), ("memory", peak > MEMORY_LIMIT)) if bad]
    if not options.no_json:
        plain_seconds, plain_peak = (statistics.median(plain[column] for _, plain in runs if plain) for column in (1, 2))
        print(
            f"json.load   {plain_seconds:7.1f} s  {size / plain_seconds / 1e6:6.0f} MB/s  peak {plain_peak / 1e6:7.0f} MB\n"
            f"comm-share takes {seconds / plain_seconds:.2f} of the time and {peak / plain_peak:.3f} of the memory"
        )
        missed += ["time"] if seconds > plain_seconds else []
    print("missed: " + ", ".join(missed) if missed else "all aims are met")
    return 1 if missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
