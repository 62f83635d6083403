"""Python, its packages, and what surrounds it, as probes find them.

The second half of ``rdiag check``: what can only be seen from inside the host's environment (the venv, the conda
prefix, the container). Reads a few files below /proc and /dev, imports numpy and safetensors in a child process, and
reads torch's metadata without importing it. Starts no CUDA context and calls no nvidia-smi.
"""

from __future__ import annotations

import os
import platform
import resource
import subprocess
import sys
import sysconfig
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from remote_diag.findings import Level
    from remote_diag.probe import Context

EFFECTS = ("reads-files", "runs-commands")

IMPORTED = ("numpy", "safetensors")
"""Imported for the check: this takes a fraction of a second."""
REQUIRED = ("numpy",)
"""What shipped probes cannot do without; safetensors files they read by themselves."""
DESCRIBED = ("torch",)
"""Only looked up: importing torch takes seconds and may touch the GPUs."""
UNNEEDED = {
    "safetensors": "the shipped probes read its files without it",
    "torch": "without a GPU only .pt and .bin files need it",
}
IMPORT_SECONDS = 20.0
"""A healthy import is far faster, on a cold network file system too."""
SHM = "/dev/shm"  # noqa: S108 - looked at, never written to
SHM_FLOOR = 1 << 30
SHM_FLOOR_SOURCE = "data loader workers and NCCL share memory there; a container gets 64 MiB unless told otherwise"
SAFE_TORCH = (2, 10)
"""From here on rdiag trusts ``torch.load(weights_only=True)`` with files it did not write."""
TELLING = (
    "CONDA_", "CUDA_", "HF_", "LD_", "LIBRARY_PATH", "MASTER_", "MKL_", "NCCL_", "NVIDIA_", "OMP_", "PYTHON", "PYTORCH_",
    "SLURM_", "TMPDIR", "TORCH", "TRANSFORMERS_", "TRITON_", "VIRTUAL_ENV", "XDG_CACHE_HOME", "http", "no_proxy",
)  # fmt: skip

_IMPORT = "import sys; sys.path[:] = sys.argv[2:]; module = __import__(sys.argv[1]); print(getattr(module, '__version__', ''))"
_LIMITS = {
    "open_files": "RLIMIT_NOFILE",
    "processes": "RLIMIT_NPROC",
    "locked_memory_bytes": "RLIMIT_MEMLOCK",
    "core_file_bytes": "RLIMIT_CORE",
    "file_bytes": "RLIMIT_FSIZE",
    "address_space_bytes": "RLIMIT_AS",
}


@dataclass(frozen=True)
class Params:
    """What the host is expected to have."""

    __pydantic_config__ = {"extra": "forbid", "allow_inf_nan": False, "use_attribute_docstrings": True}

    gpus: int | None = None
    """How many GPUs there should be; None where nobody said."""

    def __post_init__(self) -> None:
        """Check the count."""
        if self.gpus is not None and self.gpus < 0:
            raise ValueError("gpus must not be negative")


@dataclass(frozen=True)
class Package:
    """One Python package."""

    __pydantic_config__ = {"extra": "forbid", "allow_inf_nan": False, "use_attribute_docstrings": True}

    version: str | None
    """Version in the installed metadata; None where there is none."""
    found: bool
    """Whether a module of this name is on the path."""
    imported: bool | None
    """Whether importing it worked; None where that was not tried."""
    error: str | None
    """The last line of what went wrong."""


@dataclass(frozen=True)
class Limit:
    """A resource limit; None is unlimited."""

    __pydantic_config__ = {"extra": "forbid", "allow_inf_nan": False, "use_attribute_docstrings": True}

    soft: int | None
    """What holds now."""
    hard: int | None
    """How far it may be raised without privileges."""


@dataclass(frozen=True)
class Result:
    """The host's environment, from inside."""

    __pydantic_config__ = {"extra": "forbid", "allow_inf_nan": False, "use_attribute_docstrings": True}

    python_version: str
    """Version of the interpreter, such as 3.11.7."""
    implementation: str
    """CPython, PyPy."""
    executable: str
    """Path of the interpreter."""
    prefix: str
    """Its sys.prefix: the environment that packages are taken from."""
    virtual_environment: bool
    """Whether that is a venv."""
    machine: str
    """Architecture and C library, such as x86_64 glibc 2.36."""
    packages: dict[str, Package]
    """By name: numpy, safetensors, torch."""
    site_packages: str
    """Where pip would install to."""
    site_packages_owner: int | None
    """User id that owns it; None where it does not exist."""
    site_packages_writable: bool
    """Whether this user may install there."""
    externally_managed: bool
    """Whether the distribution asks pip to keep out (PEP 668)."""
    unix_time_s: float
    """The clock when this was measured, seconds since 1970 (UTC)."""
    limits: dict[str, Limit]
    """Resource limits of a probe's process by name; bytes where the name says so, counts otherwise."""
    cpus: int
    """How many this process may use."""
    memory_total_bytes: int | None
    """Physical memory, bytes."""
    memory_available_bytes: int | None
    """What could be allocated without swapping, bytes, as the kernel estimates it."""
    shm_total_bytes: int | None
    """Size of /dev/shm, bytes; None where there is none."""
    shm_free_bytes: int | None
    """Free in /dev/shm, bytes."""
    gpus_driver: int | None
    """GPUs that the loaded NVIDIA driver lists; None where no driver is loaded."""
    gpu_devices: int | None
    """/dev/nvidia<N> files seen from here; None where /dev cannot be read."""
    environment_names: tuple[str, ...]
    """Names, never values, of variables that change how training behaves."""


