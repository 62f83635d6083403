"""What around the GPUs holds them back: read below a folder that stands for ``/``."""

from __future__ import annotations

import os
import resource
import subprocess
from pathlib import Path

import pytest

from probes.lib.gpu import occupancy, owners, surroundings
from probes.lib.gpu.collect import Seen
from probes.lib.gpu.judgement import Judgement
from probes.lib.gpu.looking import Surroundings
from probes.lib.gpu.missing import NOT_REPORTED
from probes.lib.gpu.smi_reading import SmiProcess
from probes.lib.gpu.thresholds import Thresholds

BUSES = ("0000:01:00.0", "0000:21:00.0")
GOVERNOR = "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"
DRIVER = "sys/devices/system/cpu/cpu0/cpufreq/scaling_driver"


def write(root: Path, files: dict[str, str]) -> str:
    for path, text in files.items():
        file = root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return str(root)


def levels(judgements: list[Judgement]) -> dict[str, str]:
    return {one.code: one.level for one in judgements}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, "a host of its own"),
        ({".dockerenv": ""}, "a container (docker)"),
        ({"run/.containerenv": ""}, "a container (podman)"),
        ({"proc/1/cgroup": "0::/kubepods.slice/pod1\n"}, "a container (kubernetes)"),
        ({"proc/1/cgroup": "0::/init.scope\n"}, "a host of its own"),
        ({"proc/version": "Linux version 5.15.167.4-microsoft-standard-WSL2 (root@x)\n"}, "WSL"),
        ({"proc/cpuinfo": "flags\t\t: fpu hypervisor\n"}, "a virtual machine"),
        ({"proc/cpuinfo": "flags\t\t: fpu hypervisor\n", ".dockerenv": ""}, "a container (docker) in a virtual machine"),
    ],
)
def test_where_the_host_stands(tmp_path: Path, files: dict[str, str], expected: str) -> None:
    assert surroundings.describe(surroundings.look_around(write(tmp_path, files))) == expected


@pytest.mark.parametrize(
    ("namespace", "version", "container"),
    [("4026531836", "", None), ("4026532480", "", "its own process ids"), ("4026532480", "x-microsoft-standard-WSL2", None)],
)
def test_a_container_that_shows_no_name_counts_processes_of_its_own(
    tmp_path: Path, namespace: str, version: str, container: str | None
) -> None:
    root = write(tmp_path, {"proc/1/cgroup": "0::/\n", "proc/version": version})
    (tmp_path / "proc/self/ns").mkdir(parents=True)
    (tmp_path / "proc/self/ns/pid").symlink_to(f"pid:[{namespace}]")
    assert surroundings.look_around(root).container == container


@pytest.mark.parametrize(
    ("governor", "driver", "level"),
    [
        ("powersave", "acpi-cpufreq", "degraded"), ("powersave", "intel_pstate", "ok"), ("powersave", "amd-pstate-epp", "ok"),
        ("performance", "acpi-cpufreq", "ok"), ("powersave", None, "degraded"), (None, None, "skipped"),
    ],
)  # fmt: skip
def test_the_governor(tmp_path: Path, governor: str | None, driver: str | None, level: str) -> None:
    files = {path: f"{text}\n" for path, text in ((GOVERNOR, governor), (DRIVER, driver)) if text is not None}
    (judgement,) = surroundings.judge_numa((), write(tmp_path, files))
    assert (judgement.code, judgement.level) == ("cpu-governor", level)
    assert ("cpupower" in (judgement.action or "")) is (level == "degraded")


@pytest.mark.parametrize(("nodes", "node", "told"), [(2, "-1", True), (1, "-1", False), (2, "1", False), (2, None, False)])
def test_gpus_whose_node_is_not_known(tmp_path: Path, nodes: int, node: str | None, *, told: bool) -> None:
    root = write(tmp_path, {} if node is None else {f"sys/bus/pci/devices/{BUSES[0]}/numa_node": f"{node}\n"})
    for number in range(nodes):
        (tmp_path / f"sys/devices/system/node/node{number}").mkdir(parents=True)
    found = levels(surroundings.judge_numa(BUSES, root))
    assert found.get("numa-unknown") == ("degraded" if told else None)


