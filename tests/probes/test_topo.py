from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

from probes.lib.gpu import kernel_log_source, run_smi, topo_reading, where
from probes.lib.gpu.run_smi import Programs, Said
from remote_diag.discovery import find
from remote_diag.findings import Finding, status
from remote_diag.testing import RecordingContext
from tests.support import captures
from tests.support.fake_smi import SENTINELS, FakeSmi, h200, load, rtx_pro_6000
from tests.support.gpu_host import GpuHost, pcie_box
from tests.support.smi_topology import dgx, matrix, peers, two_switches

PROBE = find("topo")
BUS = ["0000:01:00.0", "0000:21:00.0", "0000:41:00.0", "0000:61:00.0", "0000:81:00.0", "0000:a1:00.0", "0000:c1:00.0", "0000:e1:00.0"]
EIGHT = [f"GPU{place}" for place in range(8)]
NUMA = [place // 4 for place in range(8)]


def one_switch(_first: int, _second: int) -> str:
    return "PIX"


def refused(_first: int, _second: int) -> str:
    return "CNS"


class Ran:
    """What came of one run of the probe."""

    def __init__(self, result: Any, findings: list[Finding]) -> None:
        self.result = result
        self.findings = findings
        self.status = status(tuple(findings))

    def found(self, code: str) -> list[Finding]:
        return [finding for finding in self.findings if finding.code == code]

    def one(self, code: str) -> Finding:
        (finding,) = self.found(code)
        return finding

    @property
    def codes(self) -> set[str]:
        return {finding.code for finding in self.findings if finding.level != "ok"}


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSmi:
    made = FakeSmi(tmp_path / "bin", rtx_pro_6000(8))
    monkeypatch.setenv("PATH", made.path)
    for name in ("NCCL_P2P_LEVEL", "NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE", "NCCL_CONF_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    return made


@pytest.fixture
def box(tmp_path: Path, smi: FakeSmi) -> GpuHost:
    return pcie_box(tmp_path / "root", smi)


@pytest.fixture
def look(tmp_path: Path) -> Callable[..., Ran]:
    def run(host: GpuHost | Path, **params: Any) -> Ran:
        root = host.root if isinstance(host, GpuHost) else host
        context = RecordingContext(tmp_path / "run")
        result = PROBE.module.run(PROBE.Params(root=str(root), **params), context)
        return Ran(checked(result), context.findings)

    return run


class Replay:
    """Gives what programs said before, with changes: hundreds of drivers in little time."""

    said: ClassVar[dict[str, Said]] = {}
    changes: ClassVar[dict[str, str]] = {}

    def __init__(self, remaining: float) -> None:
        del remaining

    def ask(self, program: str, *arguments: str, seconds: float | None = None) -> Said:
        del seconds
        command = " ".join((program, *arguments))
        said = self.said[command]
        changed = next((text for words, text in self.changes.items() if words in command), None)
        return said if changed is None else replace(said, out=changed)

    def stuck(self, program: str) -> Said | None:
        del program
        return None


@pytest.fixture
def again(box: GpuHost, look: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Ran]:
    """Return what looks at the healthy box once more, with other answers to commands that contain these words."""
    recorded: list[Programs] = []

    class Recorded(Programs):
        def __init__(self, remaining: float) -> None:
            super().__init__(remaining)
            recorded.append(self)

    monkeypatch.setattr(topo_reading, "Programs", Recorded)
    assert look(box, p2p_level="SYS", gpus=8).status == "ok"
    monkeypatch.setattr(topo_reading, "Programs", Replay)
    said = recorded[0].asked
    # Its own name for a program is what a program is asked by; the answers come in the order of the questions.
    monkeypatch.setattr(Replay, "said", {item.command: item for item in said})

    def run(changes: dict[str, str] | None = None) -> Ran:
        monkeypatch.setattr(Replay, "changes", changes or {})
        return look(box, p2p_level="SYS", gpus=8)

    return run


@pytest.fixture
def parse(tmp_path: Path) -> Callable[..., Ran]:
    def run(text: str, **params: Any) -> Ran:
        context = RecordingContext(tmp_path / "run")
        return Ran(checked(PROBE.module.parse(text.encode(), PROBE.Params(**params), context)), context.findings)

    return run


def checked(result: Any) -> Any:
    """What a host cannot send is not accepted."""
    return PROBE.result_adapter.validate_json(PROBE.result_adapter.dump_json(result), strict=True)


# Healthy -------------------------------------------------------------------------------------------------------------


def test_a_box_whose_gpus_reach_each_other_within_a_switch_only(box: GpuHost, look: Callable[..., Ran]) -> None:
    ran = look(box, gpus=8)
    assert ran.codes == {"nccl-through-host"}
    assert [gpu.status for gpu in ran.result.gpus] == ["ok"] * 8
    assert ran.result.islands == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert {pair.transport for pair in ran.result.pairs if pair.link == "PIX"} == {"p2p"}
    assert {pair.transport for pair in ran.result.pairs if pair.link == "SYS"} == {"shm"}
    finding = ran.one("nccl-through-host")
    assert finding.value == 16
    assert ran.one("uvm-hmm").level == "ok"
    assert "NCCL_P2P_LEVEL=SYS" in (finding.action or "")
    assert "rdiag p2p" in (finding.action or "")
    assert ran.result.matrix_complete
    assert (ran.result.driver_version, ran.result.open_kernel_module) == ("590.48.01", True)
    assert (ran.result.iommu, ran.result.virtual_machine, ran.result.cpu_vendor, ran.result.uvm_hmm) == ("passthrough", False, "intel", True)
    assert "secret" not in str(ran.result.kernel_options)


def test_the_same_box_with_a_level_that_reaches(box: GpuHost, look: Callable[..., Ran]) -> None:
    ran = look(box, p2p_level="SYS")
    assert ran.status == "ok", ran.codes
    assert ran.result.islands == (tuple(range(8)),)
    assert "command line" in ran.result.p2p_level_source


def test_what_the_driver_says_besides(box: GpuHost, look: Callable[..., Ran]) -> None:
    box.topo(matrix(EIGHT, two_switches), n=lambda a, b: "NS" if a != b else "OK", a=lambda a, b: "CNS" if {a, b} == {0, 1} else "OK")
    pairs = look(box).result.pairs
    assert {pair.p2p_nvlink for pair in pairs} == {"NS"}
    assert [(pair.a, pair.b) for pair in pairs if pair.p2p_atomics != "OK"] == [(0, 1)]
    assert {pair.p2p_pcie for pair in pairs} == {"OK"}
    # NCCL asks for reads and writes only.
    assert {pair.transport for pair in pairs if pair.link == "PIX"} == {"p2p"}


def test_a_gpu_whose_nic_is_far(parse: Callable[..., Ran]) -> None:
    def far(a: int, b: int) -> str:
        return "SYS" if {a, b} & {7} and max(a, b) > 7 else dgx(a, b)

    ran = parse(matrix([*EIGHT, *(f"NIC{place}" for place in range(8))], far, numa=NUMA))
    assert ran.one("nic-far").subject == "GPU7"
    assert [gpu.status for gpu in ran.result.gpus] == [*["ok"] * 7, "degraded"]


def test_details_of_a_gpu(box: GpuHost, look: Callable[..., Ran]) -> None:
    gpu = look(box).result.gpus[5]
    assert (gpu.index, gpu.bus_id, gpu.uuid) == (5, BUS[5], box.smi.gpus[5]["uuid"])
    assert (gpu.pcie_gen, gpu.pcie_gen_max, gpu.pcie_width, gpu.pcie_width_max) == (1, 5, 16, 16)
    assert (gpu.numa_node, gpu.cpu_affinity, gpu.iommu_type, gpu.bar1_mib) == (1, "64-127", "identity", 131072)
    assert gpu.path == ("0000:70:01.0", "0000:70:08.0", "0000:70:11.0")
    assert gpu.listed_by == ("nvidia-smi", "driver", "pci")
    assert gpu.idle
    assert gpu.missing == {}


def test_the_tree(box: GpuHost, look: Callable[..., Ran]) -> None:
    bridges = look(box).result.bridges
    assert len(bridges) == 2 * (2 + 4)
    tops = [bridge for bridge in bridges if bridge.parent is None]
    assert [(bridge.bus_id, bridge.root) for bridge in tops] == [("0000:10:01.0", "pci0000:10"), ("0000:70:01.0", "pci0000:70")]
    assert all(bridge.acs_redirect is False for bridge in bridges)


def test_nvswitches_and_nics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, look: Callable[..., Ran]) -> None:
    smi = FakeSmi(tmp_path / "bin", h200(8))
    monkeypatch.setenv("PATH", smi.path)
    host = pcie_box(tmp_path / "root", smi)
    for place in range(8):
        host.device(f"0000:{'10' if place < 4 else '70'}:0{place + 1}.1", "0207 15b3:101c", bridge=f"pci0000:{'10' if place < 4 else '70'}",
                    numa_node=str(place // 4))  # fmt: skip
        (host.places[f"0000:{'10' if place < 4 else '70'}:0{place + 1}.1"] / "infiniband" / f"mlx5_{place}").mkdir(parents=True)
    names = [f"mlx5_{place}" for place in range(8)]
    host.topo(matrix([*EIGHT, *(f"NIC{place}" for place in range(8))], dgx, numa=NUMA, nics=names))
    for gpu in smi.gpus:
        host.set(gpu["pci.bus_id"][4:].lower(), current_link_speed="32.0 GT/s PCIe")
    ran = look(host, gpus=8)
    assert ran.status == "ok", ran.codes
    assert {pair.transport for pair in ran.result.pairs} == {"nvlink"}
    assert [(nic.label, nic.names) for nic in ran.result.nics] == [(f"NIC{place}", (f"mlx5_{place}",)) for place in range(8)]
    assert ran.result.nics[0].bus_id == "0000:10:01.1"
    assert (ran.result.gpus[2].nearest_nics, ran.result.gpus[2].nic_link) == (("NIC2", "NIC3"), "PIX")


# Faults --------------------------------------------------------------------------------------------------------------


def test_a_lane_is_missing(box: GpuHost, look: Callable[..., Ran]) -> None:
    box.set(BUS[2], current_link_width="8")
    ran = look(box, p2p_level="SYS")
    assert ran.status == "degraded"
    finding = ran.one("pcie-width")
    assert finding.subject == f"gpu 2 {BUS[2]} {box.smi.gpus[2]['uuid']}"
    assert (finding.value, finding.threshold, finding.level) == (8, 16, "degraded")
    assert [gpu.status for gpu in ran.result.gpus] == ["ok", "ok", "degraded", *["ok"] * 5]
    # Its slot is as good as the others'.
    assert ran.found("sibling-outlier") == []


def test_lanes_are_missing_above_a_switch(box: GpuHost, look: Callable[..., Ran]) -> None:
    box.set("0000:70:08.0", current_link_width="4")
    finding = look(box, p2p_level="SYS").one("pcie-width")
    assert "0000:70:08.0" in (finding.subject or "")
    assert finding.value == 4


def test_a_narrow_slot_is_no_fault_where_all_have_it(box: GpuHost, look: Callable[..., Ran]) -> None:
    for place, bus_id in enumerate(BUS):
        box.set(bus_id, current_link_width="8")
        box.set(f"0000:{'10' if place < 4 else '70'}:1{place % 4}.0", max_link_width="8", current_link_width="8")
    ran = look(box, p2p_level="SYS")
    assert ran.status == "ok", ran.codes
    assert ran.result.gpus[0].pcie_width_max == 8


def test_one_card_in_a_narrow_slot(box: GpuHost, look: Callable[..., Ran]) -> None:
    box.set(BUS[0], current_link_width="8")
    box.set("0000:10:10.0", max_link_width="8", current_link_width="8")
    finding = look(box, p2p_level="SYS").one("sibling-outlier")
    assert (finding.subject or "").startswith("gpu 0 ")
    assert (finding.value, finding.threshold) == (8.0, 16.0)


def test_speed_is_judged_only_under_load(box: GpuHost, look: Callable[..., Ran]) -> None:
    assert look(box, p2p_level="SYS").status == "ok"
    load(box.smi.gpus[3])
    box.smi.write()
    ran = look(box, p2p_level="SYS")
    slow = [finding for finding in ran.found("pcie-speed") if finding.level == "degraded"]
    assert [(finding.subject or "").split()[1] for finding in slow] == ["3"]
    assert ran.result.gpus[3].status == "degraded"


def test_nobody_knows_whether_it_works(box: GpuHost, look: Callable[..., Ran]) -> None:
    box.smi.gpus[3].update({"utilization.gpu": "[N/A]", "pstate": "P0"})
    box.smi.write()
    ran = look(box, p2p_level="SYS")
    assert ran.status == "unknown"
    assert ran.result.gpus[3].idle is None
    assert ran.result.gpus[3].status == "unknown"


def test_a_slow_link_above_a_switch(box: GpuHost, look: Callable[..., Ran]) -> None:
    box.set("0000:10:08.0", current_link_speed="16.0 GT/s PCIe")
    slow = [finding for finding in look(box, p2p_level="SYS").found("pcie-speed") if finding.level == "degraded"]
    assert [(finding.value, finding.threshold) for finding in slow] == [(16.0, 32.0)]


def test_one_card_in_a_slower_slot(box: GpuHost, look: Callable[..., Ran]) -> None:
    box.set("0000:10:12.0", max_link_speed="16.0 GT/s PCIe", current_link_speed="16.0 GT/s PCIe")
    finding = look(box, p2p_level="SYS").one("sibling-outlier")
    assert (finding.subject or "").startswith("gpu 2 ")
    assert (finding.value, finding.threshold) == (16.0, 32.0)


@pytest.mark.parametrize("speed", ["Unknown", "Unknown speed", "0 GT/s", "", "99 GT/s PCIe"])
def test_a_link_that_does_not_tell(box: GpuHost, look: Callable[..., Ran], speed: str) -> None:
    box.set(BUS[1], current_link_speed=speed, current_link_width="0")
    ran = look(box, p2p_level="SYS")
    assert ran.status == "unknown"
    assert ran.one("width-unknown").subject == f"gpu 1 {BUS[1]} {box.smi.gpus[1]['uuid']}"
    gpu = ran.result.gpus[1]
    assert (gpu.pcie_width, gpu.pcie_speed_gts, gpu.status) == (None, None, "unknown")
    assert gpu.missing["pcie_width"].text == "0"
    assert [other.status for other in ran.result.gpus].count("ok") == 7


def test_a_card_that_nvidia_smi_does_not_list(box: GpuHost, look: Callable[..., Ran]) -> None:
    del box.smi.gpus[4]
    box.smi.write()
    box.topo(matrix([name for name in EIGHT if name != "GPU4"], one_switch))
    ran = look(box, gpus=8)
    assert ran.status == "fail"
    assert ran.one("gpu-not-listed").subject == f"gpu ? {BUS[4]} GPU-00000004-5eed-4000-8000-000000000004"
    assert ran.one("gpu-count").level == "fail"
    assert (ran.result.gpus[-1].index, ran.result.gpus[-1].bus_id, ran.result.gpus[-1].status) == (None, BUS[4], "fail")


def test_a_card_that_another_machine_or_container_has_is_not_lost(box: GpuHost, look: Callable[..., Ran]) -> None:
    (box.root / "proc/driver/nvidia/gpus" / BUS[4] / "information").unlink()
    (box.root / "proc/driver/nvidia/gpus" / BUS[4]).rmdir()
    del box.smi.gpus[4]
    box.smi.write()
    box.topo(matrix([f"GPU{place}" for place in range(8) if place != 4], one_switch))
    assert look(box).one("gpu-not-listed").level == "fail"
    box.write(".dockerenv", "")
    assert look(box).one("gpu-not-here").level == "ok"
    (box.root / ".dockerenv").unlink()
    (box.root / "sys/bus/pci/drivers/vfio-pci").mkdir(parents=True)
    (box.places[BUS[4]] / "driver").symlink_to(box.root / "sys/bus/pci/drivers/vfio-pci")
    assert look(box).one("gpu-passed-on").level == "ok"


def test_a_card_whose_line_cannot_be_read_is_not_called_gone(box: GpuHost, look: Callable[..., Ran]) -> None:
    box.smi.gpus[4]["pci.bus_id"] = "?"
    box.smi.write()
    ran = look(box, gpus=8, p2p_level="SYS")
    assert (ran.one("gpu-not-listed").level, ran.one("gpu-count").level, ran.status) == ("unknown", "unknown", "unknown")


@pytest.mark.parametrize("status", [15, 255])
def test_a_list_that_breaks_off_is_not_whole(box: GpuHost, look: Callable[..., Ran], status: int) -> None:
    assert look(box, p2p_level="SYS").status == "ok"
    (box.smi.folder / "nvidia-smi").rename(box.smi.folder / "real")
    box.smi.program("nvidia-smi", f'"${{0%/*}}/real" "$@"; case "$*" in *--query-gpu*) exit {status};; esac')
    ran = look(box, p2p_level="SYS")
    assert (ran.status, ran.one("list-unread").evidence) == ("unknown", (f"nvidia-smi ended with status {status} after 8 lines",))


def test_two_cards_in_one_place(box: GpuHost, look: Callable[..., Ran]) -> None:
    box.smi.gpus[4]["pci.bus_id"] = box.smi.gpus[3]["pci.bus_id"]
    box.smi.write()
    assert "two GPUs at" in look(box).one("list-unread").evidence[0]


def test_a_card_that_is_gone_from_the_bus(box: GpuHost, look: Callable[..., Ran]) -> None:
    (box.root / "sys/bus/pci/devices" / BUS[4]).unlink()
    box.lspci(without=[BUS[4]])
    finding = look(box).one("gpu-not-on-bus")
    assert (finding.level, (finding.subject or "").split()[:3]) == ("fail", ["gpu", "4", BUS[4]])


def test_a_card_whose_files_cannot_be_read(box: GpuHost, look: Callable[..., Ran]) -> None:
    (box.places[BUS[4]] / "class").unlink()
    ran = look(box, p2p_level="SYS")
    assert (ran.one("bus-unknown").level, ran.result.gpus[4].status) == ("unknown", "unknown")
    assert ran.result.gpus[4].missing["pcie_width"].reason == "not-reported"
    box.smi.program("lspci", "exit 1")
    assert look(box, p2p_level="SYS").one("gpu-not-on-bus").level == "unknown"


def test_a_bus_that_cannot_be_read(box: GpuHost, look: Callable[..., Ran]) -> None:
    shutil.rmtree(box.root / "sys/bus")
    ran = look(box, p2p_level="SYS")
    assert ran.one("bus-unknown").level == "unknown"
    assert ran.status == "unknown"
    assert all(gpu.pcie_width is None and gpu.missing["pcie_width"].text for gpu in ran.result.gpus)


def test_a_card_that_answers_with_ones(box: GpuHost, look: Callable[..., Ran]) -> None:
    box.lspci(lost=[BUS[6]])
    ran = look(box)
    finding = ran.one("gpu-lost")
    assert (finding.level, (finding.subject or "").split()[:3]) == ("fail", ["gpu", "6", BUS[6]])
    assert "power-cycle" in (finding.action or "")
    assert ran.result.gpus[6].missing["pcie_width"].reason == "gpu-lost"


def test_a_lost_card_between_the_rows(box: GpuHost, look: Callable[..., Ran]) -> None:
    box.smi.lose(2)
    ran = look(box)
    assert ran.status == "fail"
    assert BUS[2] in str([finding.subject for finding in ran.findings if finding.level == "fail"])
    assert sum(gpu.status == "ok" for gpu in ran.result.gpus) >= 5


def test_the_driver_is_not_reachable(box: GpuHost, look: Callable[..., Ran]) -> None:
    box.smi.fail("Failed to initialize NVML: Driver/library version mismatch\nNVML library version: 590.48\n", 18)
    ran = look(box, gpus=8)
    assert ran.status == "fail"
    assert "driver-library-mismatch" in ran.codes
    assert len(ran.result.gpus) == 8
    assert ran.one("gpu-count").level == "unknown"
    assert {gpu.status for gpu in ran.result.gpus} == {"unknown"}


def test_nvidia_smi_hangs(box: GpuHost, look: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_smi, "SMI_SECONDS", 0.5)
    with box.smi.hanging():
        ran = look(box)
        assert len(box.smi.calls()) == 1
    assert ran.status == "unknown"
    assert "did not answer" in str(ran.result.unread)
    assert len(ran.result.gpus) == 8


@pytest.mark.parametrize("when", ["topo -m", "-p2p w"])
def test_a_driver_that_hangs_half_way_is_a_finding_and_nobody_is_sent_to_ask_it_again(
    box: GpuHost, look: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    monkeypatch.setattr(run_smi, "SMI_SECONDS", 0.5)
    with box.smi.hanging(when, killable=False):
        ran = look(box, gpus=8)
        if not box.smi.running():
            pytest.skip("no freezer cgroup (version 1) can be made here")
    (hang,) = ran.found("driver-hangs")
    assert (hang.level, hang.subject, ran.status) == ("fail", None, "fail")
    assert when in hang.evidence[0]
    unknown = [one for one in ran.findings if one.level == "unknown"]
    assert unknown
    assert not [one for one in unknown if "nvidia-smi" in (one.action or "")]


def test_no_nvidia_smi_and_no_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, look: Callable[..., Ran]) -> None:
    monkeypatch.setattr(where, "_MORE_PATH", ())
    (tmp_path / "empty").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    ran = look(tmp_path / "empty", gpus=8)
    assert ran.status == "unknown"
    assert ran.result.gpus == ()


def test_topo_fails_because_of_software_rdma(box: GpuHost, look: Callable[..., Ran]) -> None:
    box.smi.answers = []
    box.smi.answer(("topo", "-m"), "Failed to run topology matrix\n", 255)
    ran = look(box)
    finding = ran.one("no-matrix")
    assert finding.level == "unknown"
    assert "RDMA" in (finding.action or "")
    # The bus tells how they are joined, and that is not the whole truth.
    assert {pair.link for pair in ran.result.pairs} == {"PIX", "SYS"}
    assert not any(pair.certain for pair in ran.result.pairs)
    assert ran.status in {"unknown", "degraded"}


def test_a_matrix_that_does_not_fit_the_list(box: GpuHost, look: Callable[..., Ran]) -> None:
    box.topo(matrix(EIGHT[:7], one_switch))
    ran = look(box)
    assert ran.one("matrix-other-gpus").evidence == ("GPU7",)
    assert {pair.transport for pair in ran.result.pairs if 7 in {pair.a, pair.b}} == {"unknown"}


def test_halves_that_disagree(box: GpuHost, look: Callable[..., Ran]) -> None:
    box.topo(matrix(EIGHT, lambda a, b: "SYS" if (a, b) == (0, 1) else two_switches(a, b)))
    ran = look(box)
    assert ran.one("matrix-asymmetric").subject == "GPU0-GPU1"
    assert [gpu.status for gpu in ran.result.gpus[:3]] == ["unknown", "unknown", "ok"]


def test_a_driver_without_p2p(box: GpuHost, look: Callable[..., Ran]) -> None:
    for gpu in box.smi.gpus:
        gpu["name"] = "NVIDIA GeForce RTX 4090"
    box.topo(matrix(EIGHT, two_switches), refused)
    ran = look(box)
    finding = ran.one("p2p-not-allowed")
    assert finding.level == "degraded"
    assert "patched driver" in (finding.action or "")
    assert {pair.transport for pair in ran.result.pairs} == {"shm"}


def test_reads_without_writes(box: GpuHost, look: Callable[..., Ran]) -> None:
    box.topo(matrix(EIGHT, two_switches), w=lambda a, b: "NS" if {a, b} == {0, 1} else "OK")
    ran = look(box)
    assert ran.one("p2p-one-sided").subject == "GPU0-GPU1"
    assert next(pair.transport for pair in ran.result.pairs if (pair.a, pair.b) == (0, 1)) == "shm"


def test_nvlinks_that_the_driver_forbids(box: GpuHost, look: Callable[..., Ran]) -> None:
    box.topo(matrix(EIGHT, dgx), lambda a, b: "TNS" if {a, b} == {2, 5} else "OK")
    ran = look(box)
    assert ran.one("nccl-refuses").subject == "GPU2-GPU5"
    assert ran.status == "fail"


def test_one_gpu_with_fewer_nvlinks(box: GpuHost, look: Callable[..., Ran]) -> None:
    box.topo(matrix(EIGHT, lambda a, b: "NV17" if 3 in {a, b} else "NV18"))
    outliers = look(box).found("nvlink-outlier")
    assert "gpu 3 " in str([finding.subject for finding in outliers])


def test_acs_redirects(box: GpuHost, look: Callable[..., Ran]) -> None:
    box.acs["0000:10:11.0"] = "SrcValid+ TransBlk- ReqRedir+ CmpltRedir+ UpstreamFwd+ EgressCtrl- DirectTrans-"
    box.lspci()
    ran = look(box, p2p_level="SYS")
    finding = ran.one("acs-redirect")
    assert (finding.level, finding.subject, finding.value) == ("degraded", "0000:10:11.0", 1)
    assert "setpci" in (finding.action or "")
    box.virtual()
    assert look(box, p2p_level="SYS").one("acs").level == "ok"


def test_acs_needs_root(box: GpuHost, look: Callable[..., Ran]) -> None:
    box.lspci(root=False)
    ran = look(box, p2p_level="SYS")
    assert ran.one("acs-unknown").level == "unknown"
    assert ran.status == "unknown"
    # Where every pair has NVLinks it does not matter.
    box.topo(matrix(EIGHT, dgx))
    assert "acs-unknown" not in look(box).codes


def test_the_iommu_translates(box: GpuHost, look: Callable[..., Ran]) -> None:
    for group in (box.root / "sys/kernel/iommu_groups").iterdir():
        (group / "type").write_text("DMA-FQ\n")
    finding = look(box, p2p_level="SYS").one("iommu-translated")
    assert finding.level == "degraded"
    assert "iommu=pt" in (finding.action or "")
    box.virtual()
    assert "iommu-translated" not in look(box, p2p_level="SYS").codes


def test_nobody_tells_about_the_iommu(box: GpuHost, look: Callable[..., Ran]) -> None:
    for bus_id in BUS:
        (box.places[bus_id] / "iommu_group").unlink()
    box.write("proc/cmdline", "quiet\n")
    assert look(box, p2p_level="SYS").one("iommu-unknown").level == "unknown"
    box.smi.kernel_log("[    0.5] iommu: Default domain type: Translated")
    assert look(box, p2p_level="SYS").one("iommu-translated").level == "degraded"


def test_a_small_window(box: GpuHost, look: Callable[..., Ran]) -> None:
    (box.places[BUS[0]] / "resource").write_text("0x0 0x0 0x0\n0x0000380000000000 0x000038000fffffff 0x14220c\n")
    finding = look(box, p2p_level="SYS").one("bar1-small")
    assert (finding.value, (finding.subject or "").split()[1]) == (256, "0")


def test_firmware_without_numa(box: GpuHost, look: Callable[..., Ran]) -> None:
    box.set(BUS[0], numa_node="-1")
    ran = look(box, p2p_level="SYS")
    assert (ran.one("numa-unknown").subject or "").startswith("gpu 0 ")
    shutil.rmtree(box.root / "sys/devices/system/node/node1")
    assert look(box, p2p_level="SYS").found("numa-unknown") == []


def test_settings_of_nccl_count(box: GpuHost, look: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch) -> None:
    box.write("etc/nccl.conf", "NCCL_P2P_DISABLE=1\n")
    ran = look(box)
    assert {pair.transport for pair in ran.result.pairs} == {"shm"}
    assert "/etc/nccl.conf" in (ran.one("nccl-through-host").action or "")
    monkeypatch.setenv("NCCL_P2P_DISABLE", "0")
    monkeypatch.setenv("NCCL_P2P_LEVEL", "SYS")
    assert {pair.transport for pair in look(box).result.pairs} == {"p2p"}


def test_amd_hosts_are_told_of_nccls_model(box: GpuHost, look: Callable[..., Ran]) -> None:
    box.write("proc/cpuinfo", "vendor_id\t: AuthenticAMD\nflags\t\t: fpu\n")
    finding = look(box, p2p_level="SYS").one("nccl-amd-model")
    assert (finding.level, finding.value) == ("ok", 16)
    assert "NCCL_MIN_CTAS" in (finding.action or "")


def test_errors_of_links_in_the_kernel_log(box: GpuHost, look: Callable[..., Ran]) -> None:
    box.smi.kernel_log(
        f"[  100.0] nvidia {BUS[1]}: PCIe Bus Error: severity=Uncorrected (Fatal), type=Transaction Layer",
        f"[  200.0] NVRM: Xid (PCI:{BUS[2][:-2]}): 79, GPU has fallen off the bus.",
        "[  300.0] nvme 0000:99:00.0: PCIe Bus Error: severity=Uncorrected (Fatal), type=Transaction Layer",
        f"[  400.0] NVRM: Xid (PCI:{BUS[3][:-2]}): 13, pid=1, name=python3, Graphics Exception",
    )  # fmt: skip
    ran = look(box)
    assert (ran.one("pcie-error").subject or "").startswith(f"gpu 1 {BUS[1]}")
    assert (ran.one("xid-79").subject or "").startswith(f"gpu 2 {BUS[2]}")
    assert [gpu.status for gpu in ran.result.gpus[:4]] == ["ok", "fail", "fail", "ok"]


def test_a_link_that_was_limited_at_boot_and_has_its_lanes_is_no_news(box: GpuHost, look: Callable[..., Ran]) -> None:
    line = f"[ 2.5] pci {BUS[1]}: 63.0 Gb/s available PCIe bandwidth, limited by 2.5 GT/s PCIe x16 link at 0000:10:11.0 (capable of 504.1 Gb/s with 32.0 GT/s PCIe x16 link)"
    box.smi.kernel_log(line)
    assert "pcie-limited" not in look(box).codes
    box.set(BUS[1], current_link_width="8")
    assert "pcie-limited" in look(box).codes


def test_a_kernel_log_that_may_not_be_read_is_said(box: GpuHost, look: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_log_source, "KMSG", "/absent")
    box.smi.program("dmesg", "echo 'dmesg: read kernel buffer failed: Operation not permitted' >&2; exit 1")
    ran = look(box, p2p_level="SYS")
    assert ran.one("kernel-log").level == "skipped"
    assert "not permitted" in str(ran.result.unread)


# Mutation ------------------------------------------------------------------------------------------------------------


def mutations() -> Iterator[tuple[str, str]]:
    """Yield (what, matrix) for every way of damaging a matrix of eight GPUs that could hide that two are far apart."""
    text = matrix(EIGHT, two_switches, numa=NUMA)
    lines = text.splitlines()
    for row, column in ((0, 1), (0, 7), (4, 3), (7, 6)):
        for sentinel in SENTINELS:
            cells = lines[row + 1].split("\t")
            cells[column + 1] = sentinel
            yield f"cell {row} {column} {sentinel!r}", "\n".join([*lines[: row + 1], "\t".join(cells), *lines[row + 2 :]])
    for place in range(1, 9):
        yield f"without line {place}", "\n".join(lines[:place] + lines[place + 1 :])
        yield f"cut in line {place}", "\n".join([*lines[:place], lines[place][:20]])
        yield f"label in line {place}", "\n".join([*lines[:place], "[1,0]<stdout>:" + lines[place], *lines[place + 1 :]])
        yield f"without column {place}", "\n".join(
            "\t".join(cells[:place] + cells[place + 1 :]) for cells in (line.split("\t") for line in lines[:9])
        )


@pytest.mark.parametrize(("what", "text"), list(mutations()))
def test_no_damage_of_the_matrix_makes_a_far_pair_near(parse: Callable[..., Ran], what: str, text: str) -> None:
    del what
    sound = {(pair.a, pair.b): pair.link for pair in parse(matrix(EIGHT, two_switches)).result.pairs}
    try:
        ran = parse(text, p2p_level="SYS", gpus=8)
    except ValueError:
        return
    assert ran.status in {"unknown", "fail"}
    assert not ran.result.matrix_complete
    for pair in ran.result.pairs:
        assert pair.link in {None, sound[pair.a, pair.b]}
        assert (pair.transport == "unknown") == (pair.link is None)
    hurt = {index for pair in ran.result.pairs if pair.link is None for index in (pair.a, pair.b)}
    for gpu in ran.result.gpus:
        assert (gpu.status == "unknown") == (gpu.index in hurt)


@pytest.mark.parametrize("letter", ["r", "w"])
def test_no_damage_of_what_the_driver_allows_is_taken_for_yes(again: Callable[..., Ran], letter: str) -> None:
    for word in (*SENTINELS, "U", "0K"):
        ran = again({f"-p2p {letter}": peers(8, lambda a, b, word=word: word if (a, b) == (2, 1) else "OK")})  # type: ignore[misc]
        assert ran.status == "unknown", word
        for pair in ran.result.pairs:
            assert pair.certain == ((pair.a, pair.b) != (1, 2)), word
    sound = peers(8)
    for end in range(0, sound.index("Legend") - 8, 11):
        ran = again({f"-p2p {letter}": sound[:end]})
        assert ran.status == "unknown", end
        assert not all(pair.certain for pair in ran.result.pairs), end


@pytest.mark.parametrize("place", range(len(topo_reading.FIELDS)))
def test_no_damage_of_the_list_costs_another_gpu(again: Callable[..., Ran], place: int) -> None:
    field = topo_reading.FIELDS[place]
    lines = next(said.out for command, said in Replay.said.items() if "--query-gpu" in command).splitlines()
    for sentinel in SENTINELS:
        cells = lines[3].split(", ")
        cells[place] = sentinel
        ran = again({"--query-gpu": "\n".join([*lines[:3], ", ".join(cells), *lines[4:]])})
        assert [gpu.status for gpu in ran.result.gpus if gpu.bus_id != BUS[3]] == ["ok"] * 7, sentinel
        assert len(ran.result.gpus) == 8
        hurt = next(gpu for gpu in ran.result.gpus if gpu.bus_id == BUS[3])
        if field in {"index", "pci.bus_id"}:
            assert ran.status in {"fail", "unknown"}
            assert hurt.status != "ok"
        elif field == "utilization.gpu":
            assert hurt.idle is True  # P8 says so as well.
        else:
            assert hurt.status == "ok"


def test_lists_that_are_cut_or_glued(again: Callable[..., Ran]) -> None:
    text = next(said.out for command, said in Replay.said.items() if "--query-gpu" in command)
    for end in range(0, len(text) - 60, 13):
        ran = again({"--query-gpu": text[:end]})
        assert ran.status in {"fail", "unknown"}, end
        assert len(ran.result.gpus) == 8, end
    lines = text.splitlines()
    for label in ("0: ", "[1,0]<stdout>:", "host "):
        ran = again({"--query-gpu": "\n".join([*lines[:3], label + lines[3], *lines[4:]])})
        assert ran.status == "unknown", label
        assert [gpu.status for gpu in ran.result.gpus if gpu.bus_id != BUS[3]] == ["ok"] * 7, label


@pytest.mark.parametrize("name", ["current_link_width", "max_link_width", "current_link_speed", "max_link_speed"])
def test_no_damage_of_a_link_turns_a_fault_into_ok(again: Callable[..., Ran], box: GpuHost, name: str) -> None:
    for text in ("", "Unknown", "-1", "0", "255", "x16", "99 GT/s PCIe"):
        box.set(BUS[3], **{"current_link_width": "8", name: text})
        assert again().result.gpus[3].status in {"degraded", "unknown"}, text


def test_no_damage_of_lspci_acquits_acs(again: Callable[..., Ran], box: GpuHost) -> None:
    text = next(said.out for command, said in Replay.said.items() if command.startswith("lspci"))
    on = text.replace("ReqRedir- CmpltRedir-", "ReqRedir+ CmpltRedir+")
    assert again({"lspci": on}).status == "degraded"
    for cut in ("ACSCtl:", "\tSrcValid+ TransBlk- ReqRedir+", "\t\tACSCtl"):
        assert again({"lspci": on.replace(cut, "?")}).status in {"degraded", "unknown"}, cut
    del box


# Saved ---------------------------------------------------------------------------------------------------------------


@captures.needs_captures
@pytest.mark.parametrize("name", captures.names("topo_m__*"))
def test_captures(parse: Callable[..., Ran], name: str) -> None:
    ran = parse(captures.read(name))
    assert ran.status == "ok", ran.codes
    assert ran.result.source == "saved"
    assert all(gpu.bus_id is None and gpu.missing["bus_id"].reason == "not-reported" for gpu in ran.result.gpus)


def test_what_is_saved_says_what_it_takes_for_granted(parse: Callable[..., Ran]) -> None:
    ran = parse(matrix(EIGHT, dgx))
    assert not any(pair.certain for pair in ran.result.pairs)
    assert "taken for granted" in ran.one("nccl").message
    assert parse(matrix(EIGHT, two_switches), gpus=8).one("nccl-through-host").value == 16
    assert parse(matrix(EIGHT, dgx), gpus=9).status == "fail"


@pytest.mark.parametrize("text", ["Failed to run topology matrix", "", peers(0), "GPU 0: NVIDIA H200"])
def test_what_is_no_matrix_is_refused(parse: Callable[..., Ran], text: str) -> None:
    with pytest.raises(ValueError, match=r"matrix|header|empty"):
        parse(text)


def test_answers_about_peers_are_no_link_matrix(parse: Callable[..., Ran]) -> None:
    with pytest.raises(ValueError, match=r"nvidia-smi topo -p2p.*save topo -m"):
        parse(peers(4))


@pytest.mark.parametrize("params", [{"gpus": -1}, {"p2p_level": "sys"}, {"root": "relative"}])
def test_params_that_make_no_sense(params: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="must be"):
        PROBE.Params(**params)
