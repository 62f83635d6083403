"""Describe the environment of GPU programs: driver, CUDA, torch, NCCL, their settings and who makes them.

Reads files of /proc, /sys and /etc, asks torch and libnccl in processes of their own that see no GPU, and looks at
variables of an allow-list only. Starts no CUDA context. Traps that cost bandwidth or data are findings.
"""

from __future__ import annotations

import os
import platform
import sys
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import Any

    from probes.lib.env.variables import ConfLine, Mention
    from remote_diag.probe import Context

EFFECTS = ("reads-files", "runs-commands")


@dataclass(frozen=True)
class Params:
    """What to look at."""

    __pydantic_config__ = {"extra": "forbid", "allow_inf_nan": False, "use_attribute_docstrings": True}

    pid: int | None = None
    """Also the settings that this running process was started with."""
    redact: bool = False
    """Hide names of host and user, home folders, addresses and UUIDs in the answer."""
    torch: bool = True
    """Whether to import torch (in a child); without it its architectures, and which NCCL runs, stay unknown."""

    def __post_init__(self) -> None:
        """Check the pid."""
        if self.pid is not None and self.pid < 1:
            raise ValueError("pid must be 1 or more")


@dataclass(frozen=True)
class Driver:
    """NVIDIA's driver."""

    __pydantic_config__ = {"extra": "forbid", "allow_inf_nan": False, "use_attribute_docstrings": True}

    version: str | None
    """Version of the loaded kernel module; None where none is loaded or it cannot be told."""
    open_module: bool | None
    """Whether it is the open kernel module; None where that cannot be told."""
    library_versions: tuple[str, ...]
    """Versions of libnvidia-ml on this host: another one than the module's means a half-done upgrade."""
    cuda: str | None
    """The newest CUDA that it supports, such as 12.8; None where there is no libcuda."""
    modules: tuple[str, ...]
    """Loaded kernel modules that matter: nvidia_uvm, nvidia_peermem, gdrdrv..."""
    parameters: dict[str, str]
    """Parameters of the modules that change how GPUs work together."""
    services: tuple[str, ...]
    """Of persistenced, fabricmanager, dcgm, imex those that run, as far as processes can be seen from here."""
    models: tuple[str, ...]
    """GPUs that the driver lists, by model."""


@dataclass(frozen=True)
class Torch:
    """torch, as it says itself."""

    __pydantic_config__ = {"extra": "forbid", "allow_inf_nan": False, "use_attribute_docstrings": True}

    version: str
    """Such as 2.9.0+cu128."""
    cuda: str | None
    """CUDA that it is built for; None for a build without."""
    arch_list: tuple[str, ...]
    """Architectures that it has code for: sm_90, compute_120..."""
    cudnn: int | None
    """cuDNN's version as a number; None without."""
    nccl: str | None
    """NCCL that it was built with, or linked to."""


@dataclass(frozen=True)
class NcclLibrary:
    """One libnccl on this host."""

    __pydantic_config__ = {"extra": "forbid", "allow_inf_nan": False, "use_attribute_docstrings": True}

    path: str
    """The file."""
    origin: str
    """LD_PRELOAD, LD_LIBRARY_PATH, wheel, loaded by torch, system."""
    version: str | None
    """As ncclGetVersion says; None where it cannot be asked."""
    error: str | None
    """Why it cannot be asked."""


@dataclass(frozen=True)
class Package:
    """An installed Python package."""

    __pydantic_config__ = {"extra": "forbid", "allow_inf_nan": False, "use_attribute_docstrings": True}

    name: str
    """Its name."""
    version: str
    """Its version, as its metadata says."""


@dataclass(frozen=True)
class Setting:
    """A variable."""

    __pydantic_config__ = {"extra": "forbid", "allow_inf_nan": False, "use_attribute_docstrings": True}

    name: str
    """Its name."""
    value: str
    """Its value; (hidden) where the name sounds like a secret."""
    source: str
    """inventory; inherited: what started rdiag's agent handed it on (sshd, PAM or a startup file of the login shell; on this machine
    whoever called rdiag); environment: entering a venv or conda added or changed it; conf file FILE; process; unknown."""
    places: tuple[str, ...]
    """FILE:LINE of startup or conf files that set it."""
    in_force: bool
    """Whether it is what counts: a conf file's value gives way to a variable, and the system's file to the user's."""


