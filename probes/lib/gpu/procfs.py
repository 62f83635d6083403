"""What the NVIDIA driver and the kernel say in files: /proc/driver/nvidia, module parameters, IOMMU, fabric manager.

Every reader takes the folder where the host's files are (``/`` by default), and answers with None or an empty mapping
where there is nothing to read.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field

from probes.lib.gpu.busid import normalise

DRIVER = "proc/driver/nvidia"
FABRIC_LOG = "var/log/fabricmanager.log"
MAX_FILE = 64 << 10
MAX_LOG = 1 << 20
"""Bytes at the end of the fabric manager's log that are read."""
CMDLINE_OPTIONS = (
    "iommu", "intel_iommu", "amd_iommu", "iommu.passthrough", "iommu.strict", "pcie_aspm", "pcie_aspm.policy", "pcie_port_pm", "pci",
    "nvidia-drm.modeset", "numa_balancing", "mitigations", "processor.max_cstate", "intel_idle.max_cstate", "default_hugepagesz",
    "hugepages", "hugepagesz",
)  # fmt: skip
"""Options of the kernel that matter for GPUs; the rest of the line is not ours to show."""

_VERSION = re.compile(r"NVRM version:.*?Kernel Module(?: for \S+)?\s+(\d+(?:\.\d+)+)")
_FABRIC = re.compile(r"^\[(\w{3} \d+ \d{4} \d\d:\d\d:\d\d)\] \[(\w+)\] (?:\[tid \d+\] )?(.*)$")
_SWITCH = re.compile(r"(fatal|non-fatal) error (\d+).*?pci bus id ([0-9a-fA-F:.]+)(?:.*?port (\d+))?")


@dataclass(frozen=True)
class KernelModule:
    """The driver's part in the kernel."""

    version: str
    """Two or three numbers: compare them as numbers, not as text."""
    open: bool
    """Whether it is the open kernel module, which Blackwell needs."""


@dataclass(frozen=True)
class GpuInformation:
    """/proc/driver/nvidia/gpus/*/information."""

    bus_id: str
    model: str | None
    uuid: str | None
    """None while the driver does not know it: not initialised, or lost."""
    minor: int | None
    """N of /dev/nvidiaN; not the index of nvidia-smi."""
    vbios: str | None
    firmware: str | None
    excluded: bool | None
    readable: bool
    """Whether the file could be read; on a card that hangs it may not."""


@dataclass(frozen=True)
class FabricLog:
    """The end of the fabric manager's log."""

    readable: bool
    errors: tuple[str, ...] = ()
    """Lines of level ERROR, CRITICAL or FATAL, the last twenty."""
    warnings: int = 0
    lines: int = 0
    first: str | None = None
    """Stamp of the first line that was read."""
    switch_errors: tuple[tuple[str, int, str], ...] = ()
    """(fatal or non-fatal, code, bus id) of the switch."""


@dataclass(frozen=True)
class Iommu:
    """How devices reach memory."""

    mode: str
    """``off``, ``passthrough``, ``translated`` or ``unknown``."""
    source: str
    """What says so."""
    groups: int | None
    """How many IOMMU groups there are; None where that could not be counted."""


def read_text(path: str, limit: int = MAX_FILE) -> str | None:
    """Return the contents of a small file, None where it cannot be read."""
    try:
        with open(path, "rb") as file:
            return file.read(limit).decode("utf-8", "replace")
    except OSError:
        return None


def kernel_module(root: str = "/") -> KernelModule | None:
    """Return the loaded kernel module, None where there is none."""
    return parse_version(read_text(os.path.join(root, DRIVER, "version")) or "")


def parse_version(text: str) -> KernelModule | None:
    """Read /proc/driver/nvidia/version."""
    found = _VERSION.search(text)
    return None if found is None else KernelModule(found.group(1), "Open Kernel Module" in text.splitlines()[0])


def gpus(root: str = "/") -> dict[str, GpuInformation] | None:
    """Return what the driver lists, by bus id; None where no driver is loaded."""
    if not os.path.isdir(os.path.join(root, DRIVER)):
        return None
    folder = os.path.join(root, DRIVER, "gpus")
    try:
        names = sorted(os.listdir(folder))
    except OSError:
        return {}
    found = {}
    for name in names:
        bus_id = normalise(name)
        if bus_id is not None:
            found[bus_id] = parse_information(bus_id, read_text(os.path.join(folder, name, "information")))
    return found


def parse_information(bus_id: str, text: str | None) -> GpuInformation:
    """Read one information file; ``?`` in a value says that the driver does not know it."""
    values = _fields(text or "")
    known = {name: value for name, value in values.items() if value and "?" not in value}
    minor = known.get("Device Minor", "")
    excluded = known.get("GPU Excluded")
    return GpuInformation(
        bus_id, known.get("Model"), known.get("GPU UUID"), int(minor) if minor.isdigit() else None, known.get("Video BIOS"),
        known.get("GPU Firmware"), None if excluded is None else excluded == "Yes", bool(text),
    )  # fmt: skip


