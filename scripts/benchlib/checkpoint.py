"""``vocab-compare`` on checkpoints of 2 GB: how much of them is read, whether torch is imported, how long it takes."""

from __future__ import annotations

import json
import re
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .aims import Aim
from .clock import usual_environment
from .contenders import rdiag_env, rdiag_program

HIDDEN = 7168
TARGET = 163_840
_READS = re.compile(r"\b(?:read|pread64|readv|preadv2?|copy_file_range|sendfile)\(\d+<(?P<path>[^>]*)>.*= (?P<size>\d+)$")
_MAPS = re.compile(r"\bmmap\([^,]+, (?P<size>\d+),.*, \d+<(?P<path>[^>]*)>, ")


@dataclass(frozen=True)
class Measured:
    """What was seen, on this machine as the host."""

    checkpoint_bytes: int
    """Size of one checkpoint."""
    read_bytes: int | None
    """Bytes read of the one of which more was read; None without strace."""
    mapped_bytes: int | None
    """Bytes mapped into memory; None without strace."""
    torch_imported: bool
    probe_ms: tuple[float, ...]
    """From the request to the last frame, each round."""
    imports_ms: tuple[float, ...]
    """``python -c "import numpy, safetensors"``, each round."""

    @property
    def probe(self) -> float:
        """Median, milliseconds."""
        return statistics.median(self.probe_ms)

    @property
    def imports(self) -> float:
        """Median, milliseconds."""
        return statistics.median(self.imports_ms)

    def as_dict(self) -> dict[str, Any]:
        """Return the object that --json prints."""
        return {**asdict(self), "median_probe_ms": self.probe, "median_imports_ms": self.imports}


def aims(measured: Measured) -> list[Aim]:
    """Return the aims of reading large checkpoints."""
    found = [
        Aim("vocab-compare on the host, beyond 1.5 x import numpy, safetensors",
            measured.probe - 1.5 * measured.imports, 100.0, "ms"),
        Aim("torch imported", float(measured.torch_imported), 0.0, ""),
    ]  # fmt: skip
    if measured.read_bytes is not None and measured.mapped_bytes is not None:
        touched = measured.read_bytes + measured.mapped_bytes
        found.append(Aim("read of a 2 GB checkpoint", touched / 1e6, 4.0, "MB"))
    return found


def measure(mappings: Path, directory: Path, rounds: int, tell: Callable[[str], None]) -> Measured:
    """Make two checkpoints below ``directory`` from the mappings ``a.npz`` and ``b.npz``, and compare them."""
    made = [write(mappings / f"{side}.npz", directory / f"checkpoint-{side}") for side in "ab"]
    try:
        decoy = _write_decoy(directory / "decoy")
        inventory = directory / "local.yaml"
        inventory.write_text(
            "hosts:\n  here:\n    transport: local\n"
            f"    environment: {{python: {json.dumps(sys.executable)}}}\n"
            f"    env: {{PYTHONPATH: {json.dumps(str(decoy.parent.parent))}}}\n"
        )
        inventory.chmod(0o600)
        argv = [str(rdiag_program()), "vocab-compare", *(str(path.parent) for path in made)]
        argv += ["--json", "--host", "here", "-i", str(inventory)]
        env = {**usual_environment(), **rdiag_env(directory / "rdiag")}
        size = made[0].stat().st_size
        _compare(argv, env)  # installs the agent, and fills the cache of the file system
        imported = (decoy.parent / "imported").exists()
        probe, imports = [], []
        for number in range(rounds):
            tell(f"round {number + 1} of {rounds}")
            probe.append(_compare(argv, env)["timing"]["run_s"] * 1000)
            imports.append(_imports())
        counted = _count(argv, env, directory, [str(path) for path in made], tell)
    finally:
        for path in made:
            shutil.rmtree(path.parent)
    read, mapped = (None, None) if counted is None else counted
    return Measured(size, read, mapped, imported, tuple(probe), tuple(imports))


