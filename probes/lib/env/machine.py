"""The machine around: driver, kernel, limits, /dev/shm, container, virtualisation, CPUs. Files of /proc and /sys only."""

from __future__ import annotations

import os
import platform
import re
import resource

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NamedTuple

    class DriverFound(NamedTuple):
        """The loaded kernel module."""

        version: str | None
        open_module: bool | None
else:
    from collections import namedtuple

    DriverFound = namedtuple("DriverFound", "version open_module")

SHM = "/dev/shm"  # noqa: S108 - looked at, never written to
LIMITS = {
    "open_files": "RLIMIT_NOFILE",
    "processes": "RLIMIT_NPROC",
    "locked_memory_bytes": "RLIMIT_MEMLOCK",
    "stack_bytes": "RLIMIT_STACK",
    "core_file_bytes": "RLIMIT_CORE",
    "address_space_bytes": "RLIMIT_AS",
}
_CMDLINE = re.compile(
    r"(?:iommu|intel_iommu|amd_iommu|iommu\.passthrough|pcie_aspm|pcie_port_pm|pci|nvidia[\w.-]*|nouveau[\w.-]*|modprobe\.blacklist"
    r"|rd\.driver\.blacklist|hugepages|default_hugepagesz|hugepagesz|transparent_hugepage|mitigations|numa_balancing|isolcpus|nohz_full"
    r"|intel_pstate|amd_pstate|processor\.max_cstate|intel_idle\.max_cstate)(?:=[\w.,:+-]*)?\Z"
)
_PARAMETERS = (
    "EnableMSI", "EnablePCIeGen3", "EnableResizableBar", "EnableStreamMemOPs", "OpenRmEnableUnsupportedGpus", "PreserveVideoMemoryAllocations",
    "DynamicPowerManagement", "RegistryDwords", "EnableGpuFirmware", "GrdmaPciTopoCheckOverride", "NvLinkDisable", "ModifyDeviceFiles",
)  # fmt: skip
_SERVICES = {"nvidia-persiste": "persistenced", "nv-fabricmanage": "fabricmanager", "nv-hostengine": "dcgm", "nvidia-imex": "imex"}
_MODULE = re.compile(r"NVRM version:\s+NVIDIA UNIX (?:(Open) )?(?:Kernel Module|\S+ Kernel Module)(?: for \S+)?\s+(\d+(?:\.\d+)+)")


def read(path: str, most: int = 1 << 16) -> str | None:
    """Return the text of a small file; None where it cannot be read."""
    try:
        with open(path, "rb") as file:
            return file.read(most).decode("utf-8", "replace")
    except OSError:
        return None


def driver(root: str = "/") -> DriverFound:
    """Return the version of the loaded NVIDIA module, and whether it is the open one; None where that cannot be told."""
    text = read(root + "proc/driver/nvidia/version")
    if text is None:
        return DriverFound(None, None)
    match = _MODULE.search(text)
    if match is None:
        loose = re.search(r"NVRM version:.*?(\d+\.\d+(?:\.\d+)?)", text)
        return DriverFound(loose[1] if loose else None, "Open Kernel Module" in text)
    return DriverFound(match[2], bool(match[1]) or "Open Kernel Module" in text)


def driver_parameters(root: str = "/") -> dict[str, str]:
    """Return parameters of the NVIDIA modules that change how GPUs work together."""
    found = {}
    for line in (read(root + "proc/driver/nvidia/params") or "").splitlines():
        name, mark, value = line.partition(":")
        if mark and name.strip() in _PARAMETERS:
            found[name.strip()] = value.strip()[:200]
    for module, name in (("nvidia_uvm", "uvm_disable_hmm"), ("nvidia_drm", "modeset")):
        said = read("%ssys/module/%s/parameters/%s" % (root, module, name), 100)
        if said is not None:
            found["%s.%s" % (module, name)] = said.strip()
    return found


def modules(root: str = "/") -> tuple[str, ...]:
    """Return which of the modules that matter are loaded."""
    wanted = ("nvidia", "nvidia_uvm", "nvidia_modeset", "nvidia_peermem", "nv_peer_mem", "gdrdrv", "nouveau", "mlx5_core", "ib_core")
    return tuple(name for name in wanted if os.path.isdir("%ssys/module/%s" % (root, name)))


def library_versions(folders: tuple[str, ...] | None = None) -> tuple[str, ...]:
    """Return the versions in the names of the driver's libraries, such as libnvidia-ml.so.580.65.06."""
    found = set()
    for folder in folders or (
        "/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64", "/usr/lib", "/usr/lib/wsl/lib", "/usr/local/nvidia/lib64",
        "/run/opengl-driver/lib", "/lib/x86_64-linux-gnu",
    ):  # fmt: skip
        path = os.path.join(folder, "libnvidia-ml.so.1")
        match = re.search(r"\.so\.(\d+\.\d+(?:\.\d+)?)$", os.path.realpath(path))
        if match and os.path.exists(path):
            found.add(match[1])
    return tuple(sorted(found))


def gpu_models(root: str = "/") -> list[str]:
    """Return the model of each GPU that the driver lists."""
    folder = root + "proc/driver/nvidia/gpus"
    found = []
    try:
        names = sorted(os.listdir(folder))
    except OSError:
        return []
    for name in names:
        match = re.search(r"^Model:\s*(.+?)\s*$", read("%s/%s/information" % (folder, name)) or "", re.MULTILINE)
        found.append(match[1][:100] if match else "unknown")
    return found


