"""How the GPUs of a host are joined, and what NCCL will make of it.

Reads the link matrix and the P2P matrices of nvidia-smi, the PCIe tree in sysfs, lspci, the NVIDIA driver's files and the
kernel log. Starts no CUDA context and needs no root; what only root may see is ``unknown`` without it.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import Any

    from probes.lib.gpu.judgement import Judgement
    from probes.lib.gpu.nccl_paths import Level
    from probes.lib.gpu.pci import Device
    from probes.lib.gpu.topo_pairs import Pair as Joined
    from probes.lib.gpu.topo_reading import Facts
    from probes.lib.gpu.topo_reading import Gpu as Found
    from remote_diag.probe import Context

EFFECTS = ("reads-files", "runs-commands")
LEVELS = ("LOC", "NVL", "NVB", "C2C", "PIX", "PXB", "P2C", "PXN", "PHB", "SYS")
"""NCCL's distances, near to far."""
MAX_FINDINGS = 300


@dataclass(frozen=True)
class Params:
    """Where to look, and what to assume."""

    __pydantic_config__ = {"extra": "forbid", "allow_inf_nan": False, "use_attribute_docstrings": True}

    gpus: int | None = None
    """How many GPUs there should be; None where nobody said."""
    gpus_from_inventory: bool = False
    """Whether that number is the inventory's, and was not given for this run."""
    p2p_level: str | None = None
    """NCCL_P2P_LEVEL to assume, such as SYS; None for what is set on the host."""
    root: str = "/"
    """Where the host's files are; another folder in a container that mounts them."""

    def __post_init__(self) -> None:
        """Check the ranges."""
        if self.gpus is not None and not 0 <= self.gpus <= 1024:
            raise ValueError("gpus must be 0 to 1024")
        if self.p2p_level is not None and self.p2p_level not in LEVELS:
            raise ValueError("p2p_level must be one of %s" % ", ".join(LEVELS))
        if not self.root.startswith("/"):
            raise ValueError("root must be an absolute path")


@dataclass(frozen=True)
class Absent:
    """Why a value is not there."""

    __pydantic_config__ = {"extra": "forbid", "allow_inf_nan": False, "use_attribute_docstrings": True}

    reason: str
    """not-supported, not-permitted, gpu-lost, reset-required, deprecated, error, empty, not-reported, timeout."""
    text: str
    """What was printed instead."""


@dataclass(frozen=True)
class Gpu:
    """One GPU, whoever lists it."""

    __pydantic_config__ = {"extra": "forbid", "allow_inf_nan": False, "use_attribute_docstrings": True}

    index: int | None
    """nvidia-smi's; None for a card that it does not list."""
    uuid: str | None
    """None where nobody tells it."""
    bus_id: str | None
    """``0000:1b:00.0``; None in what was saved from ``topo -m``."""
    name: str | None
    """Model."""
    status: str
    """ok, degraded, fail or unknown: the worst finding about this card."""
    listed_by: tuple[str, ...]
    """nvidia-smi, driver (/proc/driver/nvidia), pci."""
    idle: bool | None
    """Whether it did nothing when it was looked at."""
    pcie_speed_gts: float | None
    """Of its link now, GT/s of a lane; an idle card lowers it."""
    pcie_speed_max_gts: float | None
    """The most that card and slot can do, GT/s."""
    pcie_gen: int | None
    """Generation that the speed now belongs to."""
    pcie_gen_max: int | None
    """Generation of the most that card and slot can do."""
    pcie_width: int | None
    """Lanes now."""
    pcie_width_max: int | None
    """Lanes that card and slot can use."""
    numa_node: int | None
    """NUMA node that it belongs to."""
    cpu_affinity: str | None
    """CPUs near it, such as 0-55,112-167."""
    iommu_group: int | None
    """Its IOMMU group."""
    iommu_type: str | None
    """identity, DMA or DMA-FQ: whether that group translates."""
    bar1_mib: int | None
    """Window through which peers see its memory, MiB."""
    driver: str | None
    """Kernel driver that holds it."""
    slot: str | None
    """Number of its slot as the board names it, of the card or the nearest bridge that has one; None where nobody tells."""
    path: tuple[str, ...]
    """Bus ids of the bridges above it, the root port first."""
    nearest_nics: tuple[str, ...]
    """NICs that are nearest by the link matrix."""
    nic_link: str | None
    """How the nearest NICs are joined to it: PIX, PXB, ...; up to PXB NCCL lets the NIC read its memory."""
    missing: dict[str, Absent]
    """Why values are None, by the field's name."""

    def __post_init__(self) -> None:
        """Check that no value is absent without a reason."""
        for name in MEASURED:
            if getattr(self, name) is None and name not in self.missing:
                raise ValueError("gpu %s: no reason why %s is missing" % (self.index, name))