def write(mapping: Path, folder: Path) -> Path:
    """Write a drafter's checkpoint of 2 GB: real d2t and t2d, all other weights a hole in the file."""
    arrays = np.load(mapping)
    d2t, t2d = arrays["d2t"].astype("<i8"), arrays["t2d"].astype("?")
    rows = len(d2t)
    # The order of the safetensors library: wider types first, then by name.
    tensors = [
        ("d2t", "I64", (rows,), 8),
        ("embed_tokens.weight", "BF16", (TARGET, HIDDEN // 2), 2),
        ("lm_head.weight", "BF16", (rows, HIDDEN), 2),
        ("midlayer.mlp.gate_proj.weight", "BF16", (18_432, HIDDEN), 2),
        ("midlayer.mlp.up_proj.weight", "BF16", (18_432, HIDDEN), 2),
        ("t2d", "BOOL", (len(t2d),), 1),
    ]
    header: dict[str, Any] = {}
    offset = 0
    for name, dtype, shape, width in tensors:
        end = offset + width * int(np.prod(shape))
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "model.safetensors"
    start = 8 + len(text)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(start + offset)
        for name, array in (("d2t", d2t), ("t2d", t2d)):
            file.seek(start + header[name]["data_offsets"][0])
            file.write(array.tobytes())
    config = {"draft_vocab_size": rows, "vocab_size": TARGET, "hidden_size": HIDDEN}
    (folder / "config.json").write_text(json.dumps(config))
    return path


def _write_decoy(directory: Path) -> Path:
    """Write a package called torch that leaves a note when it is imported, and make sure that it does."""
    package = directory / "torch"
    shutil.rmtree(directory, ignore_errors=True)
    package.mkdir(parents=True)
    source = package / "__init__.py"
    source.write_text("import pathlib\npathlib.Path(__file__).with_name('imported').touch()\n")
    env = {**usual_environment(), "PYTHONPATH": str(directory)}
    subprocess.run([sys.executable, "-c", "import torch"], env=env, check=True)
    (package / "imported").unlink()
    return source


def _compare(argv: list[str], env: dict[str, str]) -> Any:
    done = subprocess.run(argv, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode != 1:
        raise RuntimeError(f"vocab-compare ended with {done.returncode}, expected 1:\n{done.stderr[-2000:]}")
    answer = json.loads(done.stdout)
    # Ground truth of the two mappings, from an independent computation.
    matches, shared = answer["result"]["positional_matches"], answer["result"]["shared_targets"]
    if (matches, shared) != (132, 21_703):
        raise RuntimeError(f"vocab-compare is wrong: {matches} positional matches, {shared} shared targets")
    return answer


def _imports() -> float:
    started = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import numpy, safetensors"], check=True, stdin=subprocess.DEVNULL, env=usual_environment())
    return (time.perf_counter() - started) * 1000


def _count(
    argv: list[str], env: dict[str, str], directory: Path, paths: list[str], tell: Callable[[str], None]
) -> tuple[int, int] | None:
    """Return the bytes (read, mapped) of the checkpoint of which more was touched, as the kernel was asked for them."""
    if shutil.which("strace") is None:
        tell("strace is not installed: what is read is not counted")
        return None
    trace = directory / "strace.txt"
    calls = "read,pread64,readv,preadv,preadv2,copy_file_range,sendfile,mmap,mmap2"
    known = "?" + ",?".join(calls.split(","))
    _compare(["strace", "-f", "-qq", "-y", "-s", "0", "-e", f"trace={known}", "-o", str(trace), *argv], env)
    read, mapped = dict.fromkeys(paths, 0), dict.fromkeys(paths, 0)
    for line in trace.read_text(errors="replace").splitlines():
        for pattern, totals in ((_READS, read), (_MAPS, mapped)):
            match = pattern.search(line)
            if match and match["path"] in totals:
                totals[match["path"]] += int(match["size"])
    if not all(read[path] + mapped[path] for path in paths):
        tell("the reads were not seen by strace: what is read is not counted")
        return None
    most = max(paths, key=lambda path: read[path] + mapped[path])
    return read[most], mapped[most]
