"""How long ``verifier-head`` and ``drafter-check`` take on heads of real size, against one plain read of the target's.

    python scripts/bench_heads.py [--folder DIR] [--rows 163840] [--draft 32000] [--width 7168]

Writes a target head (2.35 GB) and drafter heads (0.46 GB) of the sizes of Kimi-K2, runs each probe in a process of its
own, and prints its time over that of reading the target's head once, and the memory that it took at its peak. Before each
reading the files are dropped from the page cache: a head of that size is not in it when a checkpoint is diagnosed. With
``--warm`` they stay there; then the plain read is a copy within memory, and everything that is computed counts.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.support.checkpoints import mask, offsets, safetensors_file  # noqa: E402

TIMES = 3.0
"""What verifier-head may take, in reads of the target's head."""
MEMORY = 1.5e9
"""Bytes that it may take at its peak."""
_TRIES = 3
"""The fastest counts, of the plain read as well: what else the machine does only adds time."""
_CHILD = """
import json, resource, sys, time
from importlib import import_module
sys.path.insert(0, {root!r})
from remote_diag.testing import RecordingContext
probe = import_module("probes." + {module!r})
begin = time.perf_counter()
context = RecordingContext(".")
probe.run(probe.Params(**{params!r}), context)
print(json.dumps({{"s": time.perf_counter() - begin, "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
                  "codes": [finding.code for finding in context.findings]}}))
"""


def write_head(path: Path, rows: np.ndarray, mapping: np.ndarray | None, vocab: int, width: int) -> None:
    """Write a checkpoint whose head has the rows that the tokens ``rows`` have in the target; bfloat16, made by id."""
    path.mkdir(parents=True, exist_ok=True)
    tensors = {} if mapping is None else {"d2t": offsets(mapping), "t2d": mask(mapping, vocab)}
    size = len(rows) * width * 2
    header = {"lm_head.weight": {"dtype": "BF16", "shape": [len(rows), width], "data_offsets": [0, size]}}
    for name, array in tensors.items():
        dtype = "I64" if name == "d2t" else "BOOL"
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [size, size + array.nbytes]}
        size += array.nbytes
    with (path / "model.safetensors").open("wb") as file:
        file.write(safetensors_file(header))
        pool = np.random.default_rng(0).normal(size=1 << 20).astype(np.float32)
        for start in range(0, len(rows), 1024):
            ids = rows[start : start + 1024]
            # Each row is a stretch of one pool of numbers, at a place that only its id decides.
            places = (ids * 7919 % (len(pool) - width))[:, None] + np.arange(width)
            file.write((pool[places].view(np.uint32) >> 16).astype("<u2").tobytes())
        for array in tensors.values():
            file.write(array.tobytes())
    (path / "config.json").write_text(json.dumps({"vocab_size": vocab, "hidden_size": width}))


def drop(folder: Path) -> None:
    """Have the system forget what it holds of the files below ``folder``."""
    for path in folder.rglob("*.safetensors"):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_once(path: Path) -> float:
    """Return the seconds that one read of a file takes, in pieces that are kept as arrays are."""
    begin = time.perf_counter()
    with path.open("rb", buffering=0) as file:
        kept = b""
        while piece := file.read(1 << 25):
            kept = piece
    assert kept
    return time.perf_counter() - begin


def run(module: str, params: dict[str, str]) -> dict[str, float]:
    """Run a probe in a process of its own."""
    code = _CHILD.format(root=str(ROOT), module=module, params=params)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    answer: dict[str, float] = json.loads(done.stdout)
    return answer


def main() -> int:
    """Measure, print, and return 1 when a limit is not kept."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="Where to write 4 GB; a temporary folder by default.")
    parser.add_argument("--rows", type=int, default=163_840, help="Rows of the target's head.")
    parser.add_argument("--draft", type=int, default=32_000, help="Rows of the drafter's.")
    parser.add_argument("--width", type=int, default=7168, help="Columns of both.")
    parser.add_argument("--warm", action="store_true", help="Leave the files in the page cache.")
    given = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="rdiag-heads-", dir=given.folder))
    try:
        return measure(folder, given.rows, given.draft, given.width, warm=given.warm)
    finally:
        shutil.rmtree(folder)


def measure(folder: Path, vocab: int, draft: int, width: int, *, warm: bool) -> int:
    """Write the heads, run the probes on them, print the table."""
    random = np.random.default_rng(1)
    ids = np.sort(random.choice(vocab, draft, replace=False))
    other = np.sort(random.choice(vocab, draft, replace=False))
    write_head(folder / "target", np.arange(vocab), None, vocab, width)
    drafters = {"a copy, its own mapping": (ids, ids), "a copy, another mapping": (ids, other), "by frequency": (random.permutation(ids),) * 2}
    for name, (rows, mapping) in drafters.items():
        write_head(folder / name, rows, mapping, vocab, width)
    os.sync()
    head = folder / "target" / "model.safetensors"
    times = []
    for _ in range(_TRIES):
        if not warm:
            drop(folder)
        times.append(read_once(head))
    once = min(times)
    print(f"one {'warm' if warm else 'cold'} read of the target's head, {head.stat().st_size / 1e9:.2f} GB: {once:.2f} s\n")
    failed = False
    for name in drafters:
        for module in ("verifier_head", "drafter_check"):
            params = {"drafter": str(folder / name), "target": str(folder / "target")}
            tries = []
            for _ in range(_TRIES):
                if not warm:
                    drop(folder)
                tries.append(run(module, params))
            found = min(tries, key=lambda one: one["s"])
            over = module == "verifier_head" and (found["s"] > TIMES * once or found["peak"] > MEMORY)
            failed |= over
            print(f"{module:14} {name:24} {found['s']:6.2f} s  {found['s'] / once:5.2f} reads  {found['peak'] / 1e9:5.2f} GB"
                  f"{'  OVER' if over else ''}  {' '.join(code for code in found['codes'] if 'head' in code)}")  # type: ignore[attr-defined]
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