MEASURED = (
    "uuid", "bus_id", "name", "idle", "pcie_speed_gts", "pcie_speed_max_gts", "pcie_gen", "pcie_gen_max", "pcie_width",
    "pcie_width_max", "numa_node", "cpu_affinity", "iommu_group", "iommu_type", "bar1_mib",
)  # fmt: skip
"""Fields of a GPU that are never None without a reason."""


@dataclass(frozen=True)
class Nic:
    """One network or InfiniBand device."""

    __pydantic_config__ = {"extra": "forbid", "allow_inf_nan": False, "use_attribute_docstrings": True}

    label: str | None
    """nvidia-smi's: NIC0; None for one that only the PCI bus shows."""
    names: tuple[str, ...]
    """mlx5_0, ens1f0, ...; none where nobody tells."""
    bus_id: str | None
    """None where it cannot be found on the PCI bus."""
    numa_node: int | None
    """NUMA node, None where that is not known."""
    pcie_speed_gts: float | None
    """Of its link now, GT/s; None where that is not known."""
    pcie_width: int | None
    """Lanes now; None where that is not known."""
    path: tuple[str, ...]
    """Bus ids of the bridges above it, the root port first."""


@dataclass(frozen=True)
class Bridge:
    """A bridge above a GPU or NIC: root port, or port of a switch."""

    __pydantic_config__ = {"extra": "forbid", "allow_inf_nan": False, "use_attribute_docstrings": True}

    bus_id: str
    """``0000:16:01.0``."""
    parent: str | None
    """Bridge above it; None for a root port."""
    root: str
    """Host bridge, such as pci0000:16."""
    vendor_id: str
    """``8086``, ``1000``, ..."""
    speed_gts: float | None
    """Of its own link now, GT/s; None where that is not known."""
    speed_max_gts: float | None
    """The most that it can do, GT/s; None where that is not known."""
    width: int | None
    """Lanes now; None where that is not known."""
    width_max: int | None
    """Lanes that it can use; None where that is not known."""
    numa_node: int | None
    """NUMA node, None where that is not known."""
    acs: tuple[str, ...] | None
    """Access control services that are on: ReqRedir, ...; None where that is not known or where there are none."""
    acs_redirect: bool | None
    """Whether it sends traffic between peers up to the root; None where that is not known."""


@dataclass(frozen=True)
class Link:
    """How two devices of the matrix are joined; each pair once."""

    __pydantic_config__ = {"extra": "forbid", "allow_inf_nan": False, "use_attribute_docstrings": True}

    a: str
    """GPU0, NIC3, ..."""
    b: str
    """The other one."""
    link: str
    """NV, PIX, PXB, PHB, NODE or SYS."""
    nvlinks: int | None
    """How many NVLinks are bonded; None for other links."""


@dataclass(frozen=True)
class Pair:
    """Two GPUs, and the way that NCCL will take between them."""

    __pydantic_config__ = {"extra": "forbid", "allow_inf_nan": False, "use_attribute_docstrings": True}

    a: int
    """Index of one GPU."""
    b: int
    """Index of the other one."""
    link: str | None
    """NV18, PIX, SYS, ...; None where that is not known."""
    p2p_read: str | None
    """OK, CNS, GNS, TNS, NS, DR or U, the worse of both directions; None where it was not answered."""
    p2p_write: str | None
    """As p2p_read, for writes."""
    p2p_nvlink: str | None
    """As p2p_read, for P2P over NVLink; NS on cards that have none."""
    p2p_atomics: str | None
    """As p2p_read, for atomic operations."""
    p2p_pcie: str | None
    """As p2p_read, for P2P over PCIe."""
    transport: str
    """nvlink, p2p, shm (through the host's memory), net, refused (NCCL will not start) or unknown."""
    certain: bool
    """False where something that decides is taken for granted."""
    reason: str
    """Why that way."""