@dataclass(frozen=True)
class Limit:
    """A resource limit; None is unlimited."""

    __pydantic_config__ = {"extra": "forbid", "allow_inf_nan": False, "use_attribute_docstrings": True}

    soft: int | None
    """What holds now."""
    hard: int | None
    """How far it may be raised without privileges."""


@dataclass(frozen=True)
class Machine:
    """What is around."""

    __pydantic_config__ = {"extra": "forbid", "allow_inf_nan": False, "use_attribute_docstrings": True}

    kernel: str
    """Release of the kernel."""
    system: str
    """The distribution, as /etc/os-release names it."""
    boot_id: str | None
    """Changes with every boot."""
    unix_time_s: float
    """The host's clock when this was measured, seconds since 1970."""
    virtualisation: str | None
    """bare metal, wsl, or vendor and product of the virtual machine; None where it cannot be told."""
    container: str | None
    """docker, podman, kubernetes...; None for none that shows."""
    cgroup_cpus: float | None
    """CPUs that the control group allows; None for no limit."""
    cgroup_memory_bytes: int | None
    """Memory that the control group allows, bytes; None for no limit."""
    cpu_model: str | None
    """Name of the CPU."""
    cpus: int
    """CPUs that this process may use."""
    governors: dict[str, int]
    """Frequency governor -> CPUs."""
    scaling_driver: str | None
    """What drives the frequency: intel_pstate, acpi-cpufreq..."""
    numa_nodes: dict[str, str]
    """NUMA node -> its CPUs."""
    kernel_options: tuple[str, ...]
    """Options of the kernel's command line about IOMMU, PCIe, huge pages, CPUs, NVIDIA."""
    shm_total_bytes: int | None
    """Size of /dev/shm, bytes; None where there is none."""
    shm_free_bytes: int | None
    """Free in /dev/shm, bytes."""
    limits: dict[str, Limit]
    """By name; bytes where the name says so, counts otherwise."""
    infiniband: tuple[str, ...]
    """RDMA devices."""


@dataclass(frozen=True)
class Result:
    """The environment."""

    __pydantic_config__ = {"extra": "forbid", "allow_inf_nan": False, "use_attribute_docstrings": True}

    driver: Driver
    """NVIDIA's driver."""
    torch: Torch | None
    """None where torch is not installed or could not be asked."""
    torch_error: str | None
    """Why it could not be asked."""
    nccl_version: str | None
    """The NCCL that runs in programs started here."""
    nccl_source: str | None
    """How that is known."""
    nccl_libraries: tuple[NcclLibrary, ...]
    """Every libnccl that was found, the one that wins first."""
    settings: tuple[Setting, ...]
    """Variables of CUDA, NCCL, torch and the loader; settings of NCCL's conf files."""
    process_settings: tuple[Setting, ...]
    """The same of the running process that was asked for."""
    packages: tuple[Package, ...]
    """Installed Python packages that matter."""
    python_version: str
    """Version of the interpreter."""
    executable: str
    """The interpreter."""
    machine: Machine
    """What is around."""
    redacted: bool
    """Whether names, addresses and UUIDs are hidden."""


