"""Where the host stands: container, virtual machine, WSL; and what in it holds GPUs back besides themselves."""

from __future__ import annotations

import os

from . import procfs
from .judgement import Judgement
from .looking import Surroundings

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Iterable

    from .thresholds import Thresholds

_FIRST_PID_NAMESPACE = ("pid:[4026531836]", "pid:[0]")
"""The number that the kernel gives the host's own (PROC_PID_INIT_INO)."""
_IN_CGROUP = (("docker", "docker"), ("kubepods", "kubernetes"), ("containerd", "containerd"), ("libpod", "podman"), ("lxc", "lxc"))


def look_around(root: str = "/") -> Surroundings:
    """Find out where the host stands; files of a container are believed before names of its cgroup.

    With cgroups of version 2 a container may show no name of its kind; that it counts processes of its own it does show.
    """
    container = None
    if os.path.exists(os.path.join(root, ".dockerenv")):
        container = "docker"
    elif os.path.exists(os.path.join(root, "run/.containerenv")):
        container = "podman"
    else:
        cgroup = procfs.read_text(os.path.join(root, "proc/1/cgroup"), 65536) or ""
        container = next((name for word, name in _IN_CGROUP if word in cgroup), None)
    version = (procfs.read_text(os.path.join(root, "proc/version"), 4096) or "").lower()
    wsl = "microsoft" in version
    if container is None and not wsl and _own_processes(root):
        # A distribution of WSL has its own, too, and is no container.
        container = "its own process ids"
    return Surroundings(container, "a hypervisor" if procfs.virtual(root) else None, wsl)


def _own_processes(root: str) -> bool:
    try:
        return os.readlink(os.path.join(root, "proc/self/ns/pid")) not in _FIRST_PID_NAMESPACE
    except OSError:
        return False


def describe(around: Surroundings) -> str:
    """Say it in a few words."""
    parts = []
    if around.wsl:
        parts.append("WSL")
    if around.container:
        parts.append("a container (%s)" % around.container)
    if around.virtual and not around.wsl:
        parts.append("a virtual machine")
    return " in ".join(parts) or "a host of its own"


def judge_limits(thresholds: Thresholds, root: str = "/") -> list[Judgement]:
    """Judge shared memory, descriptors and locked memory of this process: what NCCL and data loaders run into first."""
    import resource

    told = []
    total = _shm_bytes(os.path.join(root, "dev/shm"))
    limit = thresholds["gpu.shm_gib"]
    if total is None:
        told.append(Judgement("skipped", "shared-memory", "there is no /dev/shm here"))
    else:
        small = total / (1 << 30) < limit.value
        told.append(
            Judgement(
                "degraded" if small else "ok", "shared-memory", "shared memory is %s" % ("small" if small else "large enough"),
                None, round(total / (1 << 30), 3), "GiB", limit.value, limit.provenance, (),
                "start the container with --shm-size=16g or --ipc=host, or remount it larger" if small else None,
            )
        )  # fmt: skip
    for code, kind, name, factor, action in (
        ("open-files", resource.RLIMIT_NOFILE, "gpu.open_files", 1, "ulimit -n 65536 in the job, or raise it in limits.conf"),
        ("locked-memory", resource.RLIMIT_MEMLOCK, "gpu.locked_memory_mib", 1 << 20,
         "ulimit -l unlimited in the job; docker: --ulimit memlock=-1"),
    ):  # fmt: skip
        if code == "locked-memory" and not os.path.isdir(os.path.join(root, "sys/class/infiniband")):
            # Only what is registered for RDMA counts against it.
            continue
        soft, hard = resource.getrlimit(kind)
        limit = thresholds[name]
        low = soft != resource.RLIM_INFINITY and soft / factor < limit.value
        raisable = hard == resource.RLIM_INFINITY or hard / factor >= limit.value
        shown = "unlimited" if soft == resource.RLIM_INFINITY else round(soft / factor, 3)
        told.append(
            Judgement(
                # What a program can raise by itself holds nobody up.
                "degraded" if low and not raisable else "ok", code,
                "the limit of %s is %s" % (code.replace("-", " "), shown) + ("; a program can raise it" if low and raisable else ""),
                None, shown, limit.unit, limit.value, limit.provenance, (), action if low and not raisable else None,
            )
        )  # fmt: skip
    return told


def _shm_bytes(path: str) -> int | None:
    try:
        state = os.statvfs(path)
    except OSError:
        return None
    return state.f_blocks * state.f_frsize


