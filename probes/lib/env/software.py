"""torch, CUDA and NCCL as they are installed, asked in processes of their own.

torch is imported with no GPU visible, and nothing is called that would start CUDA: no context, no memory on a GPU. A
child that crashes or hangs costs its answer, nothing else.
"""

from __future__ import annotations

import json
import os
import re
import select
import signal
import subprocess
import sys
from dataclasses import dataclass
from time import monotonic

from probes.lib.env.variables import without_secrets

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

TORCH_SECONDS = 60.0
"""Importing torch takes 2 to 30 s, the more on a cold network file system."""
LIBRARY_SECONDS = 10.0
MAX_LIBRARIES = 8
_MAX_OUTPUT = 1 << 16
PACKAGES = (
    "torch", "triton", "numpy", "safetensors", "transformers", "accelerate", "datasets", "deepspeed", "peft", "vllm", "sglang",
    "sgl-kernel", "sglang-kernel", "flash-attn", "flash-attn-4", "flashinfer-python", "flashinfer-cubin", "xformers", "apex",
    "transformer-engine", "bitsandbytes", "speculators", "specforge", "nvidia-modelopt", "ray", "mpi4py", "nvidia-ml-py", "pynvml",
    "nvidia-nccl-cu11", "nvidia-nccl-cu12", "nvidia-nccl-cu13", "nvidia-cuda-runtime-cu12", "nvidia-cuda-runtime",
    "nvidia-cudnn-cu12", "nvidia-cudnn-cu13", "nvidia-cublas-cu12", "nvidia-cublas", "nvidia-nvshmem-cu12", "nvidia-nvshmem-cu13",
    "cuda-python", "cupy-cuda12x", "cupy-cuda13x",
)  # fmt: skip

_TORCH = """
import json, sys
sys.path[:] = sys.argv[2:]
import torch
said = {"version": str(torch.__version__), "cuda": torch.version.cuda, "hip": getattr(torch.version, "hip", None),
        "git": torch.version.git_version, "path": torch.__file__, "arch_list": [], "cudnn": None, "nccl": None}
flags = getattr(torch._C, "_cuda_getArchFlags", None)
if flags is not None:
    said["arch_list"] = (flags() or "").split()
for name, ask in (("nccl", "_nccl_version"), ("cudnn", "_cudnn")):
    try:
        value = getattr(torch._C, ask)
        said[name] = value() if name == "nccl" else value.getVersionInt()
    except Exception:
        pass
with open("/proc/self/maps") as maps:
    said["loaded"] = sorted({line.split(None, 5)[5].strip() for line in maps if "libnccl.so" in line})
with open(int(sys.argv[1]), "w") as out:
    json.dump(said, out)
"""
_NCCL = """
import ctypes, json, sys
number = ctypes.c_int()
status = ctypes.CDLL(sys.argv[2]).ncclGetVersion(ctypes.byref(number))
with open(int(sys.argv[1]), "w") as out:
    json.dump({"version": number.value, "status": status}, out)
"""
_DRIVER = """
import ctypes, json, sys
number = ctypes.c_int()
status = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(number))
with open(int(sys.argv[1]), "w") as out:
    json.dump({"version": number.value, "status": status}, out)
"""
_IN_NAME = re.compile(r"libnccl\.so\.(\d+\.\d+\.\d+)")


@dataclass(frozen=True)
class Answer:
    """What a child said."""

    values: dict[str, Any] | None
    """None where it failed."""
    error: str | None
    """Why it failed."""


@dataclass(frozen=True)
class Library:
    """One libnccl."""

    path: str
    origin: str
    """wheel, LD_LIBRARY_PATH, LD_PRELOAD, system."""
    version: str | None
    error: str | None


def ask_torch(seconds: float, env: dict[str, str]) -> Answer:
    """Return what torch says of itself: version, cuda, arch_list, nccl, the libnccl that it loaded."""
    return _child(_TORCH, [path for path in sys.path if path], seconds, env)


def ask_driver(seconds: float, env: dict[str, str]) -> Answer:
    """Return the CUDA version that the driver supports; cuDriverGetVersion needs no cuInit and starts nothing."""
    return _child(_DRIVER, [], seconds, env)


