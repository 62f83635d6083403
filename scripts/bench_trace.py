"""comm-share beside json.load, on a trace of 2 GB: seconds and peak memory of a process of its own each.

The trace is a synthetic one, a tenth of its events kernels, in the layout of libkineto and, with ``--compact``, as one line.
The share must come out exactly; then these must hold: peak below 300 MB, and no slower than json.load.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
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


def step_events(number: int, cpu_events: int) -> Iterator[dict[str, Any]]:
    """Yield the events of one step: half of it is all-reduce, a quarter of that behind computation."""
    begin = number * STEP_US
    yield traces.annotation(f"ProfilerStep#{number}", begin, STEP_US)
    for place in range(cpu_events):
        yield traces.operator(begin + place, 0.9, f"aten::op_{place % 50}")
    for place in range(10):
        yield traces.all_reduce(begin + 100 * place, 50, elements=16384)
        yield traces.kernel(traces.GEMM, begin + 100 * place + 37.5, 40)


def write(path: Path, size: int, *, compact: bool, gpu_only: bool) -> int:
    """Write a trace of ``size`` bytes, and return its steps."""
    steps = 0
    with path.open("w", encoding="utf-8") as file:
        file.write('{"schemaVersion": 1, "traceEvents": [' if compact else '{\n  "schemaVersion": 1,\n  "traceEvents": [\n')
        separator = "," if compact else ",\n"
        first = True
        while file.tell() < size:
            events = step_events(steps, 0 if gpu_only else 180)
            texts = (json.dumps(event) if compact else traces.kineto_event(event, lines=True) for event in events)
            file.write(("" if first else separator) + separator.join(texts))
            first = False
            steps += 1
        file.write('], "traceName": "t"}' if compact else '\n  ],\n  "traceName": "t"\n}\n')
    return steps


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
    assert abs(device.overlapped_us - device.communication_us / 4) < 1e-3
    return device.communication_share


def load(path: Path) -> float:
    """Read it the plain way; returns a number so that both are alike."""
    with path.open(encoding="utf-8") as file:
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
    parser.add_argument("--compact", action="store_true", help="one line, as json.dump writes it")
    parser.add_argument("--gpu-only", action="store_true", help="kernels only: the most that has to be kept")
    parser.add_argument("--no-json", action="store_true", help="leave json.load out, which takes six times the size in memory")
    parser.add_argument("--folder", default=None, help="where the trace is written")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        path = Path(folder) / "trace.json"
        steps = write(path, int(options.bytes), compact=options.compact, gpu_only=options.gpu_only)
        size = path.stat().st_size
        print(f"{size / 1e9:.2f} GB, {steps:,} steps, {'compact' if options.compact else 'kineto'} layout", flush=True)
        value, seconds, peak = measured(share_of, path)
        print(f"comm-share  {seconds:7.1f} s  {size / seconds / 1e6:6.0f} MB/s  peak {peak / 1e6:7.0f} MB  share {value:.6f}", flush=True)
        missed = [name for name, bad in (("share", abs(value - SHARE) > 1e-9), ("memory", peak > MEMORY_LIMIT)) if bad]
        if not options.no_json:
            _, plain_seconds, plain_peak = measured(load, path)
            print(
                f"json.load   {plain_seconds:7.1f} s  {size / plain_seconds / 1e6:6.0f} MB/s  peak {plain_peak / 1e6:7.0f} MB\n"
                f"comm-share takes {seconds / plain_seconds:.2f} of the time and {peak / plain_peak:.3f} of the memory"
            )
            missed += ["time"] if seconds > plain_seconds else []
    print("missed: " + ", ".join(missed) if missed else "all aims are met")
    return 1 if missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
