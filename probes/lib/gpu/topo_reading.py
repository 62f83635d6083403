"""Gathers what a host tells about how its GPUs are joined: nvidia-smi, sysfs, lspci, the driver's files, the kernel log.

Each source by itself: one that is missing, hangs or lies leaves the others, and says why it gave nothing.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from probes.lib.gpu import kernel_log_source, lspci, nccl_paths, pci, procfs, topology
from probes.lib.gpu.busid import normalise
from probes.lib.gpu.missing import Missing, integer, missing, number, word
from probes.lib.gpu.run_smi import SMI, Programs
from probes.lib.gpu.smi_errors import recognise
from probes.lib.gpu.surroundings import look_around
from probes.lib.gpu.unanswered import hang

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Callable, Mapping

    from probes.lib.gpu.run_smi import Said
    from probes.lib.gpu.smi_reading import Trouble

FIELDS = ("index", "uuid", "pci.bus_id", "utilization.gpu", "pstate", "name")
"""Asked of nvidia-smi; the name is the last, so that a comma in it does no harm."""
BUSY_PERCENT = 5.0
SHM = "dev/shm"


@dataclass
class Gpu:
    """One GPU, from whatever source knows it."""

    bus_id: str
    """Its label in what was saved from ``topo -m``, which tells no bus ids."""
    index: int | None = None
    """nvidia-smi's; None for a card that it does not list."""
    uuid: str | None = None
    name: str | None = None
    idle: bool | None = None
    """Whether it did nothing when it was looked at; None where that is not known."""
    sources: tuple[str, ...] = ()
    """Who lists it: nvidia-smi, driver, pci."""
    lost: str | None = None
    """How it shows that it does not answer."""

    @property
    def label(self) -> str:
        """As nvidia-smi calls its row: GPU3."""
        return self.bus_id if self.index is None else "GPU%d" % self.index

    @property
    def subject(self) -> str:
        """How findings name it."""
        if self.bus_id.startswith("GPU"):
            return self.bus_id
        parts = ["gpu", "?" if self.index is None else str(self.index), self.bus_id]
        return " ".join(parts if self.uuid is None else [*parts, self.uuid])


@dataclass
class Facts:
    """Everything that was found."""

    source: str
    """``host`` or ``saved``."""
    gpus: list[Gpu] = field(default_factory=list)
    matrix: topology.Matrix | None = None
    matrix_reason: str = ""
    """Why there is no matrix."""
    peers: dict[str, topology.Peers] = field(default_factory=dict)
    """By capability: read, write, nvlink, atomics, pcie."""
    peers_reason: dict[str, str] = field(default_factory=dict)
    """By capability: why it is not known."""
    tree: pci.Tree | None = None
    devices: Mapping[str, lspci.Device] = field(default_factory=dict)
    """What lspci says, by bus id."""
    lspci_reason: str = ""
    driver_gpus: dict[str, procfs.GpuInformation] | None = None
    module: procfs.KernelModule | None = None
    cpu_vendor: str | None = None
    virtual: bool | None = None
    wsl: bool = False
    container: str | None = None
    """Where this is one: it sees the bus of its host, and not all of the GPUs are its own."""
    numa_nodes: int | None = None
    options: dict[str, str] = field(default_factory=dict)
    driver_params: dict[str, str] = field(default_factory=dict)
    iommu: procfs.Iommu | None = None
    settings: dict[str, nccl_paths.Setting] = field(default_factory=dict)
    shm_bytes: int | None = None
    log: kernel_log_source.Log | None = None
    smi_reason: str = ""
    """Why nvidia-smi did not list the GPUs."""
    smi_listed: bool = False
    hung: bool = False
    """Whether a question to nvidia-smi, or somebody's before it, was not answered in time."""
    troubles: list[Trouble] = field(default_factory=list)
    """What nvidia-smi said is wrong."""
    damaged: list[str] = field(default_factory=list)
    """Lines of nvidia-smi's list and of lspci that could not be read."""


def gather(root: str, environ: Mapping[str, str], remaining: float, step: Callable[[int, int, str], None]) -> Facts:
    """Look at everything on this host.

    Args:
        root: where the host's files are.
        environ: environment of the programs whose NCCL is predicted.
        remaining: seconds for all of it.
        step: is told (done, total, what comes next).
    """
    facts = Facts("host")
    programs = Programs(remaining)
    step(0, 5, "PCIe tree")
    facts.tree = pci.read(root)
    facts.driver_gpus = procfs.gpus(root)
    facts.module = procfs.kernel_module(root)
    facts.cpu_vendor = procfs.cpu_vendor(root)
    facts.virtual = procfs.virtual(root)
    around = look_around(root)
    facts.wsl, facts.container = around.wsl, around.container
    facts.numa_nodes = _numa_nodes(root)
    facts.options = procfs.kernel_options(root)
    facts.driver_params = procfs.params(root)
    facts.settings = nccl_paths.settings(environ, root)
    facts.shm_bytes = _shm(root)
    step(1, 5, "list of GPUs")
    listed = _listed(programs, facts)
    step(2, 5, "link matrix")
    _matrices(programs, facts, len(listed))
    stuck = programs.stuck(SMI)
    if stuck is not None:
        facts.hung = True
        facts.troubles.append(hang(stuck))
    step(3, 5, "lspci")
    _lspci(programs, facts)
    step(4, 5, "kernel log")
    facts.log = kernel_log_source.read(programs)
    facts.gpus = _merged(facts, listed)
    facts.iommu = procfs.iommu(root, _group_types(facts), facts.log.contents.iommu_domain, facts.options)
    step(5, 5, "judging")
    return facts


def saved(text: str, p2p_level: str | None) -> Facts:
    """Return the facts that a saved ``topo -m`` holds.

    Raises:
        topology.NotATopology: it holds no matrix.
    """
    from probes.lib.gpu import smi_identify

    if smi_identify.identify(text).name == "topo_p2p":
        raise topology.NotATopology("this is nvidia-smi topo -p2p: it says who may reach whom, not how they are joined; save topo -m")
    facts = Facts("saved")
    facts.matrix = topology.parse_matrix(text)
    facts.gpus = [Gpu(name, index=int(name[3:])) for name in facts.matrix.gpus]
    if p2p_level is not None:
        facts.settings["NCCL_P2P_LEVEL"] = nccl_paths.Setting("NCCL_P2P_LEVEL", p2p_level, "the command line")
    return facts


def _numa_nodes(root: str) -> int | None:
    try:
        names = os.listdir(os.path.join(root, "sys/devices/system/node"))
    except OSError:
        return None
    return sum(1 for name in names if name.startswith("node") and name[4:].isdigit()) or None


def _shm(root: str) -> int | None:
    try:
        state = os.statvfs(os.path.join(root, SHM))
    except OSError:
        return None
    return state.f_blocks * state.f_frsize


def _listed(programs: Programs, facts: Facts) -> list[Gpu]:
    said = programs.ask(SMI, "--query-gpu=" + ",".join(FIELDS), "--format=csv,noheader,nounits")
    if said.how != "ended":
        facts.smi_reason = said.why
        return []
    found = []
    for line in said.out.splitlines():
        gpu = _row(line)
        if gpu is not None:
            found.append(gpu)
        elif line.strip():
            trouble = recognise(line)
            if trouble is None:
                facts.damaged.append(line.strip()[:200])
            else:
                facts.troubles.append(trouble)
    first: dict[str, Gpu] = {}
    for gpu in found:
        old = first.setdefault(gpu.bus_id, gpu)
        if (old.index, old.uuid) != (gpu.index, gpu.uuid):
            facts.damaged.append("two GPUs at %s: %s and %s" % (gpu.bus_id, old.uuid, gpu.uuid))
    if not said.ok and not found:
        facts.smi_reason = said.why
    elif not said.ok and not facts.troubles:
        facts.damaged.append("nvidia-smi ended with %s after %d lines" % (said.ending, len(found)))
    facts.smi_listed = bool(found)
    return found


def _row(line: str) -> Gpu | None:
    cells = [cell.strip() for cell in line.split(",", len(FIELDS) - 1)]
    if len(cells) != len(FIELDS):
        return None
    index, bus_id = integer(cells[0], high=1024), normalise(cells[2])
    if isinstance(index, Missing) or bus_id is None:
        return None
    use, state, name = number(cells[3], "%", high=100.0), cells[4], word(cells[5])
    idle = None if isinstance(use, Missing) else use < BUSY_PERCENT
    if idle is None and missing(state) is None and state in {"P8", "P12"}:
        idle = True
    return Gpu(
        bus_id, index, cells[1] if cells[1].startswith(("GPU-", "MIG-")) else None, None if isinstance(name, Missing) else name,
        idle, ("nvidia-smi",),
    )  # fmt: skip


def _matrices(programs: Programs, facts: Facts, count: int) -> None:
    said = programs.ask(SMI, "topo", "-m")
    try:
        facts.matrix = topology.parse_matrix(said.out) if said.how == "ended" else None
    except topology.NotATopology as error:
        facts.matrix_reason = str(error) if said.ok else "%s (%s)" % (said.why, error)
    if facts.matrix is None and not facts.matrix_reason:
        facts.matrix_reason = said.why
    for letter, name in topology.CAPABILITIES.items():
        if count < 2 and letter != "r":
            break
        if count < 2:
            facts.peers_reason[name] = "there are not two GPUs"
            continue
        answer = programs.ask(SMI, "topo", "-p2p", letter)
        try:
            if answer.how == "ended":
                facts.peers[name] = topology.parse_p2p(answer.out)
            else:
                facts.peers_reason[name] = answer.why
        except topology.NotATopology as error:
            facts.peers_reason[name] = "%s (%s)" % (_short(answer), error)


def _short(said: Said) -> str:
    return said.command if said.ok else said.why


def _lspci(programs: Programs, facts: Facts) -> None:
    said = programs.ask("lspci", "-D", "-nn", "-vvv")
    if not said.ok:
        facts.lspci_reason = said.why
        return
    facts.devices, damaged = lspci.parse(said.out)
    if not facts.devices:
        facts.lspci_reason = "%s lists no device" % said.command
    facts.damaged.extend("lspci: %s" % line for line in damaged)


def _merged(facts: Facts, listed: list[Gpu]) -> list[Gpu]:
    """Return every GPU that anybody lists, by index, those without one last."""
    found = {gpu.bus_id: gpu for gpu in listed}
    for bus_id, information in (facts.driver_gpus or {}).items():
        gpu = found.setdefault(bus_id, Gpu(bus_id))
        gpu.sources += ("driver",)
        gpu.uuid = gpu.uuid or information.uuid
        gpu.name = gpu.name or information.model
    tree = {} if facts.tree is None else facts.tree.devices
    seen = {bus_id for bus_id, device in tree.items() if device.is_gpu}
    seen |= {bus_id for bus_id, device in facts.devices.items() if device.is_gpu}
    for bus_id in sorted(seen):
        gpu = found.setdefault(bus_id, Gpu(bus_id))
        gpu.sources += ("pci",)
        told = facts.devices.get(bus_id)
        if told is not None:
            gpu.name = gpu.name or told.name
            if told.lost:
                gpu.lost = "lspci reads nothing but ones from it"
    return sorted(found.values(), key=lambda gpu: (gpu.index is None, gpu.index or 0, gpu.bus_id))


def _group_types(facts: Facts) -> dict[int, str]:
    kinds = {}
    for gpu in facts.gpus:
        device = None if facts.tree is None else facts.tree.devices.get(gpu.bus_id)
        if device is not None and not isinstance(device.iommu_group, Missing) and not isinstance(device.iommu_type, Missing):
            kinds[device.iommu_group] = device.iommu_type
    return kinds


def slot(facts: Facts, path: tuple[str, ...]) -> str | None:
    """Return the number of the slot that lspci tells for the lowest device of ``path``; None where it tells none."""
    told = (facts.devices[bus_id].slot for bus_id in reversed(path) if bus_id in facts.devices)
    return next((number for number in told if number is not None), None)


def unread(facts: Facts) -> tuple[str, ...]:
    """Return what could not be read, and why."""
    reasons = []
    if facts.smi_reason:
        reasons.append("list of GPUs: %s" % facts.smi_reason)
    if facts.matrix_reason:
        reasons.append("link matrix: %s" % facts.matrix_reason)
    reasons.extend("P2P %s: %s" % item for item in facts.peers_reason.items())
    if facts.lspci_reason:
        reasons.append("lspci: %s" % facts.lspci_reason)
    if facts.tree is not None and facts.tree.reason is not None:
        reasons.append("PCIe tree: %s" % facts.tree.reason.text)
    if facts.tree is not None and facts.tree.damaged:
        reasons.append("PCIe tree: %s" % ", ".join(facts.tree.damaged[:8]))
    if facts.log is not None and facts.log.state != "read":
        reasons.append("kernel log: %s" % facts.log.reason)
    if facts.matrix is not None:
        reasons.extend(facts.matrix.damaged[:20])
    for peers in facts.peers.values():
        reasons.extend(peers.damaged[:5])
    return tuple(reason[:300] for reason in [*reasons, *facts.damaged[:20]])
