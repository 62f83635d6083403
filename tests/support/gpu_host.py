"""A host's files as the kernel and the NVIDIA driver lay them out: made up, never copied.

::

    host = pcie_box(tmp_path / "root", FakeSmi(tmp_path / "bin", rtx_pro_6000(8)))
    host.set("0000:41:00.0", current_link_width="8")
    ... run the probe topo with Params(root=str(host.root)) ...
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from .fake_smi import FakeSmi
from .smi_topology import allowed, matrix, peers, two_switches


class GpuHost:
    """Files below a folder that stands for ``/``.

    Args:
        root: made, with what every host has.
        smi: the stand-in that plays its driver.
        vendor: of the CPU, as /proc/cpuinfo names it.
        nodes: NUMA nodes.
    """

    def __init__(self, root: Path, smi: FakeSmi, *, vendor: str = "GenuineIntel", nodes: int = 2) -> None:
        self.root = root
        self.smi = smi
        self.write("proc/cpuinfo", f"processor\t: 0\nvendor_id\t: {vendor}\nflags\t\t: fpu vme de\n")
        self.write("proc/cmdline", "BOOT_IMAGE=/vmlinuz root=UUID=secret iommu=pt pcie_aspm=off\n")
        self.write("proc/version", "Linux version 6.8.0-60-generic (build@host)\n")
        for node in range(nodes):
            (root / f"sys/devices/system/node/node{node}").mkdir(parents=True)
        (root / "sys/bus/pci/devices").mkdir(parents=True)
        (root / "sys/kernel/iommu_groups").mkdir(parents=True)
        (root / "dev/shm").mkdir(parents=True)
        self.places: dict[str, Path] = {}
        self.lspci_lines: dict[str, str] = {}
        self.acs: dict[str, str] = {}

    def write(self, path: str, text: str) -> None:
        """Write a file."""
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def virtual(self) -> None:
        """Make it a virtual machine."""
        self.write("proc/cpuinfo", "processor\t: 0\nvendor_id\t: GenuineIntel\nflags\t\t: fpu vme hypervisor de\n")

    def driver(self, *, open_module: bool = True, version: str = "590.48.01") -> None:
        """Load the driver: its version, its parameters, and every GPU of the stand-in."""
        words = f"Open Kernel Module for x86_64  {version}" if open_module else f"x86_64 Kernel Module  {version}"
        self.write(
            "proc/driver/nvidia/version",
            f"NVRM version: NVIDIA UNIX {words}  Release Build  (builder@host)\nGCC version:  gcc version 13.3.0\n",
        )
        self.write("proc/driver/nvidia/params", 'EnableMSI: 1\nEnableResizableBar: 0\nRegistryDwords: ""\n')
        self.write("sys/module/nvidia_uvm/parameters/uvm_disable_hmm", "N\n")
        for gpu in self.smi.gpus:
            bus_id = gpu["pci.bus_id"][4:].lower()
            self.write(
                f"proc/driver/nvidia/gpus/{bus_id}/information",
                f"Model: \t\t {gpu['name']}\nIRQ:   \t\t 120\nGPU UUID: \t {gpu['uuid']}\nVideo BIOS: \t ??.??.??.??.??\n"
                f"Bus Type: \t PCIe\nBus Location: \t {bus_id}\nDevice Minor: \t {gpu['index']}\nGPU Excluded:\t No\n",
            )

    def device(self, bus_id: str, kind: str, *, below: str | None = None, bridge: str = "pci0000:00", **values: str) -> None:
        """Add a device: ``kind`` is a class and vendor:device, such as ``0302 10de:2bb5``; ``values`` are files."""
        parent = self.root / "sys/devices" / bridge if below is None else self.places[below]
        place = parent / bus_id
        place.mkdir(parents=True)
        self.places[bus_id] = place
        code, ids = kind.split()
        vendor, device = ids.split(":")
        files = {
            "class": f"0x{code}00", "vendor": f"0x{vendor}", "device": f"0x{device}", "current_link_speed": "32.0 GT/s PCIe",
            "max_link_speed": "32.0 GT/s PCIe", "current_link_width": "16", "max_link_width": "16", "numa_node": "0",
            "local_cpulist": "0-63", **values,
        }  # fmt: skip
        for name, text in files.items():
            (place / name).write_text(text + "\n")
        if code == "0302":
            (place / "resource").write_text(
                "0x00000000a0000000 0x00000000a0ffffff 0x0000000000040200\n0x0000380000000000 0x0000381fffffffff 0x000000000014220c\n"
            )
        (self.root / "sys/bus/pci/devices" / bus_id).symlink_to(os.path.relpath(place, self.root / "sys/bus/pci/devices"))
        words = {"0604": "PCI bridge", "0302": "3D controller", "0207": "Infiniband controller"}
        self.lspci_lines[bus_id] = f"{bus_id} {words.get(code, 'Bridge')} [{code}]: Vendor Device [{ids}] (rev a1)"

    def set(self, bus_id: str, **values: str) -> None:
        """Change files of a device."""
        for name, text in values.items():
            (self.places[bus_id] / name).write_text(text + "\n")

    def iommu(self, kind: str) -> None:
        """Put each GPU into an IOMMU group of its own, of this type: identity, DMA."""
        for number, gpu in enumerate(self.smi.gpus):
            group = self.root / "sys/kernel/iommu_groups" / str(number)
            group.mkdir()
            (group / "type").write_text(kind + "\n")
            link = self.places[gpu["pci.bus_id"][4:].lower()] / "iommu_group"
            link.symlink_to(os.path.relpath(group, link.parent))

    def lspci(self, *, root: bool = True, lost: Sequence[str] = (), without: Sequence[str] = ()) -> None:
        """Put an lspci beside the stand-in that tells of these devices; ``root``: as it does to root."""
        lines = []
        for bus_id, head in self.lspci_lines.items():
            if bus_id in without:
                continue
            if bus_id in lost:
                lines += [head.replace("(rev a1)", "(rev ff) (prog-if ff)"), "\t!!! Unknown header type 7f"]
                continue
            lines.append(head)
            if not root:
                lines.append("\tCapabilities: <access denied>")
            elif "PCI bridge" in head:
                lines += [
                    "\tCapabilities: [148 v1] Access Control Services",
                    "\t\tACSCap:\tSrcValid+ TransBlk+ ReqRedir+ CmpltRedir+ UpstreamFwd+ EgressCtrl- DirectTrans+",
                    "\t\tACSCtl:\t" + self.acs.get(bus_id, "SrcValid+ TransBlk- ReqRedir- CmpltRedir- UpstreamFwd- EgressCtrl- DirectTrans-"),
                ]  # fmt: skip
            lines.append("")
        text = "\n".join(lines)
        self.smi.program("lspci", f"cat <<'END'\n{text}\nEND")

    def topo(self, text: str, word: Callable[[int, int], str] = allowed, **others: Callable[[int, int], str]) -> None:
        """Let the stand-in answer ``topo -m`` with ``text`` and ``topo -p2p`` with ``word``; ``r=...`` for one of them."""
        count = len(self.smi.gpus)
        self.smi.answers = [(("topo", "-m"), text, 0)]
        for letter in "rwnap":
            self.smi.answers.append((("topo", "-p2p", letter), peers(count, others.get(letter, word)), 0))
        self.smi.write()


def pcie_box(root: Path, smi: FakeSmi) -> GpuHost:
    """Return a healthy host whose GPUs hang below one switch for each four, one switch on each NUMA node; idle, bare metal."""
    host = GpuHost(root, smi)
    for half in range((len(smi.gpus) + 3) // 4):
        top = "%02x" % (0x10 + half * 0x60)
        bridge, common = f"pci0000:{top}", {"numa_node": str(half), "local_cpulist": f"{half * 64}-{half * 64 + 63}"}
        host.device(f"0000:{top}:01.0", "0604 8086:352a", bridge=bridge, **common)
        host.device(f"0000:{top}:08.0", "0604 1000:c030", below=f"0000:{top}:01.0", **common)
        for place, gpu in enumerate(smi.gpus[half * 4 : half * 4 + 4]):
            port, bus_id = f"0000:{top}:1{place}.0", gpu["pci.bus_id"][4:].lower()
            host.device(port, "0604 1000:c030", below=f"0000:{top}:08.0", **common)
            host.device(bus_id, "0302 10de:2bb5", below=port, current_link_speed="2.5 GT/s PCIe", **common)
    host.driver()
    host.iommu("identity")
    host.lspci()
    smi.kernel_log()
    count = len(smi.gpus)
    host.topo(matrix([f"GPU{place}" for place in range(count)], two_switches, numa=[place // 4 for place in range(count)]))
    return host
