"""The PCIe tree as the kernel keeps it in sysfs: bridges above each device, speed and width of each link, NUMA, IOMMU.

Needs neither root nor a program. sysfs says -1 for a NUMA node that the firmware does not tell, and ``Unknown`` for the
speed of a link that is down; both are missing here, never zero.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field

from probes.lib.gpu import lspci
from probes.lib.gpu.busid import normalise
from probes.lib.gpu.missing import NOT_REPORTED, Missing, garbage, missing

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Mapping, TypeVar, Union

    T = TypeVar("T")
    Maybe = Union[T, Missing]

DEVICES = "sys/bus/pci/devices"
MAX_DEVICES = 4096
GENERATIONS = {2.5: 1, 5.0: 2, 8.0: 3, 16.0: 4, 32.0: 5, 64.0: 6}
"""PCIe generation by signalling rate, GT/s of a lane."""
_SPEED = re.compile(r"([\d.]+) GT/s")
_ADDRESS = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")


@dataclass(frozen=True)
class Device:
    """One device below /sys/bus/pci/devices."""

    bus_id: str
    vendor_id: int
    device_id: int
    class_code: int
    """Base class and subclass, four hex digits: 0302 is a 3D controller."""
    path: tuple[str, ...]
    """Bus ids from the root port down to the device itself."""
    root: str
    """The host bridge, such as ``pci0000:16``."""
    speed_gts: Maybe[float] = NOT_REPORTED
    """Of its own link now, GT/s; idle GPUs lower it."""
    speed_max_gts: Maybe[float] = NOT_REPORTED
    width: Maybe[int] = NOT_REPORTED
    width_max: Maybe[int] = NOT_REPORTED
    numa_node: Maybe[int] = NOT_REPORTED
    cpus: Maybe[str] = NOT_REPORTED
    """CPUs that are near, such as ``0-55,112-167``."""
    iommu_group: Maybe[int] = NOT_REPORTED
    iommu_type: Maybe[str] = NOT_REPORTED
    """``identity`` passes through, ``DMA`` and ``DMA-FQ`` translate."""
    bar1_bytes: Maybe[int] = NOT_REPORTED
    """Size of the second region: on a GPU the window that peers see its memory through."""
    driver: str | None = None
    interfaces: tuple[str, ...] = ()
    """Names of the network and InfiniBand devices on it."""
    acs: Maybe[lspci.Acs] = NOT_REPORTED
    """Of bridges; not-supported where the bridge has none."""

    @property
    def is_gpu(self) -> bool:
        """Whether it is an NVIDIA GPU."""
        return self.vendor_id == lspci.NVIDIA and self.class_code in lspci.CLASSES_GPU

    @property
    def is_nic(self) -> bool:
        """Whether it is a network or InfiniBand device."""
        return self.class_code in lspci.CLASSES_NIC

    @property
    def is_bridge(self) -> bool:
        """Whether it is a bridge between PCI buses."""
        return self.class_code == lspci.CLASS_PCI_BRIDGE


@dataclass(frozen=True)
class Tree:
    """Every device, or why there are none."""

    devices: Mapping[str, Device]
    reason: Missing | None = None
    damaged: tuple[str, ...] = field(default=())
    """Names of entries that could not be read."""

    def bridges_above(self, bus_id: str) -> tuple[Device, ...]:
        """Return the bridges from the root port down to the one above ``bus_id``."""
        device = self.devices.get(bus_id)
        if device is None:
            return ()
        return tuple(self.devices[name] for name in device.path[:-1] if name in self.devices)

    def distance(self, first: str, second: str) -> str | None:
        """Return how two devices are joined, in nvidia-smi's words; None where the tree does not tell.

        PIX: one bridge or one switch between them, PXB: several switches, PHB: the same host bridge, NODE: another host
        bridge on the same NUMA node, SYS: another node.
        """
        a, b = self.devices.get(first), self.devices.get(second)
        if a is None or b is None:
            return None
        if first == second:
            return "X"
        if a.root == b.root:
            shared = _shared(a.path, b.path)
            if shared:
                # Within one switch: upstream port, two downstream ports. One that is deeper lies behind another switch.
                below = max(len(a.path), len(b.path)) - len(shared)
                return "PIX" if below <= 2 else "PXB"
            return "PHB"
        if isinstance(a.numa_node, Missing) or isinstance(b.numa_node, Missing):
            return None
        return "NODE" if a.numa_node == b.numa_node else "SYS"


def _shared(a: tuple[str, ...], b: tuple[str, ...]) -> tuple[str, ...]:
    count = 0
    while count < min(len(a), len(b)) and a[count] == b[count]:
        count += 1
    return a[:count]


def read(root: str = "/") -> Tree:
    """Read the whole tree; every device by itself, so that one that cannot be read leaves the others."""
    folder = os.path.join(root, DEVICES)
    try:
        names = sorted(os.listdir(folder))[:MAX_DEVICES]
    except PermissionError as error:
        return Tree({}, Missing("not-permitted", "%s: %s" % (folder, error.strerror)))
    except OSError as error:
        return Tree({}, Missing("not-reported", "%s: %s" % (folder, error.strerror)))
    devices: dict[str, Device] = {}
    damaged = []
    for name in names:
        try:
            device = _device(root, os.path.join(folder, name), name)
        except (OSError, ValueError):
            damaged.append(name)
            continue
        devices[device.bus_id] = device
    return Tree(devices, None, tuple(damaged))


def _device(root: str, folder: str, name: str) -> Device:
    bus_id = normalise(name)
    if bus_id is None:
        raise ValueError(name)
    place = os.path.realpath(folder).split(os.sep)
    path = tuple(known for known in (normalise(part) for part in place if _ADDRESS.fullmatch(part)) if known is not None)
    code = int(_need(folder, "class"), 16) >> 8
    group = _link(folder, "iommu_group")
    number = int(group) if group is not None and group.isdigit() else None
    kind = _text(os.path.join(root, "sys/kernel/iommu_groups", str(number), "type")) if number is not None else None
    return Device(
        bus_id=bus_id,
        vendor_id=int(_need(folder, "vendor"), 16),
        device_id=int(_need(folder, "device"), 16),
        class_code=code,
        path=path or (bus_id,),
        root=next((part for part in place if part.startswith("pci") and ":" in part), ""),
        speed_gts=_speed(folder, "current_link_speed"),
        speed_max_gts=_speed(folder, "max_link_speed"),
        width=_width(folder, "current_link_width"),
        width_max=_width(folder, "max_link_width"),
        numa_node=_numa(folder),
        cpus=_text(os.path.join(folder, "local_cpulist")) or NOT_REPORTED,
        iommu_group=NOT_REPORTED if number is None else number,
        iommu_type=NOT_REPORTED if kind is None else kind,
        bar1_bytes=_region(folder, 1),
        driver=_link(folder, "driver"),
        interfaces=_interfaces(folder),
        acs=_acs(folder) if code == lspci.CLASS_PCI_BRIDGE else NOT_REPORTED,
    )


def _text(path: str) -> str | None:
    try:
        with open(path, "rb") as file:
            return file.read(4096).decode("ascii", "replace").strip()
    except OSError:
        return None


def _need(folder: str, name: str) -> str:
    text = _text(os.path.join(folder, name))
    if not text:
        raise ValueError("no %s" % name)
    return text


def _link(folder: str, name: str) -> str | None:
    try:
        return os.path.basename(os.readlink(os.path.join(folder, name)))
    except OSError:
        return None


def _speed(folder: str, name: str) -> Maybe[float]:
    text = _text(os.path.join(folder, name))
    if text is None:
        return NOT_REPORTED
    found = _SPEED.match(text)
    if found is None:
        return missing(text) or garbage(text)
    speed = float(found.group(1))
    return speed if speed in GENERATIONS else garbage(text)


def _width(folder: str, name: str) -> Maybe[int]:
    text = _text(os.path.join(folder, name))
    if text is None:
        return NOT_REPORTED
    # 0 and 255 are what a link that is down and a card that is gone say.
    return int(text) if text in {"1", "2", "4", "8", "12", "16", "32"} else garbage(text)


def _numa(folder: str) -> Maybe[int]:
    text = _text(os.path.join(folder, "numa_node"))
    if text is None:
        return NOT_REPORTED
    if text == "-1":
        return Missing("not-reported", "-1")
    return int(text) if text.isdigit() else garbage(text)


def _region(folder: str, number: int) -> Maybe[int]:
    lines = (_text(os.path.join(folder, "resource")) or "").splitlines()
    try:
        begin, end = (int(word, 16) for word in lines[number].split()[:2])
    except (IndexError, ValueError):
        return NOT_REPORTED
    return end - begin + 1 if end > begin else NOT_REPORTED


def _interfaces(folder: str) -> tuple[str, ...]:
    found: list[str] = []
    for kind in ("infiniband", "net"):
        try:
            found.extend(sorted(os.listdir(os.path.join(folder, kind))))
        except OSError:
            continue
    return tuple(found)


def _acs(folder: str) -> Maybe[lspci.Acs]:
    try:
        with open(os.path.join(folder, "config"), "rb") as file:
            config = file.read(4096)
    except PermissionError as error:
        return Missing("not-permitted", str(error.strerror))
    except OSError:
        return NOT_REPORTED
    try:
        return lspci.acs_of_config(config) or Missing("not-supported", "no such capability")
    except PermissionError as error:
        return Missing("not-permitted", str(error))


def generation(speed_gts: Maybe[float]) -> int | None:
    """Return the PCIe generation of a signalling rate."""
    return None if isinstance(speed_gts, Missing) else GENERATIONS.get(speed_gts)


def gigabytes(speed_gts: float, width: int) -> float:
    """Return what a link carries in one direction before packet headers, GB/s (1e9): encoding taken off."""
    share = 0.8 if speed_gts < 8 else 128 / 130 if speed_gts < 64 else 242 / 256
    return speed_gts * width * share / 8