def judge_modules(multi_gpu: bool, root: str = "/") -> list[Judgement]:
    """Judge the driver's modules: without nvidia_uvm no CUDA program starts."""
    text = procfs.read_text(os.path.join(root, "proc/modules"), 1 << 20)
    if text is None:
        return [Judgement("skipped", "driver-modules", "loaded modules cannot be listed here")]
    loaded = {line.split()[0] for line in text.splitlines() if line.split()}
    if "nvidia" not in loaded:
        # The driver answers all the same: it is built in, or this is a sandbox's list.
        return [Judgement("skipped", "driver-modules", "the list of modules does not show the driver")]
    if "nvidia_uvm" not in loaded:
        return [
            Judgement(
                "degraded", "uvm-not-loaded", "the module nvidia_uvm is not loaded: no CUDA program starts until it is",
                action="modprobe nvidia_uvm, or run nvidia-modprobe -u as root",
            )
        ]  # fmt: skip
    infiniband = os.path.isdir(os.path.join(root, "sys/class/infiniband"))
    if multi_gpu and infiniband and not {"nvidia_peermem", "nv_peer_mem"} & loaded:
        return [Judgement("ok", "driver-modules", "nvidia_uvm is loaded; nvidia_peermem is not, and is needed only without DMA-BUF")]
    return [Judgement("ok", "driver-modules", "nvidia_uvm is loaded")]


def judge_numa(bus_ids: Iterable[str], root: str = "/") -> list[Judgement]:
    """Judge what the kernel knows of the GPUs' place, and the CPUs' governor."""
    told = []
    nodes = [name for name in _listed(os.path.join(root, "sys/devices/system/node")) if name.startswith("node") and name[4:].isdigit()]
    unknown = []
    for bus in bus_ids:
        text = procfs.read_text(os.path.join(root, "sys/bus/pci/devices", bus, "numa_node"), 64)
        if text is not None and text.strip() == "-1":
            unknown.append(bus)
    if len(nodes) > 1 and unknown:
        told.append(
            Judgement(
                "degraded", "numa-unknown", "the firmware does not say which memory %d GPUs are near: processes may be placed badly" % len(unknown),
                value=len(unknown), unit="GPUs", evidence=tuple(unknown[:8]), action="enable it in the BIOS; until then bind by hand (numactl)",
            )
        )  # fmt: skip
    governor = procfs.read_text(os.path.join(root, "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"), 64)
    if governor is None:
        told.append(Judgement("skipped", "cpu-governor", "there is no CPU governor here"))
    else:
        saving = governor.strip() == "powersave" and not _scales_in_hardware(root)
        told.append(
            Judgement(
                "degraded" if saving else "ok", "cpu-governor", "the CPUs' governor is %s" % governor.strip(), value=governor.strip(),
                action="cpupower frequency-set -g performance" if saving else None,
            )
        )  # fmt: skip
    return told


def judge_iommu(bus_ids: Iterable[str], domain_in_log: str | None, root: str = "/") -> list[Judgement]:
    """Say whether the IOMMU translates what the GPUs send: it matters where GPUs reach each other over PCIe, which is asked elsewhere."""
    kinds = {}
    for number, bus in enumerate(bus_ids):
        text = procfs.read_text(os.path.join(root, "sys/bus/pci/devices", bus, "iommu_group/type"), 64)
        if text is not None and text.strip():
            kinds[number] = text.strip()
    found = procfs.iommu(root, kinds, domain_in_log, {})
    if found.mode == "translated":
        return [
            Judgement(
                "ok", "iommu-translated", "the IOMMU translates what devices send: GPUs that reach each other over PCIe may be slow or hang",
                None, found.mode, evidence=(found.source,), action="ask whether any pair does: rdiag topo; iommu=pt on the kernel's command line helps",
            )
        ]  # fmt: skip
    if found.mode == "unknown":
        return [Judgement("skipped", "iommu", "whether the IOMMU translates is not known", evidence=(found.source,))]
    return [Judgement("ok", "iommu", "the IOMMU is %s" % ("off" if found.mode == "off" else "passing through"), evidence=(found.source,))]


def _scales_in_hardware(root: str) -> bool:
    # There "powersave" is the name of the usual, dynamic way.
    driver = procfs.read_text(os.path.join(root, "sys/devices/system/cpu/cpu0/cpufreq/scaling_driver"), 64) or ""
    return driver.strip() in {"intel_pstate", "amd-pstate-epp", "amd_pstate_epp"}


def _listed(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []
