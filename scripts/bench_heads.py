"""vocab-remap and verifier-head on heads as large as real ones, beside the least that anybody could do: copy, read.

A drafter with a bfloat16 head of 32,000 x 7,168 (459 MB) is given another mapping; 6,250 of its rows come from a target
head of 163,840 x 7,168 (2.35 GB); once with nothing but its head and mapping, once whole (2.1 GB). Times are those of the whole command, from its start to its end, on this machine as
the host, in turn with ``cp`` of the drafter and one read of the target's head. The page cache is warm for all of them.
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

ROOT = Path(__file__).resolve().parents[1]
for folder in (ROOT, ROOT / "scripts"):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

from benchlib.aims import Aim  # noqa: E402
from tests.support import mission  # noqa: E402
from tests.support.checkpoints import mask, offsets, safetensors_file  # noqa: E402
from tests.support.cli import command, environment  # noqa: E402

HIDDEN = 7168
BODY = {
    "fc": (HIDDEN, 3 * HIDDEN), "self_attn.q_proj": (8192, 2 * HIDDEN), "self_attn.k_proj": (8192, 2 * HIDDEN),
    "self_attn.v_proj": (8192, 2 * HIDDEN), "self_attn.o_proj": (HIDDEN, 8192), "mlp.gate_proj": (12288, HIDDEN),
    "mlp.up_proj": (12288, HIDDEN), "mlp.down_proj": (HIDDEN, 12288),
}  # fmt: skip
"""The rest of a drafter for a target of that width."""
WEIGHTS = "model.safetensors"
REMAP_AIM, MEMORY_AIM, VERIFIER_AIM = 2.0, 1.5e9, 3.0
_READ = 8 << 20

Bits = NDArray[np.uint16]
Block = Callable[[int, int], Bits]


def tell(text: str) -> None:
    """Say how far it is."""
    print(f"bench: {text}", file=sys.stderr, flush=True)


def write_checkpoint(path: Path, matrices: Mapping[str, tuple[int, int, Block]], **small: Any) -> int:
    """Write a safetensors file.

    Args:
        path: the file.
        matrices: of bfloat16; rows, columns, and what returns the bits of rows from one up to another.
        small: written behind them.

    Returns:
        where in the file the first matrix begins.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (rows, columns, _) in matrices.items():
        size = rows * columns * 2
        header[name] = {"dtype": "BF16", "shape": [rows, columns], "data_offsets": [end, end + size]}
        end += size
    for name, array in small.items():
        word = {"int64": "I64", "bool": "BOOL"}[array.dtype.name]
        header[name] = {"dtype": word, "shape": list(array.shape), "data_offsets": [end, end + array.nbytes]}
        end += array.nbytes
    begin = safetensors_file(header)
    with path.open("wb") as file:
        file.write(begin)
        for rows, _, block in matrices.values():
            for start in range(0, rows, 1024):
                file.write(block(start, min(rows, start + 1024)).tobytes())
        for array in small.values():
            file.write(array.tobytes())
    return len(begin)


def random(columns: int) -> Block:
    """Return what makes rows of plausible size: sign and fraction at random, between 2^-8 and 2^-5."""
    choose = np.random.default_rng(1)

    def block(start: int, stop: int) -> Bits:
        bits: Bits = choose.integers(0, 1 << 16, (stop - start, columns), np.uint16)
        bits &= np.uint16(0x80FF)
        bits |= np.uint16(0x3C00)
        return bits

    return block


def make_files(folder: Path) -> None:
    """Write a target, two drafters whose head was made from the target's (bare, and whole), and another mapping."""
    a, b = mission.mappings()
    for name in ("bare", "whole", "target"):
        (folder / name).mkdir()
    head = mission.VOCAB, HIDDEN
    begin = write_checkpoint(folder / "target" / WEIGHTS, {"lm_head.weight": (*head, random(HIDDEN))})

    def cut(start: int, stop: int) -> Bits:
        # Not mapped: what is mapped here would count as memory of the processes that are started from here.
        found = np.empty((stop - start, HIDDEN), np.uint16)
        with (folder / "target" / WEIGHTS).open("rb", buffering=0) as file:
            for number, token in enumerate(a[start:stop].tolist()):
                file.seek(begin + token * HIDDEN * 2)
                file.readinto(found[number].data.cast("B"))
        return found

    own = {"lm_head.weight": (len(a), HIDDEN, cut)}
    body = {f"midlayer.{name}.weight": (*shape, random(shape[1])) for name, shape in BODY.items()}
    mapping = {"d2t": offsets(a), "t2d": mask(a, mission.VOCAB)}
    write_checkpoint(folder / "bare" / WEIGHTS, own, **mapping)
    write_checkpoint(folder / "whole" / WEIGHTS, {**body, **own}, **mapping)
    sizes = {"vocab_size": mission.VOCAB, "hidden_size": HIDDEN}
    for name, config in (("target", sizes), *((name, {**sizes, "draft_vocab_size": len(a)}) for name in ("bare", "whole"))):
        (folder / name / "config.json").write_text(json.dumps(config))
    np.savez(folder / "b.npz", d2t=offsets(b), t2d=mask(b, mission.VOCAB))