def run(params: Params, context: Context) -> Result:
    """Look, ask, judge."""
    from probes.lib.env import machine, software, variables
    from probes.lib.env.judgement import Judge
    from probes.lib.env.redact import Redactor
    from probes.lib.legible import legible

    redactor = Redactor() if params.redact else None
    home = os.path.expanduser("~")
    process = _process(params.pid, context)
    context.progress(0, 3, unit="steps", label="settings")
    effective, origin = _effective(context)
    conf_lines, conf_errors = _conf_lines(effective, home)
    mentions, _ = variables.mentions(home)
    settings = _settings(effective, origin, conf_lines, mentions)
    if redactor is not None:
        for named in (effective, process, *({line.name: line.value} for line in conf_lines)):
            redactor.hide_peers(named)
    context.progress(1, 3, unit="steps", label="torch and NCCL")
    child_env = {**os.environ, **effective}
    asked = software.Answer(None, None)
    found_packages = software.packages()
    if params.torch and "torch" in found_packages:
        asked = software.ask_torch(min(software.TORCH_SECONDS, max(1.0, context.remaining() - 30)), child_env)
    torch = asked.values
    loaded = [path for path in (torch or {}).get("loaded", []) if isinstance(path, str)]
    libraries = software.nccl_libraries(child_env, loaded, max(1.0, min(30.0, context.remaining() - 15)))
    built = software.torch_nccl_version((torch or {}).get("nccl"))
    runs, why = _running(libraries, loaded, built)
    context.progress(2, 3, unit="steps", label="driver and machine")
    driver, module = machine.driver()
    cuda = software.ask_driver(software.LIBRARY_SECONDS, child_env).values or {}
    models = machine.gpu_models()
    shm = machine.shm()
    limits = machine.limits()
    result = Result(
        driver=Driver(
            version=driver,
            open_module=module,
            library_versions=machine.library_versions(),
            cuda=software.cuda_version(cuda.get("version")),
            modules=machine.modules(),
            parameters=machine.driver_parameters(),
            services=machine.services(),
            models=tuple(models),
        ),
        torch=_torch(torch, built),
        torch_error=asked.error,
        nccl_version=runs,
        nccl_source=why,
        nccl_libraries=tuple(NcclLibrary(each.path, each.origin, each.version, each.error) for each in libraries),
        settings=settings,
        process_settings=tuple(
            Setting(name, variables.shown(name, value), "process", (), in_force=True) for name, value in sorted(process.items())
        ),
        packages=tuple(Package(name, version) for name, version in sorted(found_packages.items())),
        python_version=platform.python_version(),
        executable=sys.executable,
        machine=_machine(shm, limits),
        redacted=params.redact,
    )

    def tell(level: Any, code: str, message: str, **more: Any) -> None:
        if redactor is not None:
            code, message, more = redactor.value((code, message, more))
        context.finding(level, code, legible(message), **legible(more))

    in_force = {setting.name: (setting.value, _who(setting)) for setting in settings if setting.in_force}
    Judge(
        tell,
        {
            "variables": in_force, "models": models, "gpu_devices": _gpu_devices(), "driver_version": driver, "open_module": module,
            "library_versions": result.driver.library_versions, "driver_cuda": result.driver.cuda,
            "torch": None if result.torch is None else {"version": result.torch.version, "cuda": result.torch.cuda, "arch_list": result.torch.arch_list},
            "torch_error": asked.error, "torch_asked": params.torch, "nccl_runs": runs, "nccl_from": why or "", "nccl_built": built,
            "nccl_libraries": libraries, "conf_lines": conf_lines, "conf_errors": conf_errors, "mentions": mentions, "packages": found_packages,
            "shm_total": None if shm is None else shm[0], "limits": limits, "infiniband": result.machine.infiniband,
            "governors": result.machine.governors, "scaling_driver": result.machine.scaling_driver, "pid": params.pid,
            "process_differs": _differing(process, effective) if params.pid is not None else [],
        },
    ).all()  # fmt: skip
    # A version of four parts, as cuDNN's, looks like an address.
    return legible(result if redactor is None else replace(redactor.value(result), packages=result.packages))


def _process(pid: int | None, context: Context) -> dict[str, str]:
    from probes.lib.env.variables import of_process

    if pid is None:
        return {}
    try:
        return of_process(pid)
    except FileNotFoundError:
        context.unfit("there is no process %d" % pid, hint="look at its pid on the host")
    except OSError as error:
        context.unfit("process %d may not be looked at: %s" % (pid, error.strerror), hint="run rdiag as its user, or as root")


def _effective(context: Context) -> tuple[dict[str, str], dict[str, str]]:
    """Return the variables that a program gets which is started here, and the source of each."""
    import json

    from probes.lib.env.variables import allowed, of_process

    own = {name: value for name, value in os.environ.items() if allowed(name)}
    try:
        # What the agent was started with; who set it before that, sshd, PAM or a shell, leaves no trace.
        inherited: dict[str, str] | None = of_process(os.getppid())
    except OSError:
        inherited = None
    given: dict[str, str] = {}
    try:
        with open(os.path.join(os.path.dirname(context.run_dir), "request.json"), "rb") as file:
            request = json.loads(file.read(1 << 20))
        given = {name: value for name, value in request["env"].items() if allowed(name)}
    except (OSError, ValueError, KeyError, AttributeError):
        given = {}
    values, sources = dict(own), {}
    # The agent hides the GPUs from this probe: that is nobody's setting.
    if values.get("CUDA_VISIBLE_DEVICES") == "":
        values.pop("CUDA_VISIBLE_DEVICES")
        if inherited is not None and "CUDA_VISIBLE_DEVICES" in inherited:
            values["CUDA_VISIBLE_DEVICES"] = inherited["CUDA_VISIBLE_DEVICES"]
    values.update(given)
    for name, value in values.items():
        if name in given:
            sources[name] = "inventory"
        elif inherited is None:
            sources[name] = "unknown"
        else:
            sources[name] = "inherited" if inherited.get(name) == value else "environment"
    return values, sources