def nccl_libraries(env: dict[str, str], loaded: list[str], seconds: float) -> list[Library]:
    """Return every libnccl.so.2 that a program might load, the ones that win first."""
    found: dict[str, tuple[str, str]] = {}

    def add(path: str, origin: str) -> None:
        if os.path.isfile(path):
            found.setdefault(os.path.realpath(path), (path, origin))

    for path in re.split(r"[\s:]+", env.get("LD_PRELOAD", "")):
        if "libnccl" in path:
            add(path, "LD_PRELOAD")
    for folder in env.get("LD_LIBRARY_PATH", "").split(":"):
        if folder:
            add(os.path.join(folder, "libnccl.so.2"), "LD_LIBRARY_PATH")
    for folder in sys.path:
        add(os.path.join(folder, "nvidia", "nccl", "lib", "libnccl.so.2"), "wheel")
    for path in loaded:
        add(path, "loaded by torch")
    for folder in (
        "/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64", "/usr/lib", "/usr/local/lib",
        "/usr/local/cuda/lib64", "/usr/local/nccl/lib", "/opt/nccl/build/lib",
    ):  # fmt: skip
        add(os.path.join(folder, "libnccl.so.2"), "system")
    libraries = []
    until = monotonic() + seconds
    for real, (path, origin) in list(found.items())[:MAX_LIBRARIES]:
        left = min(LIBRARY_SECONDS, until - monotonic())
        answer = _child(_NCCL, [path], left, env) if left > 0 else Answer(None, "no time was left to ask it")
        version, error = None, answer.error
        if answer.values is not None and answer.values.get("status") == 0:
            version = nccl_version(answer.values.get("version"))
        if version is None:
            named = _IN_NAME.search(os.path.basename(real))
            version = named[1] if named else None
        libraries.append(Library(path, origin, version, error if version is None else None))
    return libraries


def nccl_version(code: object) -> str | None:
    """Return NCCL's version: 22809 is 2.28.9; up to 2.8 the code was major * 1000 + minor * 100 + patch."""
    if type(code) is not int or code <= 0:
        return None
    major, rest = divmod(code, 10000) if code >= 10000 else divmod(code, 1000)
    return "%d.%d.%d" % (major, rest // 100, rest % 100)


def torch_nccl_version(code: object) -> str | None:
    """Return the version that torch was built with; newer releases pack it as major << 32 | minor << 16 | patch."""
    if type(code) is not int or code <= 0:
        return None
    if code >= 1 << 32:
        return "%d.%d.%d" % (code >> 32, code >> 16 & 0xFFFF, code & 0xFFFF)
    return nccl_version(code)


def cuda_version(code: object) -> str | None:
    """Return 12.8 for 12080."""
    return "%d.%d" % (code // 1000, code % 1000 // 10) if type(code) is int and code > 0 else None


def packages() -> dict[str, str]:
    """Return name -> version of the installed packages that matter, from their metadata: nothing is imported."""
    from importlib import metadata

    found = {}
    for name in PACKAGES:
        try:
            version = metadata.version(name)
        except Exception:  # noqa: BLE001, S112 - damaged metadata raises whatever its parser raises
            continue
        if isinstance(version, str):
            found[name] = version[:100]
    return found


def _child(code: str, arguments: list[str], seconds: float, env: dict[str, str]) -> Answer:
    reading, writing = os.pipe()
    command = [sys.executable, "-I", "-S", "-c", code, str(writing), *arguments]
    try:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, pass_fds=(writing,),
            env={**env, "CUDA_VISIBLE_DEVICES": ""}, start_new_session=True,
        )  # fmt: skip
    except OSError as error:
        os.close(reading)
        os.close(writing)
        return Answer(None, "no process could be started: %s" % error.strerror)
    os.close(writing)
    assert process.stderr is not None  # noqa: S101
    errors = process.stderr.fileno()
    try:
        output = _both({reading: b"", errors: b""}, monotonic() + seconds)
    finally:
        os.close(reading)
        ended = _end(process)
        process.stderr.close()
    if output is None:
        return Answer(None, "it did not answer within %.0f s" % seconds)
    try:
        values = json.loads(output[reading].decode("utf-8"))
    except ValueError:
        lines = output[errors].decode("utf-8", "backslashreplace").strip().splitlines()
        how = "ended by signal %d" % -ended if ended is not None and ended < 0 else "ended without an answer"
        return Answer(None, (without_secrets(lines[-1][:2000])[:300] if lines and (ended or 0) >= 0 else how))
    return Answer(values, None) if isinstance(values, dict) else Answer(None, "it answered nonsense")


def _both(pipes: dict[int, bytes], until: float) -> dict[int, bytes] | None:
    """Return everything that comes out of some pipes; None when they are not closed in time."""
    opened = set(pipes)
    while opened:
        left = until - monotonic()
        ready, _, _ = select.select(list(opened), [], [], max(0.0, left))
        if not ready:
            return None
        for pipe in ready:
            data = os.read(pipe, 1 << 16)
            if not data:
                opened.discard(pipe)
            elif len(pipes[pipe]) < _MAX_OUTPUT:
                pipes[pipe] += data
    return pipes


def _end(process: subprocess.Popen[bytes]) -> int | None:
    """End the child's whole group; return its status, None if it cannot be ended (it is not waited for)."""
    try:
        status = process.wait(0.5)
    except subprocess.TimeoutExpired:
        status = None
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return status
    if status is None:
        try:
            return process.wait(0.5)
        except subprocess.TimeoutExpired:
            return None
    return status