def params(root: str = "/") -> dict[str, str]:
    """Return the driver's parameters: ``EnableResizableBar``, ``RegistryDwords``, ...; those of its other modules with a prefix."""
    found = {name: value.strip('"') for name, value in _fields(read_text(os.path.join(root, DRIVER, "params")) or "").items()}
    for module in ("nvidia_uvm", "nvidia_peermem"):
        folder = os.path.join(root, "sys/module", module, "parameters")
        try:
            names = sorted(os.listdir(folder))
        except OSError:
            continue
        for name in names:
            value = read_text(os.path.join(folder, name), 4096)
            if value is not None:
                found["%s.%s" % (module, name)] = value.strip()
    return found


def _fields(text: str) -> dict[str, str]:
    pairs = (line.partition(":") for line in text.splitlines() if ":" in line)
    return {name.strip(): value.strip() for name, _, value in pairs}


def kernel_options(root: str = "/") -> dict[str, str]:
    """Return the options of the kernel's command line that matter for GPUs."""
    found = {}
    for word in (read_text(os.path.join(root, "proc/cmdline")) or "").split():
        name, _, value = word.partition("=")
        if name in CMDLINE_OPTIONS:
            found[name] = value
    return found


def virtual(root: str = "/") -> bool | None:
    """Return whether the host is a virtual machine; None where nobody can tell."""
    text = read_text(os.path.join(root, "proc/cpuinfo"))
    if text is None:
        return None
    lines = [line for line in text.splitlines() if line.startswith("flags")]
    if lines:
        return " hypervisor" in lines[0]
    return True if os.path.isdir(os.path.join(root, "sys/hypervisor/properties")) else None


def cpu_vendor(root: str = "/") -> str | None:
    """Return ``intel``, ``amd``, ``arm``, ``power`` or the name as /proc/cpuinfo says; None where it does not."""
    text = read_text(os.path.join(root, "proc/cpuinfo")) or ""
    for line in text.splitlines():
        name, _, value = line.partition(":")
        name, value = name.strip(), value.strip()
        if name == "vendor_id":
            return {"GenuineIntel": "intel", "AuthenticAMD": "amd"}.get(value, value.lower())
        if name == "CPU implementer":
            return "arm"
        if name == "cpu" and value.startswith("POWER"):
            return "power"
    return None


def iommu(root: str, group_types: dict[int, str], domain_in_log: str | None, options: dict[str, str]) -> Iommu:
    """Return how the IOMMU treats the GPUs.

    Args:
        root: where the host's files are.
        group_types: /sys/kernel/iommu_groups/N/type of the GPUs' groups.
        domain_in_log: what the kernel said at boot.
        options: of the kernel's command line.
    """
    try:
        count: int | None = len(os.listdir(os.path.join(root, "sys/kernel/iommu_groups")))
    except OSError:
        count = None
    kinds = set(group_types.values())
    if kinds:
        translated = kinds - {"identity"}
        return Iommu("translated" if translated else "passthrough", "type of the GPUs' IOMMU groups: %s" % ", ".join(sorted(kinds)), count)
    if count == 0:
        return Iommu("off", "there are no IOMMU groups", count)
    if domain_in_log is not None:
        return Iommu(domain_in_log.lower(), "kernel log: default domain type", count)
    if options.get("iommu") == "pt":
        return Iommu("passthrough", "iommu=pt on the kernel's command line", count)
    return Iommu("unknown", "neither groups nor the kernel log tell", count)


def fabric_log(root: str = "/") -> FabricLog | None:
    """Return the end of the fabric manager's log; None where there is none."""
    path = os.path.join(root, FABRIC_LOG)
    if not os.path.exists(path):
        return None
    try:
        with open(path, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - MAX_LOG))
            text = file.read(MAX_LOG).decode("utf-8", "replace")
    except OSError:
        return FabricLog(readable=False)
    return parse_fabric_log(text)


def parse_fabric_log(text: str) -> FabricLog:
    """Read lines of the fabric manager's log; messages go on in lines without a stamp."""
    log = _Fabric()
    for line in text.splitlines():
        found = _FABRIC.match(line)
        if found is None:
            continue
        stamp, level, message = found.groups()
        log.lines += 1
        log.first = log.first or stamp
        if level in {"ERROR", "CRITICAL", "FATAL"}:
            log.errors.append("%s %s" % (stamp, message))
            switch = _SWITCH.search(message)
            address = normalise(switch.group(3)) if switch else None
            if switch and address:
                log.switches.append((switch.group(1), int(switch.group(2)), address))
        log.warnings += level.startswith("WARN")
    return FabricLog(
        readable=True, errors=tuple(log.errors[-20:]), warnings=log.warnings, lines=log.lines, first=log.first,
        switch_errors=tuple(log.switches[-200:]),
    )  # fmt: skip


@dataclass
class _Fabric:
    errors: list[str] = field(default_factory=list)
    switches: list[tuple[str, int, str]] = field(default_factory=list)
    warnings: int = 0
    lines: int = 0
    first: str | None = None