def _conf_lines(effective: dict[str, str], home: str) -> tuple[list[ConfLine], list[tuple[str, str]]]:
    from probes.lib.env.variables import conf_files, read_conf

    lines: list[ConfLine] = []
    errors = []
    for path in dict.fromkeys(conf_files(effective, home)):
        try:
            lines += read_conf(path)
        except FileNotFoundError:
            if effective.get("NCCL_CONF_FILE") and path == conf_files(effective, home)[0]:
                errors.append((path, "NCCL_CONF_FILE names it, and it does not exist"))
        except OSError as error:
            errors.append((path, error.strerror or str(error)))
    return lines, errors


def _settings(
    effective: dict[str, str], origin: dict[str, str], lines: list[ConfLine], mentions: list[Mention]
) -> tuple[Setting, ...]:
    from probes.lib.env.variables import shown

    places: dict[str, list[str]] = {}
    for mention in mentions:
        places.setdefault(mention.name, []).append("%s:%d" % (mention.file, mention.line))
    found = [
        Setting(name, shown(name, value), origin[name], tuple(places.get(name, ())[:5]), in_force=True)
        for name, value in sorted(effective.items())
    ]
    taken = set(effective)
    for line in lines:
        found.append(
            Setting(line.name, line.value, "conf file %s" % line.file, ("%s:%d" % (line.file, line.line),), in_force=line.read and line.name not in taken)
        )
        if line.read:
            taken.add(line.name)
    return tuple(found)


def _who(setting: Setting) -> str:
    return "%s%s" % (setting.source, " (%s)" % ", ".join(setting.places) if setting.places else "")


def _running(libraries: list[Any], loaded: list[str], built: str | None) -> tuple[str | None, str | None]:
    """Return the NCCL that runs, and how that is known."""
    for path in loaded:
        for library in libraries:
            if library.version and (library.path == path or os.path.realpath(library.path) == os.path.realpath(path)):
                return library.version, "torch loads %s" % path
    if built is not None:
        return built, "linked into torch"
    if libraries and libraries[0].version:
        return libraries[0].version, "the first that the loader finds: %s" % libraries[0].path
    return None, None


def _torch(said: dict[str, Any] | None, nccl: str | None) -> Torch | None:
    if said is None:
        return None
    cuda, cudnn = said.get("cuda"), said.get("cudnn")
    return Torch(
        version=str(said.get("version"))[:100],
        cuda=cuda if isinstance(cuda, str) else None,
        arch_list=tuple(str(arch)[:40] for arch in said.get("arch_list", ())[:100]),
        cudnn=cudnn if type(cudnn) is int else None,
        nccl=nccl,
    )


def _machine(shm: tuple[int, int] | None, limits: dict[str, tuple[int | None, int | None]]) -> Machine:
    import re

    from probes.lib.env import machine

    named = re.search(r'^PRETTY_NAME="?([^"\n]*)', machine.read("/etc/os-release") or "", re.MULTILINE)
    cpus, memory = machine.cgroup_limits()
    return Machine(
        kernel=platform.release(),
        system=named[1][:100] if named else platform.system(),
        boot_id=(machine.read("/proc/sys/kernel/random/boot_id", 100) or "").strip() or None,
        unix_time_s=time.time(),
        virtualisation=machine.virtualisation(),
        container=machine.container(),
        cgroup_cpus=cpus,
        cgroup_memory_bytes=memory,
        cpu_model=machine.cpu_model(),
        cpus=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        governors=machine.governors(),
        scaling_driver=machine.scaling_driver(),
        numa_nodes=machine.numa_nodes(),
        kernel_options=machine.kernel_options(),
        shm_total_bytes=None if shm is None else shm[0],
        shm_free_bytes=None if shm is None else shm[1],
        limits={name: Limit(*pair) for name, pair in limits.items()},
        infiniband=machine.infiniband(),
    )


def _gpu_devices() -> int:
    try:
        return sum(1 for name in os.listdir("/dev") if name.startswith("nvidia") and name[len("nvidia") :].isdigit())
    except OSError:
        return 0


def _differing(process: dict[str, str], here: dict[str, str]) -> list[str]:
    from probes.lib.env.variables import shown

    lines = []
    for name in sorted(process.keys() | here.keys()):
        there, own = process.get(name), here.get(name)
        if there != own:
            first, second = ("not set" if value is None else shown(name, value) for value in (there, own))
            lines.append("%s: %s there, %s here" % (name, first, second))
    return lines