@dataclass(frozen=True)
class Result:
    """The topology of a host."""

    __pydantic_config__ = {"extra": "forbid", "allow_inf_nan": False, "use_attribute_docstrings": True}

    source: str
    """host, or saved."""
    gpus: tuple[Gpu, ...]
    """By index; cards that nvidia-smi does not list come last."""
    expected_gpus: int | None
    """How many there should be; None where nobody said."""
    nics: tuple[Nic, ...]
    """Network and InfiniBand devices."""
    bridges: tuple[Bridge, ...]
    """Every bridge above a GPU or NIC, parents first."""
    links: tuple[Link, ...]
    """The matrix of ``topo -m``, each pair once; pairs that could not be read are not in it."""
    matrix_complete: bool
    """Whether every cell of the matrix could be read and both halves agree."""
    pairs: tuple[Pair, ...]
    """Every two GPUs."""
    islands: tuple[tuple[int, ...], ...]
    """GPUs, by index, that reach each other without the host's memory; empty where the way of a pair is not known."""
    p2p_level: str
    """Distance up to which NCCL talks directly: LOC, NVL, PIX, PXB, PHB, SYS."""
    p2p_level_source: str
    """What sets it."""
    nccl_settings: dict[str, str]
    """Variables of NCCL that decide about paths, with who sets them."""
    driver_version: str | None
    """Of the kernel module; None where none is loaded or nobody looked."""
    open_kernel_module: bool | None
    """Whether it is the open one."""
    cpu_vendor: str | None
    """intel, amd, arm, ...; None where nobody looked."""
    numa_nodes: int | None
    """How many there are; None where that is not known."""
    virtual_machine: bool | None
    """Whether the host is one: its PCIe tree is then an invention of the hypervisor."""
    iommu: str | None
    """off, passthrough, translated or unknown; None where nobody looked."""
    iommu_source: str | None
    """What says so."""
    kernel_options: dict[str, str]
    """Options of the kernel's command line that matter for GPUs."""
    uvm_hmm: bool | None
    """Whether heterogeneous memory management is on in nvidia_uvm; None where that is not known."""
    unread: tuple[str, ...]
    """What could not be read, and why: sources that gave nothing, damaged cells."""


def run(params: Params, context: Context) -> Result:
    """Look at everything, judge, tell."""
    from probes.lib.gpu import nccl_paths, topo_reading

    def step(done: int, total: int, label: str) -> None:
        context.progress(done, total, unit="steps", label=label)

    facts = topo_reading.gather(params.root, os.environ, max(1.0, context.remaining() - 5.0), step)
    if params.p2p_level is not None:
        facts.settings["NCCL_P2P_LEVEL"] = nccl_paths.Setting("NCCL_P2P_LEVEL", params.p2p_level, "the command line")
        facts.settings.pop("NCCL_P2P_DISABLE", None)
    return _answer(facts, params, context)


def parse(data: bytes, params: Params, context: Context) -> Result:
    """Read and judge a saved ``nvidia-smi topo -m``; a ValueError says why it is none."""
    from probes.lib.gpu import saved_text, topo_reading

    return _answer(topo_reading.saved(saved_text.decode(data), params.p2p_level), params, context)


def _answer(facts: Facts, params: Params, context: Context) -> Result:
    from probes.lib.gpu import nccl_paths, topo_checks, topo_pairs
    from probes.lib.gpu.census import expectation

    expected = expectation(params.gpus, from_inventory=params.gpus_from_inventory)
    limit = nccl_paths.level(facts.settings, gpus=len(facts.gpus), cpu_vendor=facts.cpu_vendor)
    pairs = topo_pairs.pairs(facts, limit)
    judgements = topo_checks.judge(facts, limit, pairs, expected)
    for judgement in judgements[:MAX_FINDINGS]:
        context.finding(**judgement._asdict())
    return _result(facts, params, limit, pairs, judgements)


