"""vocab-remap and verifier-head on heads as large as real ones, beside the least that anybody could do: copy, read.

A drafter with a bfloat16 head of 32,000 x 7,168 (459 MB) is given another mapping; 6,250 of its rows come from a target's
head of 163,840 x 7,168 (2.35 GB); once with nothing but its head and mapping, once whole (2.1 GB). Times are those of the
whole command, from its start to its end, on this machine as the host, in turn with ``cp`` of the drafter and one read of
the target's head. Remapping is measured as ``cp`` is, with everything in the page cache; heads are compared and read with
nothing of them in it, as the first time that somebody asks.
"""

from __future__ import annotations

import json
import math
import os
import resource
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.support import mission
from tests.support.checkpoints import mask, offsets, safetensors_file

from .aims import Aim
from .clock import Broken, Times, usual_environment
from .contenders import rdiag_env, rdiag_program

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


def random_rows(columns: int) -> Block:
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
    begin = write_checkpoint(folder / "target" / WEIGHTS, {"lm_head.weight": (*head, random_rows(HIDDEN))})

    def cut(start: int, stop: int) -> Bits:
        # Not mapped: what is mapped here would count as memory of the processes that are started from here.
        found = np.empty((stop - start, HIDDEN), np.uint16)
        with (folder / "target" / WEIGHTS).open("rb", buffering=0) as file:
            for number, token in enumerate(a[start:stop].tolist()):
                file.seek(begin + token * HIDDEN * 2)
                file.readinto(found[number].data.cast("B"))
        return found

    own = {"lm_head.weight": (len(a), HIDDEN, cut)}
    body = {f"midlayer.{name}.weight": (*shape, random_rows(shape[1])) for name, shape in BODY.items()}
    mapping = {"d2t": offsets(a), "t2d": mask(a, mission.VOCAB)}
    write_checkpoint(folder / "bare" / WEIGHTS, own, **mapping)
    write_checkpoint(folder / "whole" / WEIGHTS, {**body, **own}, **mapping)
    sizes = {"vocab_size": mission.VOCAB, "hidden_size": HIDDEN}
    for name, config in (("target", sizes), *((name, {**sizes, "draft_vocab_size": len(a)}) for name in ("bare", "whole"))):
        (folder / name / "config.json").write_text(json.dumps(config))
    np.savez(folder / "b.npz", d2t=offsets(b), t2d=mask(b, mission.VOCAB))


@dataclass(frozen=True)
class Measured:
    """What was seen."""

    times: dict[str, Times]
    memory_bytes: int
    """Largest resident memory of any process that was started."""

    def as_dict(self) -> dict[str, Any]:
        """Return the object that --json prints."""
        times = {name: one.as_dict() for name, one in self.times.items()}
        return {"contenders": times, "memory_bytes": self.memory_bytes}


def measure(directory: Path, rounds: int, tell: Callable[[str], None]) -> Measured:
    """Return the times of everything, from files that are written for it: 7 GB below ``directory`` for a while."""
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="heads-", dir=directory) as place:
        folder = Path(place)
        tell("writing drafters of 0.46 and 2.1 GB, and a target's head of 2.35 GB")
        make_files(folder)
        entrants = contenders(folder)
        times = {name: Times() for name in entrants}
        for number in range(rounds + 1):
            # The first round installs rdiag's bundle.
            tell(f"round {number} of {rounds}" if number else "once without the clock")
            for name, (prepare, work) in entrants.items():
                prepare()
                wall, cpu = timed(work)
                if number:
                    times[name].wall.append(wall)
                    times[name].cpu.append(cpu)
                clear(folder / "out")
    return Measured(times, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024)


def run_rdiag(folder: Path, *arguments: str) -> dict[str, Any]:
    """Run a command and return its JSON."""
    ran = subprocess.run(
        [rdiag_program(), *arguments, "--json"], cwd=folder, env={**usual_environment(), **rdiag_env(folder / "rdiag")},
        stdin=subprocess.DEVNULL, capture_output=True, check=False,
    )  # fmt: skip
    if ran.returncode not in (0, 1):
        raise Broken(f"rdiag {' '.join(arguments)} ended with {ran.returncode}: {ran.stderr.decode()}")
    answer: dict[str, Any] = json.loads(ran.stdout)
    return answer