@pytest.mark.parametrize(
    ("modules", "infiniband", "code", "level"),
    [
        (None, False, "driver-modules", "skipped"),
        ("ext4 1 2 - Live 0x0\n", False, "driver-modules", "skipped"),
        ("nvidia 1 2 - Live 0x0\nnvidia_modeset 1 2 - Live 0x0\n", False, "uvm-not-loaded", "degraded"),
        ("nvidia_uvm 1 0 - Live 0x0\nnvidia 1 2 nvidia_uvm, Live 0x0\n", True, "driver-modules", "ok"),
    ],
)
def test_modules(tmp_path: Path, modules: str | None, code: str, level: str, *, infiniband: bool) -> None:
    root = write(tmp_path, {} if modules is None else {"proc/modules": modules})
    if infiniband:
        (tmp_path / "sys/class/infiniband").mkdir(parents=True)
    (judgement,) = surroundings.judge_modules(multi_gpu=True, root=root)
    assert (judgement.code, judgement.level) == (code, level)
    assert ("nvidia_peermem" in judgement.message) is infiniband


def test_limits_of_this_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert levels(surroundings.judge_limits(Thresholds(), str(tmp_path)))["shared-memory"] == "skipped"
    (tmp_path / "dev/shm").mkdir(parents=True)
    (tmp_path / "sys/class/infiniband").mkdir(parents=True)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 1024))
    monkeypatch.setattr(surroundings, "_shm_bytes", lambda _: 64 << 20)
    found = levels(surroundings.judge_limits(Thresholds(), str(tmp_path)))
    assert found == {"shared-memory": "degraded", "open-files": "degraded", "locked-memory": "degraded"}
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, resource.RLIM_INFINITY))
    found = levels(surroundings.judge_limits(Thresholds({"gpu.shm_gib": 0.01}), str(tmp_path)))
    assert found == {"shared-memory": "ok", "open-files": "ok", "locked-memory": "ok"}


@pytest.mark.parametrize(
    ("kinds", "domain", "code", "level"),
    [
        (("DMA-FQ", "DMA-FQ"), None, "iommu-translated", "ok"), (("identity", "DMA"), None, "iommu-translated", "ok"),
        (("identity", "identity"), "Translated", "iommu", "ok"), ((), "Translated", "iommu-translated", "ok"), ((), None, "iommu", "skipped"),
    ],
)  # fmt: skip
def test_the_iommu(tmp_path: Path, kinds: tuple[str, ...], domain: str | None, code: str, level: str) -> None:
    (tmp_path / "sys/kernel/iommu_groups/0").mkdir(parents=True)
    root = write(tmp_path, {f"sys/bus/pci/devices/{bus}/iommu_group/type": kind for bus, kind in zip(BUSES, kinds, strict=False)})
    (judgement,) = surroundings.judge_iommu(BUSES, domain, root)
    assert (judgement.code, judgement.level) == (code, level)


def test_no_iommu_is_off(tmp_path: Path) -> None:
    (tmp_path / "sys/kernel/iommu_groups").mkdir(parents=True)
    (judgement,) = surroundings.judge_iommu(BUSES, None, str(tmp_path))
    assert (judgement.level, judgement.message) == ("ok", "the IOMMU is off")


def holder(pid: int, around: Surroundings) -> owners.Holder:
    everybody = owners.holders(Seen(processes=[SmiProcess(pid, "train", NOT_REPORTED, uuid="GPU-a")], around=around))
    assert everybody is not None
    return everybody[0]


def test_a_process_that_proc_hides_has_not_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    with subprocess.Popen(["sleep", "1000"]) as there:
        monkeypatch.setattr(os.path, "exists", lambda _: False)
        found = holder(there.pid, Surroundings())
        there.kill()
    assert (found.alive, found.user) == (True, None)
    assert holder(there.pid, Surroundings()).alive is False
    assert holder(there.pid, Surroundings(container="docker")).alive is None
    assert holder(1 << 40, Surroundings()).alive is False


def test_a_number_from_outside_a_container_names_nobody_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.readlink
    devices = {"open": "/dev/null"}
    monkeypatch.setattr(os, "readlink", lambda path: "pid:[4026532480]" if path.endswith("ns/pid") else devices["open"] if "/fd/" in path else real(path))
    process = occupancy.GpuProcess(f"{os.getpid()}, train, 100 MiB")
    assert "user unknown" in process.describe()
    found = holder(os.getpid(), Surroundings(container="its own process ids"))
    assert (found.user, found.container, found.alive) == (None, None, None)
    devices["open"] = "/dev/nvidia3"
    assert f"user {occupancy.owner(os.getpid())}" in process.describe()
    assert holder(os.getpid(), Surroundings(container="its own process ids")).alive is True