def _result(facts: Facts, params: Params, limit: Level, pairs: list[Joined], judgements: list[Judgement]) -> Result:
    from probes.lib.gpu import topo_pairs, topo_reading

    matrix = facts.matrix
    hmm = facts.driver_params.get("nvidia_uvm.uvm_disable_hmm")
    return Result(
        source=facts.source,
        gpus=tuple(_gpu(facts, gpu, judgements) for gpu in facts.gpus),
        expected_gpus=params.gpus,
        nics=_nics(facts),
        bridges=_bridges(facts),
        links=() if matrix is None else tuple(
            Link(a, b, link.kind, link.nvlinks)
            for (a, b), link in matrix.links.items() if matrix.devices.index(a) < matrix.devices.index(b)
        ),
        matrix_complete=matrix is not None and matrix.complete,
        pairs=tuple(
            Pair(
                _index(pair.a), _index(pair.b), pair.link, pair.read, pair.write, pair.others["nvlink"], pair.others["atomics"],
                pair.others["pcie"], pair.way.transport, pair.way.certain, pair.way.reason,
            )
            for pair in pairs
        ),
        islands=topo_pairs.islands(facts, pairs),
        p2p_level=limit.name,
        p2p_level_source=limit.source,
        nccl_settings={name: "%s (%s)" % (setting.value, setting.source) for name, setting in sorted(facts.settings.items())},
        driver_version=None if facts.module is None else facts.module.version,
        open_kernel_module=None if facts.module is None else facts.module.open,
        cpu_vendor=facts.cpu_vendor,
        numa_nodes=facts.numa_nodes,
        virtual_machine=facts.virtual,
        iommu=None if facts.iommu is None else facts.iommu.mode,
        iommu_source=None if facts.iommu is None else facts.iommu.source,
        kernel_options=facts.options,
        uvm_hmm=None if hmm not in {"Y", "N"} else hmm == "N",
        unread=topo_reading.unread(facts),
    )  # fmt: skip


def _index(gpu: Found) -> int:
    if gpu.index is None:
        raise ValueError("a pair of GPUs that nvidia-smi does not list")
    return gpu.index


def _gpu(facts: Facts, gpu: Found, judgements: list[Judgement]) -> Gpu:
    from probes.lib.gpu import pci, topo_bus_checks, topo_pairs, topo_reading
    from probes.lib.gpu.missing import Missing

    saved = facts.source == "saved"
    values: dict[str, Any] = dict.fromkeys(MEASURED)
    absent: dict[str, Absent] = {}
    device = None if facts.tree is None else facts.tree.devices.get(gpu.bus_id)
    why = Absent("not-reported", "the matrix does not tell" if saved else "not on the PCI bus that can be seen here")
    if gpu.lost is not None:
        why = Absent("gpu-lost", gpu.lost)
    if device is not None and gpu.lost is None:
        raw = {
            "pcie_speed_gts": device.speed_gts, "pcie_width": device.width, "numa_node": device.numa_node, "cpu_affinity": device.cpus,
            "iommu_group": device.iommu_group, "iommu_type": device.iommu_type,
            "bar1_mib": device.bar1_bytes if isinstance(device.bar1_bytes, Missing) else device.bar1_bytes >> 20,
        }  # fmt: skip
        for name, value in raw.items():
            if isinstance(value, Missing):
                absent[name] = Absent(value.reason, value.text)
            else:
                values[name] = value
        speed_max = topo_bus_checks.at_best(facts, device, "speed_max_gts")
        width_max = topo_bus_checks.at_best(facts, device, "width_max")
        values.update(
            pcie_speed_max_gts=speed_max, pcie_width_max=None if width_max is None else int(width_max),
            pcie_gen=pci.generation(device.speed_gts), pcie_gen_max=None if speed_max is None else pci.generation(speed_max),
        )  # fmt: skip
        why = Absent("not-reported", "")
    if facts.matrix is not None:
        values["numa_node"] = facts.matrix.numa_node.get(gpu.label) if values["numa_node"] is None else values["numa_node"]
        values["cpu_affinity"] = values["cpu_affinity"] or facts.matrix.cpu_affinity.get(gpu.label)
    values.update(uuid=gpu.uuid, bus_id=None if saved else gpu.bus_id, name=gpu.name, idle=gpu.idle)
    for name, value in values.items():
        if value is None:
            absent.setdefault(name, why)
        else:
            absent.pop(name, None)
    nics, nic_link = topo_pairs.nearest_nics(facts, gpu.label)
    return Gpu(
        index=gpu.index, status=_status(gpu, facts, judgements), listed_by=gpu.sources, driver=None if device is None else device.driver,
        slot=topo_reading.slot(facts, (gpu.bus_id,) if device is None else device.path),
        path=() if device is None else device.path[:-1], nearest_nics=nics, nic_link=nic_link, missing=absent, **values,
    )  # fmt: skip