def timed(work: Callable[[], object]) -> tuple[float, float]:
    """Return the (wall, processor) time that ``work`` takes, its processes included; seconds."""
    before, start = os.times(), perf_counter()
    work()
    wall, after = perf_counter() - start, os.times()
    return wall, sum(after[:4]) - sum(before[:4])


def clear(path: Path) -> None:
    """Remove a file or folder."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def sync() -> None:
    """Wait until nothing is left to be written, so that nobody pays for what others wrote."""
    subprocess.run(["sync"], check=True)


def forget(*paths: Path) -> None:
    """Take files out of the page cache."""
    sync()
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def contenders(folder: Path) -> dict[str, tuple[Callable[[], None], Callable[[], None]]]:
    """Return (what is done before the clock starts, what is measured) by name."""
    out, target = folder / "out", folder / "target"

    def copy(drafter: str, *, to_disk: bool) -> None:
        subprocess.run(["cp", str(folder / drafter / WEIGHTS), str(out)], check=True)
        if to_disk:
            subprocess.run(["sync", str(out)], check=True)

    def remap(drafter: str) -> None:
        names = ("--mapping", str(folder / "b.npz"), "--verifier", str(target), "--out", str(out))
        result = run_rdiag(folder, "vocab-remap", str(folder / drafter), *names)["result"]
        if (result["rows_moved"], result["rows_initialised"]) != (mission.SHARED, mission.WITHOUT_SOURCE):
            raise Broken(f"wrong rows: {result}")

    def compare() -> None:
        if run_rdiag(folder, "verifier-head", str(folder / "bare"), "--target", str(target))["result"]["exact"] is not True:
            raise Broken("verifier-head did not find the rows")

    def read() -> None:
        with (target / WEIGHTS).open("rb", buffering=0) as file:
            while file.read(_READ):
                pass

    cold = partial(forget, folder / "bare" / WEIGHTS, target / WEIGHTS)
    found: dict[str, tuple[Callable[[], None], Callable[[], None]]] = {}
    for drafter in ("bare", "whole"):
        found[f"cp, {drafter}"] = sync, partial(copy, drafter, to_disk=False)
        found[f"cp and sync, {drafter}"] = sync, partial(copy, drafter, to_disk=True)
        found[f"rdiag vocab-remap, {drafter}"] = sync, partial(remap, drafter)
    found["cp, target's head"] = sync, partial(copy, "target", to_disk=False)
    found["read the target's head"] = cold, read
    found["rdiag verifier-head"] = cold, compare
    found["read the target's head again"] = sync, read
    found["rdiag verifier-head again"] = sync, compare
    return found


def aims(measured: Measured) -> list[Aim]:
    """Return the aims; those without a limit are told, not aimed at: there the start of two Pythons weighs most."""

    def ratio(ours: str, theirs: str, limit: float) -> Aim:
        return Aim(f"{ours} / {theirs}", measured.times[ours].median / measured.times[theirs].median, limit)

    return [
        ratio("rdiag vocab-remap, whole", "cp, whole", REMAP_AIM),
        ratio("rdiag vocab-remap, whole", "cp and sync, whole", REMAP_AIM),
        ratio("rdiag vocab-remap, bare", "cp, target's head", REMAP_AIM),
        ratio("rdiag vocab-remap, bare", "cp, bare", math.inf),
        ratio("rdiag vocab-remap, bare", "cp and sync, bare", math.inf),
        ratio("rdiag verifier-head", "read the target's head", VERIFIER_AIM),
        ratio("rdiag verifier-head again", "read the target's head again", math.inf),
        Aim("memory of the largest process", measured.memory_bytes / 1e9, MEMORY_AIM / 1e9, "GB"),
    ]