def run(params: Params, context: Context) -> Result:
    """Look around; every step by itself, so that one that fails leaves the others."""
    moment = time.time()
    context.progress(0, 2, unit="steps", label="interpreter and host")
    memory = _meminfo()
    shm = _shm()
    site = sysconfig.get_paths()["purelib"]
    driver, devices = _count_gpus()
    context.progress(1, 2, unit="steps", label="packages")
    packages = {name: _package(name) for name in IMPORTED + DESCRIBED}
    result = Result(
        python_version=platform.python_version(),
        implementation=platform.python_implementation(),
        executable=sys.executable,
        prefix=sys.prefix,
        virtual_environment=sys.prefix != sys.base_prefix,
        machine=" ".join((platform.machine(), *platform.libc_ver())).strip(),
        packages=packages,
        site_packages=site,
        site_packages_owner=_owner(site),
        site_packages_writable=os.access(site, os.W_OK),
        externally_managed=_externally_managed(),
        unix_time_s=moment,
        limits=_limits(),
        cpus=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        memory_total_bytes=memory.get("MemTotal"),
        memory_available_bytes=memory.get("MemAvailable"),
        shm_total_bytes=None if shm is None else shm[0],
        shm_free_bytes=None if shm is None else shm[1],
        gpus_driver=driver,
        gpu_devices=devices,
        environment_names=_telling_names(),
    )
    _judge_python(result, context)
    _judge_packages(result, params, context)
    _judge_shm(result, context)
    _judge_gpus(result, params, context)
    return result


def _telling_names() -> tuple[str, ...]:
    # An empty one is as good as none, and the agent hides the GPUs by one.
    return tuple(sorted(name for name, value in os.environ.items() if value and name.startswith(TELLING)))


def _meminfo() -> dict[str, int]:
    found = {}
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            for line in file:
                name, _, rest = line.partition(":")
                number = rest.split()[:1]
                if name in {"MemTotal", "MemAvailable"} and number and number[0].isdigit():
                    found[name] = int(number[0]) * 1024
    except OSError:
        return {}
    return found


def _shm() -> tuple[int, int] | None:
    try:
        state = os.statvfs(SHM)
    except OSError:
        return None
    return state.f_blocks * state.f_frsize, state.f_bavail * state.f_frsize


def _owner(path: str) -> int | None:
    try:
        return os.stat(path).st_uid
    except OSError:
        return None


def _externally_managed() -> bool:
    if sys.prefix != sys.base_prefix:
        return False
    return os.path.exists(os.path.join(sysconfig.get_path("stdlib"), "EXTERNALLY-MANAGED"))


def _limits() -> dict[str, Limit]:
    def plain(value: int) -> int | None:
        return None if value == resource.RLIM_INFINITY else value

    limits = {}
    for name, constant in _LIMITS.items():
        number = getattr(resource, constant, None)
        if number is not None:
            soft, hard = resource.getrlimit(number)
            limits[name] = Limit(plain(soft), plain(hard))
    return limits


def _count_gpus() -> tuple[int | None, int | None]:
    driver = devices = None
    try:
        if os.path.isdir("/proc/driver/nvidia"):
            gpus = "/proc/driver/nvidia/gpus"
            driver = len(os.listdir(gpus)) if os.path.isdir(gpus) else 0
    except OSError:
        driver = None
    try:
        names = os.listdir("/dev")
        devices = sum(1 for name in names if name.startswith("nvidia") and name[len("nvidia") :].isdigit())
    except OSError:
        devices = None
    return driver, devices


def _package(name: str) -> Package:
    from importlib import metadata
    from importlib.util import find_spec

    try:
        version: str | None = metadata.version(name)
    except Exception:  # noqa: BLE001 - damaged metadata raises whatever its parser raises
        version = None
    try:
        found = find_spec(name) is not None
    except (ImportError, ValueError):
        found = False
    if not found or name in DESCRIBED:
        return Package(version, found, None, None)
    error, seen = _import(name)
    return Package(version or seen, found, error is None, error)


def _import(name: str) -> tuple[str | None, str | None]:
    """Return (what went wrong or None, the version that the module names)."""
    # In a child: a broken native library may end the process that loads it. With our path, not the child's own.
    child = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", _IMPORT, name, *sys.path],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    try:
        output, _ = child.communicate(timeout=IMPORT_SECONDS)
    except subprocess.TimeoutExpired:
        # Not waited for: a child that hangs in a file system does not die either.
        child.kill()
        return "importing it did not end within %.0f s" % IMPORT_SECONDS, None
    lines = output.decode("utf-8", "backslashreplace").strip().splitlines() or [""]
    if child.returncode == 0:
        return None, lines[-1][:100] or None
    if child.returncode < 0:
        return "importing it ended with signal %d" % -child.returncode, None
    return lines[-1][:500] or "importing it ended with status %d" % child.returncode, None


