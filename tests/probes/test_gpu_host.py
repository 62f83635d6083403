"""What ``rdiag gpu`` says of a whole host, whose files lie below a folder that stands for ``/``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from probes.lib.gpu import collect, occupancy
from probes.lib.gpu.health import Report, judge
from probes.lib.gpu.judgement import Judgement
from probes.lib.gpu.thresholds import Thresholds
from probes.lib.gpu.xid import policy
from tests.support.fake_smi import NOT_AVAILABLE, FakeSmi, Gpu, rtx_pro_6000
from tests.support.gpu_host import GpuHost, pcie_box

BRIDGE, PORT = "0000:10:01.0", "0000:10:10.0"
AER = "[  400.1] pcieport %s: PCIe Bus Error: severity=%s, type=Data Link Layer, (Receiver ID)"


class Found:
    """What was judged."""

    def __init__(self, report: Report, seen: collect.Seen) -> None:
        self.report, self.seen = report, seen

    def of(self, code: str) -> list[Judgement]:
        return [one for one in self.report.judgements if one.code == code]

    def one(self, code: str) -> Judgement:
        (found,) = self.of(code)
        return found

    @property
    def bad(self) -> set[str]:
        return {one.code for one in self.report.judgements if one.level not in {"ok", "skipped"}}


@pytest.fixture
def box(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> GpuHost:
    monkeypatch.setattr(occupancy, "SAMPLE_GAP", 0.0)
    smi = FakeSmi(tmp_path / "bin", rtx_pro_6000(4))
    monkeypatch.setenv("PATH", smi.path)
    host = pcie_box(tmp_path / "root", smi)
    host.write("proc/modules", "nvidia_uvm 1 0 - Live 0x0\nnvidia 1 1 nvidia_uvm, Live 0x0\n")
    host.write("sys/devices/system/cpu/cpu0/cpufreq/scaling_governor", "performance\n")
    return host


@pytest.fixture
def look(box: GpuHost) -> Callable[..., Found]:
    def looked(**overrides: list[int]) -> Found:
        root = str(box.root)
        seen = collect.collect(60.0, lambda *_: None, root=root, overrides=policy(overrides) if overrides else None)
        # Of this machine, not of the folder.
        return Found(judge(seen, Thresholds(), without=("limits",), root=root), seen)

    return looked


def test_a_healthy_host(look: Callable[..., Found]) -> None:
    found = look()
    assert found.bad == set()
    assert {name: level for name, level in found.report.checks.items() if level != "ok"} == {"limits": "skipped", "nvlink": "skipped"}
    assert [gpu.status for gpu in found.report.gpus] == ["ok"] * 4


@pytest.mark.parametrize(("severity", "level"), [("Uncorrected (Fatal)", "fail"), ("Uncorrected (Non-Fatal)", "degraded")])
@pytest.mark.parametrize("bridge", [BRIDGE, PORT])
def test_errors_of_the_bridge_above_a_gpu_are_errors_of_its_link(
    box: GpuHost, look: Callable[..., Found], bridge: str, severity: str, level: str
) -> None:
    box.smi.kernel_log(AER % (bridge, severity))
    found = look()
    told = found.one("pcie-error")
    assert (told.level, told.subject) == (level, f"bridge {bridge}")
    assert found.report.checks["kernel-log"] == level


def test_errors_of_other_bridges_are_none_of_ours(box: GpuHost, look: Callable[..., Found]) -> None:
    box.device("0000:90:01.0", "0604 8086:352a", bridge="pci0000:90")
    box.smi.kernel_log(AER % ("0000:90:01.0", "Uncorrected (Fatal)"))
    assert look().bad == set()


def test_a_bridge_that_redirects(box: GpuHost, look: Callable[..., Found]) -> None:
    box.acs[PORT] = "SrcValid+ TransBlk- ReqRedir+ CmpltRedir+ UpstreamFwd+ EgressCtrl- DirectTrans-"
    box.lspci()
    assert look().one("acs-redirect").evidence == (PORT,)
    box.lspci(root=False)
    assert look().one("acs").level == "skipped"
    box.lspci()
    box.virtual()
    assert look().one("acs").level == "skipped"


def test_an_iommu_that_translates_is_said(box: GpuHost, look: Callable[..., Found]) -> None:
    assert look().one("iommu").message == "the IOMMU is passing through"
    for group in (box.root / "sys/kernel/iommu_groups").iterdir():
        (group / "type").write_text("DMA-FQ\n")
    told = look().one("iommu-translated")
    assert (told.level, "rdiag topo" in (told.action or "")) == ("ok", True)


@pytest.mark.parametrize(
    ("file", "text", "code"),
    [
        ("proc/modules", "nvidia 1 1 - Live 0x0\n", "uvm-not-loaded"),
        ("sys/devices/system/cpu/cpu0/cpufreq/scaling_governor", "powersave\n", "cpu-governor"),
    ],
)
def test_what_holds_every_gpu_back(box: GpuHost, look: Callable[..., Found], file: str, text: str, code: str) -> None:
    box.write(file, text)
    assert look().bad == {code}


def test_a_gpu_whose_node_nobody_knows(box: GpuHost, look: Callable[..., Found]) -> None:
    box.set("0000:21:00.0", numa_node="-1")
    assert look().one("numa-unknown").evidence == ("0000:21:00.0",)


LINES = {63: "63, pid=9, name=x, Row Remapper: New row marked for remapping", 92: "92, High single-bit ECC error rate", 79: "79, GPU has fallen off the bus."}


@pytest.mark.parametrize(("code", "level"), [(63, "fail"), (92, "ok"), (79, "fail")])
def test_xids_are_judged_as_the_user_sets_them(box: GpuHost, look: Callable[..., Found], code: int, level: str) -> None:
    box.smi.kernel_log(f"[  300.1] NVRM: Xid (PCI:0000:21:00): {LINES[code]}")
    plain = look().one(f"xid-{code}")
    changed = look(fail=[63], ok=[92]).one(f"xid-{code}")
    assert changed.level == level
    assert ("by the user's setting" in changed.message) is (plain.level != level)


def guest(gpu: Gpu) -> None:
    for field in gpu:
        if field.startswith(("remapped_rows", "ecc.errors", "temperature", "power", "fan", "pcie", "clocks_event", "gpu_recovery")):
            gpu[field] = NOT_AVAILABLE
    gpu.update({"name": "NVIDIA RTXPro6000-24Q", "virtualization_mode": "VGPU", "gpu_virtualization.mode": "VGPU", "inforom.checksum_validation": NOT_AVAILABLE})


def test_a_share_of_a_card_is_not_taken_for_a_healthy_card(box: GpuHost, look: Callable[..., Found]) -> None:
    for gpu in box.smi.gpus:
        guest(gpu)
    box.smi.fields = list(box.smi.gpus[0])
    box.smi.write()
    found = look()
    for judged in found.report.gpus:
        measured = {name: level for name, level in judged.checks.items() if name in {"remap", "recovery", "link", "power"}}
        assert "ok" not in measured.values(), measured


def test_wsl_has_no_bus_to_look_at(box: GpuHost, look: Callable[..., Found]) -> None:
    box.write("proc/version", "Linux version 5.15.167.4-microsoft-standard-WSL2 (root@x)\n")
    found = look()
    assert found.seen.around.wsl
    assert found.one("acs").level == "skipped"
    assert found.report.checks["iommu"] == "skipped"
