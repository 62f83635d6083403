from __future__ import annotations

from pathlib import Path

import pytest

from probes.lib.gpu import nccl_paths
from probes.lib.gpu.nccl_paths import Level, Setting, Way
from probes.lib.gpu.topology import Link, parse_matrix
from tests.support.smi_topology import matrix

PXB = Level("PXB", "NCCL's default", default=True)


def given(**values: str) -> dict[str, Setting]:
    return {name: Setting(name, value, "the environment") for name, value in values.items()}


def way(kind: str | None, read: str | None = "OK", write: str | None = "OK", limit: Level = PXB, **settings: str) -> Way:
    link = None if kind is None else Link("NV", int(kind[2:])) if kind.startswith("NV") else Link(kind)
    return nccl_paths.way(link, limit, read, write, given(**settings))


@pytest.mark.parametrize(
    ("kind", "transport"),
    [("NV18", "nvlink"), ("PIX", "p2p"), ("PXB", "p2p"), ("PHB", "shm"), ("NODE", "shm"), ("SYS", "shm"), (None, "unknown")],
)
def test_the_default_ends_at_pxb(kind: str | None, transport: str) -> None:
    found = way(kind)
    assert found.transport == transport
    assert found.certain == (kind is not None)


@pytest.mark.parametrize(
    ("value", "reaches"),
    [("LOC", ""), ("NVL", "NV18"), ("PIX", "NV18 PIX"), ("PXB", "NV18 PIX PXB"), ("PHB", "NV18 PIX PXB PHB NODE"),
     ("SYS", "NV18 PIX PXB PHB NODE SYS"), ("0", ""), ("1", "NV18 PIX"), ("2", "NV18 PIX PXB"), ("3", "NV18 PIX PXB PHB NODE"),
     ("4", "NV18 PIX PXB PHB NODE SYS"), ("5", "NV18 PIX PXB PHB NODE SYS"), ("99", "NV18 PIX PXB PHB NODE SYS")],
)  # fmt: skip
def test_levels_by_name_and_by_their_old_numbers(value: str, reaches: str) -> None:
    limit = nccl_paths.level(given(NCCL_P2P_LEVEL=value), gpus=8, cpu_vendor="intel")
    assert not limit.default
    direct = [kind for kind in ("NV18", "PIX", "PXB", "PHB", "NODE", "SYS") if way(kind, limit=limit).transport in {"p2p", "nvlink"}]
    assert " ".join(direct) == reaches


def test_levels_that_are_none_are_ignored() -> None:
    limit = nccl_paths.level(given(NCCL_P2P_LEVEL="sys"), gpus=8, cpu_vendor="intel")
    assert limit.name == "PXB"
    assert "ignored" in limit.source


def test_two_gpus_below_amd_cpus() -> None:
    assert nccl_paths.level({}, gpus=2, cpu_vendor="amd").name == "SYS"
    assert nccl_paths.level({}, gpus=3, cpu_vendor="amd").name == "PXB"
    assert nccl_paths.level({}, gpus=2, cpu_vendor="intel").name == "PXB"


def test_p2p_switched_off_wins() -> None:
    assert nccl_paths.level(given(NCCL_P2P_DISABLE="1", NCCL_P2P_LEVEL="SYS"), gpus=8, cpu_vendor="amd").name == "LOC"
    assert nccl_paths.level(given(NCCL_P2P_DISABLE="0"), gpus=8, cpu_vendor="amd").name == "PXB"


@pytest.mark.parametrize(("read", "write"), [("CNS", "CNS"), ("OK", "NS"), ("GNS", "OK"), ("TNS", None), ("DR", "U")])
def test_what_the_driver_does_not_allow_goes_through_the_host(read: str, write: str | None) -> None:
    assert way("PIX", read, write) == Way("shm", way("PIX", read, write).reason, certain=True, allowed=False)
    assert way("NV4", read, write).transport == "refused"
    assert way("NV4", read, write, NCCL_IGNORE_DISABLED_P2P="1").transport == "shm"


@pytest.mark.parametrize(("read", "write"), [("U", "OK"), (None, None), ("OK", None), (None, "OK"), ("U", "U")])
def test_what_the_driver_does_not_know_is_not_certain(read: str | None, write: str | None) -> None:
    found = way("PIX", read, write)
    assert (found.transport, found.certain, found.allowed) == ("p2p", False, None)
    # Too far is too far whatever the driver says.
    assert way("SYS", read, write).certain


def test_without_shared_memory() -> None:
    assert way("SYS", NCCL_SHM_DISABLE="1").transport == "net"


def test_a_way_through_a_third_gpu() -> None:
    cells = {(0, 1): "NV2", (1, 2): "NV2", (0, 2): "SYS"}
    found = parse_matrix(matrix(["GPU0", "GPU1", "GPU2"], lambda a, b: cells[min(a, b), max(a, b)]))
    assert nccl_paths.through(found, "GPU0", "GPU2") == "GPU1"
    assert nccl_paths.through(found, "GPU0", "GPU1") is None
    assert nccl_paths.way(Link("SYS"), PXB, "OK", "OK", {}, between="GPU1").transport == "nvlink"


def test_who_sets_it(tmp_path: Path) -> None:
    home, etc = tmp_path / "home", tmp_path / "root/etc"
    home.mkdir()
    etc.mkdir(parents=True)
    (etc / "nccl.conf").write_text("NCCL_P2P_LEVEL=SYS\nNCCL_SHM_DISABLE = 1\n# NCCL_P2P_DISABLE=1\nAWS_SECRET=x\n")
    root = str(tmp_path / "root")
    found = nccl_paths.settings({"HOME": str(home)}, root)
    assert {name: item.value for name, item in found.items()} == {"NCCL_P2P_LEVEL": "SYS", "NCCL_SHM_DISABLE": "1"}
    assert found["NCCL_P2P_LEVEL"].source.endswith("/etc/nccl.conf")
    (home / ".nccl.conf").write_text("NCCL_P2P_LEVEL=PHB\n")
    assert nccl_paths.settings({"HOME": str(home)}, root)["NCCL_P2P_LEVEL"].value == "PHB"
    other = tmp_path / "other.conf"
    other.write_text("NCCL_P2P_LEVEL=PIX\n")
    assert nccl_paths.settings({"HOME": str(home), "NCCL_CONF_FILE": str(other)}, root)["NCCL_P2P_LEVEL"].value == "PIX"
    environment = nccl_paths.settings({"HOME": str(home), "NCCL_P2P_LEVEL": "NVL"}, root)["NCCL_P2P_LEVEL"]
    assert (environment.value, environment.source) == ("NVL", "the environment")
