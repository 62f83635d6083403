"""``lspci -nn`` and ``lspci -nn -vvv``: which devices there are, how their links stand, and what ACS does.

Without root the capabilities read ``<access denied>``; a card that fell off the bus answers with all bits set, which
lspci shows as revision ff and an unknown header type.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from probes.lib.gpu.busid import normalise

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Iterator

NVIDIA = 0x10DE
ACS_FLAGS = ("SrcValid", "TransBlk", "ReqRedir", "CmpltRedir", "UpstreamFwd", "EgressCtrl", "DirectTrans")
"""In the order of their bits in the control register."""
CLASS_BRIDGE, CLASS_PCI_BRIDGE = 0x0680, 0x0604
CLASSES_GPU = (0x0300, 0x0302)
CLASSES_NIC = (0x0200, 0x0207, 0x0280)

_HEAD = re.compile(
    r"^((?:[0-9a-fA-F]{4,8}:)?[0-9a-fA-F]{2}:[0-9a-fA-F]{2}\.[0-7]) (.*) \[([0-9a-fA-F]{4})\]: (.*) "
    r"\[([0-9a-fA-F]{4}):([0-9a-fA-F]{4})\](?: \(rev ([0-9a-fA-F]{2})\))?"
)
_LINK = re.compile(r"Speed ([\d.]+)GT/s(?: \((\w+)\))?, Width x(\d+)")
_SLOT = re.compile(r"Physical Slot: (\S+)")
_DRIVER = re.compile(r"Kernel driver in use: (\S+)")
_NUMA = re.compile(r"NUMA node: (\d+)")
_GROUP = re.compile(r"IOMMU group: (\d+)")


@dataclass(frozen=True)
class Acs:
    """Which Access Control Services a bridge has switched on."""

    flags: tuple[str, ...]
    """Names of those that are on: ``SrcValid``, ``ReqRedir``, ..."""

    @property
    def redirects(self) -> bool:
        """Whether traffic between peers is sent up to the root: ``SrcValid`` alone is harmless."""
        return "ReqRedir" in self.flags or "CmpltRedir" in self.flags


@dataclass(frozen=True)
class Device:
    """One device."""

    bus_id: str
    class_name: str
    class_code: int
    name: str
    vendor_id: int
    device_id: int
    lost: bool = False
    """Whether it answers with nothing but ones: it fell off the bus."""
    slot: str | None = None
    """The number that is printed on the board."""
    speed_gts: float | None = None
    """Of the link now, GT/s."""
    width: int | None = None
    speed_max_gts: float | None = None
    """Of what the device could do, GT/s."""
    width_max: int | None = None
    numa_node: int | None = None
    iommu_group: int | None = None
    driver: str | None = None
    acs: Acs | None = None
    """None where it has none or where it may not be read."""
    has_acs: bool = False
    denied: bool = False
    """Whether its capabilities may not be read: needs root."""

    @property
    def is_gpu(self) -> bool:
        """Whether it is an NVIDIA GPU."""
        return self.vendor_id == NVIDIA and self.class_code in CLASSES_GPU

    @property
    def is_nvswitch(self) -> bool:
        """Whether it is an NVSwitch."""
        return self.vendor_id == NVIDIA and self.class_code == CLASS_BRIDGE


def parse(text: str) -> tuple[dict[str, Device], list[str]]:
    """Return (devices by bus id, lines that look like a device and cannot be read)."""
    devices: dict[str, Device] = {}
    damaged: list[str] = []
    for head, body in _blocks(text):
        found = _HEAD.match(head)
        bus_id = normalise(found.group(1)) if found else None
        if found is None or bus_id is None:
            damaged.append(head[:200])
            continue
        device = Device(
            bus_id, found.group(2), int(found.group(3), 16), found.group(4), int(found.group(5), 16), int(found.group(6), 16),
            lost=(found.group(7) or "").lower() == "ff",
        )  # fmt: skip
        devices[bus_id] = _details(device, body)
    return devices, damaged


def _blocks(text: str) -> Iterator[tuple[str, list[str]]]:
    head: str | None = None
    body: list[str] = []
    for line in text.splitlines():
        if line[:1] in {"\t", " "}:
            body.append(line.strip())
        elif re.match(r"[0-9a-fA-F:]{5,}", line):
            if head is not None:
                yield head, body
            head, body = line.rstrip(), []
    if head is not None:
        yield head, body


def _details(device: Device, body: list[str]) -> Device:
    values: dict[str, object] = {}
    for line in body:
        if line.startswith("LnkCap:"):
            found = _LINK.search(line)
            if found:
                values.update(speed_max_gts=float(found.group(1)), width_max=int(found.group(3)))
        elif line.startswith("LnkSta:"):
            found = _LINK.search(line)
            if found:
                values.update(speed_gts=float(found.group(1)), width=int(found.group(3)))
        elif line.startswith("ACSCap:"):
            values["has_acs"] = True
        elif line.startswith("ACSCtl:"):
            values["acs"] = Acs(tuple(name for name in ACS_FLAGS if name + "+" in line))
        elif "<access denied>" in line:
            values["denied"] = True
        elif "Unknown header type" in line and "7f" in line:
            values["lost"] = True
        else:
            for pattern, name in ((_SLOT, "slot"), (_DRIVER, "driver"), (_NUMA, "numa_node"), (_GROUP, "iommu_group")):
                found = pattern.match(line)
                if found:
                    values[name] = int(found.group(1)) if name in {"numa_node", "iommu_group"} else found.group(1)
    return replace(device, **values)  # type: ignore[arg-type]


def acs_of_config(config: bytes) -> Acs | None:
    """Return the ACS control of a device's configuration space, None where it has none.

    Args:
        config: /sys/bus/pci/devices/*/config; only root reads more than its first 64 bytes.

    Raises:
        PermissionError: the part with the extended capabilities was not readable.
    """
    if len(config) <= 0x100:
        # 256 bytes is all that a conventional device has; 64 is what everybody may read.
        if len(config) == 0x100:
            return None
        raise PermissionError("only root reads the whole configuration space")
    offset = 0x100
    for _ in range(64):
        if offset < 0x100 or offset + 8 > len(config):
            return None
        header = int.from_bytes(config[offset : offset + 4], "little")
        if header in {0, 0xFFFFFFFF}:
            return None
        if header & 0xFFFF == 0x000D:
            control = int.from_bytes(config[offset + 6 : offset + 8], "little")
            return Acs(tuple(name for bit, name in enumerate(ACS_FLAGS) if control >> bit & 1))
        offset = header >> 20 & 0xFFC
    return None