def _status(gpu: Found, facts: Facts, judgements: list[Judgement]) -> str:
    levels = {item.level for item in judgements if item.subject in {gpu.subject, gpu.label}}
    matrix = facts.matrix
    if gpu.index is None or (matrix is not None and any((gpu.label, name) not in matrix.links for name in matrix.devices if name != gpu.label)):
        levels.add("unknown")
    return next((level for level in ("fail", "degraded", "unknown") if level in levels), "ok")


def _nics(facts: Facts) -> tuple[Nic, ...]:
    from probes.lib.gpu.missing import known

    matrix, devices = facts.matrix, {} if facts.tree is None else facts.tree.devices
    by_name = {name: device for device in devices.values() if device.is_nic for name in device.interfaces}
    found, used = [], set()
    for label in () if matrix is None else matrix.nics:
        name = matrix.nic_names.get(label) if matrix is not None and label.startswith("NIC") else label
        device = by_name.get(name or "")
        if device is not None:
            used.add(device.bus_id)
        found.append(_nic(label, device, (name,) if name else ()))
    for bus_id, device in devices.items():
        if device.is_nic and bus_id not in used and device.interfaces and known(device.width) is not None:
            found.append(_nic(None, device, ()))
    return tuple(found)


def _nic(label: str | None, device: Device | None, names: tuple[str, ...]) -> Nic:
    from probes.lib.gpu.missing import known

    if device is None:
        return Nic(label, names, None, None, None, None, ())
    return Nic(
        label, device.interfaces or names, device.bus_id, known(device.numa_node), known(device.speed_gts), known(device.width),
        device.path[:-1],
    )  # fmt: skip


def _bridges(facts: Facts) -> tuple[Bridge, ...]:
    from probes.lib.gpu.missing import Missing, known
    from probes.lib.gpu.topo_bus_checks import acs_of

    if facts.tree is None:
        return ()
    ours = {gpu.bus_id for gpu in facts.gpus}
    ends = [device for device in facts.tree.devices.values() if device.bus_id in ours or (device.is_nic and device.interfaces)]
    chosen: dict[str, tuple[int, Device]] = {}
    for end in ends:
        for depth, bridge in enumerate(facts.tree.bridges_above(end.bus_id)):
            chosen[bridge.bus_id] = (depth, bridge)
    found = []
    for _, bridge in sorted(chosen.values(), key=lambda item: (item[1].root, item[0], item[1].bus_id)):
        acs = acs_of(facts, bridge)
        none = isinstance(acs, Missing)
        redirect = (False if acs.reason == "not-supported" else None) if isinstance(acs, Missing) else acs.redirects
        found.append(
            Bridge(
                bridge.bus_id, bridge.path[-2] if len(bridge.path) > 1 else None, bridge.root, "%04x" % bridge.vendor_id,
                known(bridge.speed_gts), known(bridge.speed_max_gts), known(bridge.width), known(bridge.width_max),
                known(bridge.numa_node), None if none else tuple(getattr(acs, "flags", ())), redirect,
            )
        )
    return tuple(found)
