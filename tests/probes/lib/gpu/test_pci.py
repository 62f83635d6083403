from __future__ import annotations

from pathlib import Path

import pytest

from probes.lib.gpu import pci
from probes.lib.gpu.missing import Missing
from tests.support.fake_smi import FakeSmi, rtx_pro_6000
from tests.support.gpu_host import GpuHost


@pytest.fixture
def host(tmp_path: Path) -> GpuHost:
    """Two levels of switches on one root, another root on the same node, one on the other node."""
    made = GpuHost(tmp_path / "root", FakeSmi(tmp_path / "bin", rtx_pro_6000(2)))
    made.device("0000:10:01.0", "0604 8086:352a", bridge="pci0000:10")
    made.device("0000:11:00.0", "0604 1000:c030", below="0000:10:01.0")
    for place, bus in enumerate(("20", "30")):
        made.device(f"0000:12:0{place}.0", "0604 1000:c030", below="0000:11:00.0")
        made.device(f"0000:{bus}:00.0", "0604 1000:c030", below=f"0000:12:0{place}.0")
        for leaf in range(2):
            made.device(f"0000:{bus}:1{leaf}.0", "0604 1000:c030", below=f"0000:{bus}:00.0")
            made.device(f"0000:{bus}:1{leaf}.1", "0302 10de:2bb5", below=f"0000:{bus}:1{leaf}.0")
    made.device("0000:40:00.0", "0302 10de:2bb5", bridge="pci0000:40")
    made.device("0000:80:00.0", "0302 10de:2bb5", bridge="pci0000:80", numa_node="1")
    made.device("0000:c0:00.0", "0302 10de:2bb5", bridge="pci0000:c0", numa_node="-1")
    return made


@pytest.mark.parametrize(
    ("first", "second", "word"),
    [
        ("0000:20:10.1", "0000:20:10.1", "X"),
        ("0000:20:10.1", "0000:20:11.1", "PIX"),
        ("0000:20:10.1", "0000:30:10.1", "PXB"),
        ("0000:20:10.1", "0000:40:00.0", "NODE"),
        ("0000:20:10.1", "0000:80:00.0", "SYS"),
        ("0000:20:10.1", "0000:c0:00.0", None),
        ("0000:20:10.1", "0000:99:00.0", None),
    ],
)
def test_distances(host: GpuHost, first: str, second: str, word: str | None) -> None:
    tree = pci.read(str(host.root))
    assert tree.damaged == ()
    assert tree.distance(first, second) == word
    assert tree.distance(second, first) == word


def test_ports_of_one_host_bridge(host: GpuHost) -> None:
    host.device("0000:40:02.0", "0302 10de:2bb5", bridge="pci0000:40")
    assert pci.read(str(host.root)).distance("0000:40:00.0", "0000:40:02.0") == "PHB"


def test_a_device(host: GpuHost) -> None:
    device = pci.read(str(host.root)).devices["0000:30:11.1"]
    assert device.is_gpu
    assert device.path == ("0000:10:01.0", "0000:11:00.0", "0000:12:01.0", "0000:30:00.0", "0000:30:11.0", "0000:30:11.1")
    assert (device.root, device.speed_gts, device.width, device.numa_node, device.bar1_bytes) == ("pci0000:10", 32.0, 16, 0, 128 << 30)
    assert pci.generation(device.speed_gts) == 5


def test_what_is_not_told_is_missing(host: GpuHost) -> None:
    host.set("0000:40:00.0", current_link_speed="Unknown", current_link_width="255", numa_node="-1")
    (host.places["0000:40:00.0"] / "resource").write_text("garbage\n")
    device = pci.read(str(host.root)).devices["0000:40:00.0"]
    for value in (device.speed_gts, device.width, device.numa_node, device.bar1_bytes, device.iommu_group):
        assert isinstance(value, Missing)


def test_one_that_cannot_be_read_leaves_the_others(host: GpuHost) -> None:
    (host.places["0000:40:00.0"] / "vendor").write_text("nonsense\n")
    (host.root / "sys/bus/pci/devices/0000:fe:00.0").symlink_to("nowhere")
    tree = pci.read(str(host.root))
    assert set(tree.damaged) == {"0000:40:00.0", "0000:fe:00.0"}
    assert "0000:80:00.0" in tree.devices


def test_no_bus(tmp_path: Path) -> None:
    tree = pci.read(str(tmp_path))
    assert tree.devices == {}
    assert tree.reason is not None


def test_bytes_a_second() -> None:
    assert round(pci.gigabytes(32.0, 16), 1) == 63.0
    assert round(pci.gigabytes(2.5, 16), 1) == 4.0
