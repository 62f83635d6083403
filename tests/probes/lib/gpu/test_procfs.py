from __future__ import annotations

from pathlib import Path

import pytest

from probes.lib.gpu import procfs
from tests.support import captures
from tests.support.fake_smi import FakeSmi, rtx_pro_6000
from tests.support.gpu_host import GpuHost


@pytest.fixture
def host(tmp_path: Path) -> GpuHost:
    made = GpuHost(tmp_path / "root", FakeSmi(tmp_path / "bin", rtx_pro_6000(2)))
    made.driver()
    return made


@pytest.mark.parametrize(
    ("text", "version", "is_open"),
    [
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build  (a@b)\nGCC version: gcc 13\n", "580.95.05", True),
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.161.08  Sat Feb 17 22:55:48 UTC 2024\nGCC version: 12.2.0\n", "535.161.08", False),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for aarch64  570.124  Release Build\n", "570.124", True),
    ],
)
def test_kernel_modules(text: str, version: str, is_open: bool) -> None:
    module = procfs.parse_version(text)
    assert module == procfs.KernelModule(version, is_open)


def test_no_driver(tmp_path: Path) -> None:
    assert procfs.kernel_module(str(tmp_path)) is None
    assert procfs.gpus(str(tmp_path)) is None
    assert procfs.params(str(tmp_path)) == {}
    assert procfs.parse_version("garbage") is None


def test_gpus_of_the_driver(host: GpuHost) -> None:
    found = procfs.gpus(str(host.root))
    assert found is not None
    assert list(found) == ["0000:01:00.0", "0000:21:00.0"]
    first = found["0000:01:00.0"]
    assert (first.uuid, first.minor, first.vbios, first.excluded) == (host.smi.gpus[0]["uuid"], 0, None, False)


def test_a_card_that_the_driver_does_not_know(host: GpuHost) -> None:
    host.write("proc/driver/nvidia/gpus/0000:01:00.0/information", "Model: \t Unknown\nGPU UUID: \t GPU-????????-????-????\nDevice Minor: \t 0\n")
    (host.root / "proc/driver/nvidia/gpus/0000:21:00.0/information").unlink()
    found = procfs.gpus(str(host.root))
    assert found is not None
    assert found["0000:01:00.0"].uuid is None
    assert not found["0000:21:00.0"].readable


def test_parameters(host: GpuHost) -> None:
    params = procfs.params(str(host.root))
    assert params["EnableResizableBar"] == "0"
    assert params["RegistryDwords"] == ""
    assert params["nvidia_uvm.uvm_disable_hmm"] == "N"


def test_only_options_that_matter_are_shown(host: GpuHost) -> None:
    assert procfs.kernel_options(str(host.root)) == {"iommu": "pt", "pcie_aspm": "off"}


def test_virtual_machines_and_vendors(host: GpuHost) -> None:
    assert procfs.virtual(str(host.root)) is False
    assert procfs.cpu_vendor(str(host.root)) == "intel"
    host.virtual()
    assert procfs.virtual(str(host.root)) is True
    host.write("proc/cpuinfo", "processor\t: 0\nCPU implementer\t: 0x41\n")
    assert procfs.cpu_vendor(str(host.root)) == "arm"
    assert procfs.virtual(str(host.root)) is None


def test_iommu(host: GpuHost) -> None:
    def mode(types: dict[int, str], domain: str | None = None, **options: str) -> str:
        return procfs.iommu(str(host.root), types, domain, options).mode

    assert mode({}) == "off"
    (host.root / "sys/kernel/iommu_groups/0").mkdir()
    assert mode({0: "identity"}) == "passthrough"
    assert mode({0: "identity", 1: "DMA-FQ"}) == "translated"
    assert mode({}, "Translated") == "translated"
    assert mode({}, iommu="pt") == "passthrough"
    assert mode({}) == "unknown"
    # What the groups say counts more than what was wished for at boot.
    assert mode({0: "DMA"}, "Passthrough", iommu="pt") == "translated"


@captures.needs_captures
@pytest.mark.parametrize("name", captures.names("fabricmanager_log__*"))
def test_the_fabric_managers_log(name: str) -> None:
    log = procfs.parse_fabric_log(captures.read(name))
    assert log.switch_errors == (("non-fatal", 12028, "0000:86:00.0"),)
    assert len(log.errors) == 1


def test_a_long_log_is_read_from_its_end(host: GpuHost) -> None:
    assert procfs.fabric_log(str(host.root)) is None
    line = "[Feb 27 2025 15:10:02] [INFO] [tid 1] something\n"
    last = "[Feb 27 2025 15:10:03] [ERROR] [tid 1] detected NVSwitch fatal error 20034 on fid 0 on NVSwitch pci bus id 00000000:86:00.0 physical id 3 port 61\n"
    host.write(procfs.FABRIC_LOG, line * 60_000 + last)
    log = procfs.fabric_log(str(host.root))
    assert log is not None
    assert log.switch_errors == (("fatal", 20034, "0000:86:00.0"),)
    assert log.lines < 60_000