def _judge_python(result: Result, context: Context) -> None:
    names = ", ".join(result.environment_names)
    kind = "venv" if result.virtual_environment else "prefix"
    context.finding(
        "ok",
        "python",
        "%s %s" % (result.implementation, result.python_version),
        value=result.python_version,
        evidence=(
            result.executable,
            "%s %s" % (kind, result.prefix),
            "%s, %d CPUs" % (result.machine, result.cpus),
            *(("set there: " + names,) if names else ()),
        ),
    )


def _how_to_install(result: Result, name: str) -> str:
    if result.site_packages_writable and not result.externally_managed:
        return "on the host: %s -m pip install %s" % (result.executable, name)
    why = "its distribution manages it" if result.externally_managed else "this user may not write to it"
    venv = os.path.expanduser("~/rdiag-env")  # in full: hosts.yaml takes no ~ for paths on a host
    return (
        "packages cannot be added to %s (%s); make a venv there (python3 -m venv %s, then "
        "%s/bin/pip install %s) and set environment: {venv: %s} in hosts.yaml" % (result.prefix, why, venv, venv, name, venv)
    )


def _judge_packages(result: Result, params: Params, context: Context) -> None:
    gpus = bool(params.gpus or result.gpus_driver or result.gpu_devices)
    for name, package in result.packages.items():
        evidence: tuple[str, ...] = ()
        action = None
        level: Level = "ok"
        message = "%s %s" % (name, package.version or "of unknown version")
        if package.error is not None:
            level, message = "degraded", "%s is installed and cannot be imported" % name
            evidence = (package.error,)
            action = "install it again. " + _how_to_install(result, "--force-reinstall " + name)
        elif not package.found and package.version is not None:
            level, message = "degraded", "%s %s is installed by name, its module is missing" % (name, package.version)
            action = "install it again. " + _how_to_install(result, "--force-reinstall " + name)
        elif not package.found and (name in REQUIRED or (name == "torch" and gpus)):
            level, message = "degraded", "%s is not installed" % name
            evidence = ("needed by probes that read checkpoints" if name in REQUIRED else "needed by probes of GPUs",)
            action = _how_to_install(result, name)
        elif not package.found:
            message = "%s is not installed; %s" % (name, UNNEEDED[name])
        elif name == "torch" and not _recent(package.version or ""):
            evidence = ("older than %d.%d: .pt and .bin files will not be read with it" % SAFE_TORCH,)
        context.finding(level, name, message, value=package.version, evidence=evidence, action=action)


def _recent(version: str) -> bool:
    parts = version.split(".")[:2]
    if len(parts) < 2 or not all(part.isdigit() for part in parts):
        return False
    return (int(parts[0]), int(parts[1])) >= SAFE_TORCH


def _judge_shm(result: Result, context: Context) -> None:
    total = result.shm_total_bytes
    if total is None:
        context.finding("skipped", "shared-memory", "there is no %s here" % SHM)
        return
    small = total < SHM_FLOOR
    context.finding(
        "degraded" if small else "ok",
        "shared-memory",
        "%s is %s" % (SHM, "small" if small else "large enough"),
        value=round(total / (1 << 30), 3),
        unit="GiB",
        threshold=SHM_FLOOR / (1 << 30),
        threshold_source=SHM_FLOOR_SOURCE,
        evidence=("%.2f GiB of it free" % ((result.shm_free_bytes or 0) / (1 << 30)),),
        action="start the container with --shm-size=16g or --ipc=host, or remount it larger" if small else None,
    )


def visible_gpus(driver: int | None, devices: int | None) -> int | None:
    """Return how many GPUs can be used from here; None when that cannot be told.

    The driver lists the machine's GPUs, in a container too; device files say which of them are handed in. Before
    the first use after a boot there are no device files yet, so none of them means nothing.
    """
    if driver is None:
        return devices
    return driver if not devices else min(driver, devices)


def _judge_gpus(result: Result, params: Params, context: Context) -> None:
    count = visible_gpus(result.gpus_driver, result.gpu_devices)
    evidence = (
        "no NVIDIA driver is loaded" if result.gpus_driver is None else "driver lists %d" % result.gpus_driver,
        "device files: %s" % ("unknown" if result.gpu_devices is None else result.gpu_devices),
    )
    source = None if params.gpus is None else "gpus in hosts.yaml"
    level: Level = "ok"
    message = "%d NVIDIA GPUs" % (count or 0)
    action = None
    if count is None:
        level, message = "unknown", "GPUs cannot be counted here"
    elif params.gpus not in {None, count}:
        level, message = "degraded", "%s where %d are expected" % (message, params.gpus)
        action = "look for Xid lines in dmesg, at the container's --gpus, and correct gpus in hosts.yaml if it is wrong"
    context.finding(
        level,
        "gpus",
        message,
        value=count,
        threshold=params.gpus,
        threshold_source=source,
        evidence=evidence,
        action=action,
    )