def run_rdiag(folder: Path, *arguments: str) -> dict[str, Any]:
    """Run a command and return its JSON."""
    ran = subprocess.run(
        command(*arguments, "--json"), cwd=folder, env=environment(folder / "home"), stdin=subprocess.DEVNULL,
        capture_output=True, check=False,
    )  # fmt: skip
    if ran.returncode not in (0, 1):
        raise SystemExit(f"rdiag {' '.join(arguments)} ended with {ran.returncode}: {ran.stderr.decode()}")
    answer: dict[str, Any] = json.loads(ran.stdout)
    return answer


def timed(work: Callable[[], object]) -> float:
    """Return the seconds that ``work`` takes."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def contenders(folder: Path) -> dict[str, Callable[[], None]]:
    """Return what is measured, by name."""
    out, target = folder / "out", folder / "target"

    def copy(drafter: str, *, sync: bool) -> None:
        subprocess.run(["cp", str(folder / drafter / WEIGHTS), str(out)], check=True)
        if sync:
            subprocess.run(["sync", str(out)], check=True)

    def remap(drafter: str) -> None:
        names = ("--mapping", str(folder / "b.npz"), "--verifier", str(target), "--out", str(out))
        result = run_rdiag(folder, "vocab-remap", str(folder / drafter), *names)["result"]
        if (result["rows_moved"], result["rows_initialised"]) != (mission.SHARED, mission.WITHOUT_SOURCE):
            raise SystemExit(f"wrong rows: {result}")

    def read() -> None:
        with (target / WEIGHTS).open("rb", buffering=0) as file:
            while file.read(_READ):
                pass

    found: dict[str, Callable[[], None]] = {"rdiag run hello": lambda: void(run_rdiag(folder, "run", "hello"))}
    for drafter in ("bare", "whole"):
        found[f"cp, {drafter}"] = partial(copy, drafter, sync=False)
        found[f"cp and sync, {drafter}"] = partial(copy, drafter, sync=True)
        found[f"rdiag vocab-remap, {drafter}"] = partial(remap, drafter)
    found["cp, target's head"] = partial(copy, "target", sync=False)
    found["read the target's head"] = read
    found["rdiag verifier-head"] = lambda: void(run_rdiag(folder, "verifier-head", str(folder / "bare"), "--target", str(target)))
    return found


def void(_: object) -> None:
    """Forget a result."""


def measure(folder: Path, rounds: int) -> tuple[dict[str, list[float]], int]:
    """Return (seconds of every contender, largest memory of any process in bytes)."""
    out, entrants = folder / "out", contenders(folder)
    seconds: dict[str, list[float]] = {name: [] for name in entrants}
    for number in range(rounds + 1):
        for name, work in entrants.items():
            subprocess.run(["sync"], check=True)
            taken = timed(work)
            # The first round installs rdiag's bundle and warms every cache.
            if number:
                seconds[name].append(taken)
                tell(f"round {number}: {name}: {taken:.2f} s")
            if out.is_dir():
                shutil.rmtree(out)
            else:
                out.unlink(missing_ok=True)
    return seconds, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024


def report(seconds: dict[str, list[float]], memory: int) -> list[Aim]:
    """Print the times and return the aims."""
    median = {name: statistics.median(values) for name, values in seconds.items()}
    for name, value in median.items():
        values = seconds[name]
        print(f"{name:26} {value:6.2f} s  ({min(values):.2f} to {max(values):.2f})")
    print(f"{'largest process':26} {memory / 1e6:6.0f} MB")

    def ratio(ours: str, theirs: str, limit: float) -> Aim:
        return Aim(f"{ours} / {theirs}", median[ours] / median[theirs], limit)

    return [
        ratio("rdiag vocab-remap, whole", "cp, whole", REMAP_AIM),
        ratio("rdiag vocab-remap, whole", "cp and sync, whole", REMAP_AIM),
        ratio("rdiag vocab-remap, bare", "cp, target's head", REMAP_AIM),
        # Here the start of two Pythons and of numpy weighs most: told, not aimed at.
        ratio("rdiag vocab-remap, bare", "cp, bare", math.inf),
        ratio("rdiag vocab-remap, bare", "cp and sync, bare", math.inf),
        ratio("rdiag verifier-head", "read the target's head", VERIFIER_AIM),
        Aim("memory of the largest process, GB", memory / 1e9, MEMORY_AIM / 1e9),
    ]


def main() -> int:
    """Measure, print, and return 1 when an aim is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=5, help="how often each is measured (default 5)")
    parser.add_argument("--dir", type=Path, help="where to put 7 GB of files for a while (default: the temporary folder)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="rdiag-bench-", dir=arguments.dir) as name:
        folder = Path(name)
        tell("writing drafters of 0.46 and 2.1 GB, and a target's head of 2.35 GB")
        make_files(folder)
        (folder / "home").mkdir(exist_ok=True)
        seconds, memory = measure(folder, max(1, arguments.rounds))
    aims = report(seconds, memory)
    for aim in aims:
        verdict = "no aim" if math.isinf(aim.limit) else f"aim at most {aim.limit:g}: {'met' if aim.met else 'MISSED'}"
        print(f"{aim.what:52} {aim.value:5.2f}  {verdict}")
    return 0 if all(aim.met for aim in aims) else 1


if __name__ == "__main__":
    sys.exit(main())