def limits() -> dict[str, tuple[int | None, int | None]]:
    """Return name -> (soft, hard); None is unlimited."""
    found = {}
    for name, constant in LIMITS.items():
        soft, hard = resource.getrlimit(getattr(resource, constant))
        found[name] = tuple(None if value == resource.RLIM_INFINITY else value for value in (soft, hard))
    return found  # type: ignore[return-value]


def shm() -> tuple[int, int] | None:
    """Return total and free bytes of /dev/shm; None where there is none."""
    try:
        state = os.statvfs(SHM)
    except OSError:
        return None
    return state.f_blocks * state.f_frsize, state.f_bavail * state.f_frsize


def container(root: str = "/") -> str | None:
    """Return what kind of container this is; None for none that shows."""
    if os.path.exists(root + ".dockerenv"):
        return "docker"
    text = read(root + "run/.containerenv")
    if text is not None:
        return "podman"
    named = re.search(r"(?:^|\0)container=([a-z-]+)", read(root + "proc/1/environ") or "")
    if named:
        return named[1]
    groups = (read(root + "proc/1/cgroup") or "") + (read(root + "proc/self/mountinfo") or "")
    for word, kind in (("kubepods", "kubernetes"), ("/docker/", "docker"), ("libpod", "podman"), ("/lxc/", "lxc")):
        if word in groups:
            return kind
    if os.environ.get("SINGULARITY_NAME") or os.environ.get("APPTAINER_NAME"):
        return "apptainer"
    return None


def cgroup_limits(root: str = "/") -> tuple[float | None, int | None]:
    """Return (CPUs, bytes of memory) that the control group allows; None for no limit or none that shows."""
    cpus = memory = None
    quota = (read(root + "sys/fs/cgroup/cpu.max") or "").split()
    if len(quota) == 2 and all(part.isdigit() for part in quota) and int(quota[1]):
        cpus = int(quota[0]) / int(quota[1])
    limit = (read(root + "sys/fs/cgroup/memory.max") or "").strip()
    if limit.isdigit():
        memory = int(limit)
    return cpus, memory


def virtualisation(root: str = "/") -> str | None:
    """Return the hypervisor or cloud as far as files tell; ``bare metal`` where the CPU shows none; None if unknown."""
    if "microsoft" in (read(root + "proc/version") or "").lower():
        return "wsl"
    vendor = (read(root + "sys/class/dmi/id/sys_vendor", 200) or "").strip()
    product = (read(root + "sys/class/dmi/id/product_name", 200) or "").strip()
    cpu = read(root + "proc/cpuinfo")
    if cpu is None or platform.machine() not in {"x86_64", "AMD64", "i686"}:
        return ("%s %s" % (vendor, product)).strip() or None
    if not re.search(r"^flags\s*:.*\bhypervisor\b", cpu, re.MULTILINE):
        return "bare metal"
    return ("%s %s" % (vendor, product)).strip() or "unknown hypervisor"


def kernel_options(root: str = "/") -> tuple[str, ...]:
    """Return the options of the kernel's command line that matter to GPUs; others may be anything and are left out."""
    return tuple(word for word in (read(root + "proc/cmdline") or "").split() if _CMDLINE.match(word))


def governors(root: str = "/") -> dict[str, int]:
    """Return frequency governor -> CPUs."""
    found: dict[str, int] = {}
    folder = root + "sys/devices/system/cpu"
    try:
        names = os.listdir(folder)
    except OSError:
        return {}
    for name in names:
        if re.fullmatch(r"cpu\d+", name):
            governor = (read("%s/%s/cpufreq/scaling_governor" % (folder, name), 100) or "").strip()
            if governor:
                found[governor] = found.get(governor, 0) + 1
    return found


def scaling_driver(root: str = "/") -> str | None:
    """Return the frequency driver of the first CPU."""
    return (read(root + "sys/devices/system/cpu/cpu0/cpufreq/scaling_driver", 100) or "").strip() or None


def cpu_model(root: str = "/") -> str | None:
    """Return the CPU's name."""
    match = re.search(r"^model name\s*:\s*(.+?)\s*$", read(root + "proc/cpuinfo") or "", re.MULTILINE)
    return match[1][:100] if match else None


def numa_nodes(root: str = "/") -> dict[str, str]:
    """Return NUMA node -> its CPUs, such as 0-31,64-95."""
    folder = root + "sys/devices/system/node"
    try:
        names = sorted((name for name in os.listdir(folder) if re.fullmatch(r"node\d+", name)), key=lambda name: int(name[4:]))
    except OSError:
        return {}
    return {name[4:]: (read("%s/%s/cpulist" % (folder, name)) or "").strip() for name in names}


def services(root: str = "/") -> tuple[str, ...]:
    """Return which of NVIDIA's daemons run, as far as processes can be seen from here."""
    found = set()
    try:
        pids = [name for name in os.listdir(root + "proc") if name.isdigit()]
    except OSError:
        return ()
    for pid in pids[:100_000]:
        comm = (read("%sproc/%s/comm" % (root, pid), 100) or "").strip()
        if comm in _SERVICES:
            found.add(_SERVICES[comm])
    return tuple(sorted(found))


def infiniband(root: str = "/") -> tuple[str, ...]:
    """Return the RDMA devices."""
    try:
        return tuple(sorted(os.listdir(root + "sys/class/infiniband")))[:64]
    except OSError:
        return ()
