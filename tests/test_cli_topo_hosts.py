"""``rdiag topo`` on live hosts: this machine, and one behind a real sshd with zsh, whose driver answers every question of ``topo``."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support import captures
from tests.support.cli import Ran, rdiag
from tests.support.fake_smi import FakeSmi, Gpu, h200, rtx_pro_6000
from tests.support.gpu_host import GpuHost, pcie_box
from tests.support.sshd import TestSshd

KINDS = ("local", "zsh")
NICS = [f"mlx5_{number}" for number in range(8)]


class Live:
    """A host with GPUs, and ``rdiag topo`` in front of it."""

    def __init__(self, box: GpuHost, home: Path, path: str) -> None:
        self.box, self.smi, self._home, self._path = box, box.smi, home, path

    def topo(self, *arguments: str) -> Ran:
        inventory = ("-H", "box", "-i", str(self._home / "hosts.yaml"), "--root", str(self.box.root))
        return rdiag("topo", *inventory, *arguments, home=self._home, PATH=self._path)

    def json(self, *arguments: str) -> Any:
        return self.topo("--json", *arguments).json


@contextmanager
def live(kind: str, gpus: list[Gpu], tmp_path: Path, start_sshd: Callable[..., TestSshd]) -> Iterator[Live]:
    smi = FakeSmi(tmp_path / "driver", gpus)
    box = pcie_box(tmp_path / "root", smi)
    # The stand-in is to answer by itself.
    smi.answers.clear()
    smi.nics = NICS if gpus[0]["fabric.state"] == "Completed" else NICS[:2]
    smi.write()
    if kind == "local":
        (tmp_path / "hosts.yaml").write_text(f"hosts:\n  box: {{transport: local, gpus: 8, environment: {{python: {sys.executable}}}}}\n")
        yield Live(box, tmp_path, smi.path)
        return
    with start_sshd(shell=kind, env={"PATH": smi.path}) as server:
        (tmp_path / "hosts.yaml").write_text(
            f"hosts:\n  box: {{address: 127.0.0.1, port: {server.port}, user: {server.user}, gpus: 8, environment: {{python: {sys.executable}}},\n"
            f"    identity_file: {server.identity_file}, known_hosts: {server.known_hosts}}}\n"
        )
        yield Live(box, tmp_path, "/usr/bin:/bin")


def codes(answer: Any, *levels: str) -> set[str]:
    return {one["code"] for one in answer["findings"] if one["level"] in (levels or {"fail", "degraded", "unknown"})}


@pytest.mark.parametrize("kind", KINDS)
def test_eight_cards_on_pcie(kind: str, tmp_path: Path, start_sshd: Callable[..., TestSshd]) -> None:
    with live(kind, rtx_pro_6000(), tmp_path, start_sshd) as host:
        usual = host.topo("--json")
        plot = tmp_path / "near.html"
        sys_level = host.topo("--p2p-level", "SYS", "--plot", str(plot))
        asked = [call[1:] for call in host.smi.calls() if call[0] == "topo"]
    assert (usual.code, codes(usual.json)) == (1, {"nccl-through-host"}), usual.out
    result = usual.json["result"]
    assert result["matrix_complete"]
    assert [gpu["numa_node"] for gpu in result["gpus"]] == [0] * 4 + [1] * 4
    assert [nic["label"] for nic in result["nics"]] == ["NIC0", "NIC1"]
    assert [nic["names"] for nic in result["nics"]] == [["mlx5_0"], ["mlx5_1"]]
    assert [(gpu["nearest_nics"], gpu["nic_link"]) for gpu in result["gpus"]] == [(["NIC0"], "NODE")] * 4 + [(["NIC1"], "NODE")] * 4
    assert {(pair["link"], pair["transport"]) for pair in result["pairs"]} == {("PIX", "p2p"), ("SYS", "shm")}
    words = ("p2p_read", "p2p_write", "p2p_nvlink", "p2p_atomics", "p2p_pcie")
    assert {tuple(pair[word] for word in words) for pair in result["pairs"]} == {("OK", "OK", "NS", "NS", "OK")}
    assert result["islands"] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert result["unread"] == []
    assert asked[:6] == [["-m"], *(["-p2p", letter] for letter in "rwnap")]
    assert sys_level.code == 0, sys_level.out
    assert "28 PCIe P2P" in sys_level.out.splitlines()[0]
    assert "<svg" in plot.read_text()
    assert "NIC1" in plot.read_text()


@pytest.mark.parametrize("kind", KINDS)
def test_eight_cards_on_nvswitches(kind: str, tmp_path: Path, start_sshd: Callable[..., TestSshd]) -> None:
    with live(kind, h200(), tmp_path, start_sshd) as host:
        told, answer = host.topo(), host.json()
    assert told.code == 0, told.out
    assert "28 NVLink" in told.out.splitlines()[0]
    result = answer["result"]
    assert {(pair["link"], pair["transport"], pair["p2p_nvlink"]) for pair in result["pairs"]} == {("NV18", "nvlink", "OK")}
    assert [gpu["nearest_nics"] for gpu in result["gpus"]] == [[f"NIC{index // 2 * 2}", f"NIC{index // 2 * 2 + 1}"] for index in range(8)]
    assert {gpu["nic_link"] for gpu in result["gpus"]} == {"PIX"}
    lines = [line.split() for line in told.out.splitlines()]
    assert ["GPU3", *["NV18"] * 3, "X", *["NV18"] * 4, "NODE", "NODE", "PIX", "PIX", *["SYS"] * 4] in lines


@pytest.mark.parametrize("kind", KINDS)
def test_one_dead_card_costs_the_matrix_and_not_the_verdict(kind: str, tmp_path: Path, start_sshd: Callable[..., TestSshd]) -> None:
    with live(kind, rtx_pro_6000(), tmp_path, start_sshd) as host:
        host.smi.lose(3)
        ran = host.topo("--json")
    answer = ran.json
    assert answer["status"] == "fail", ran.out
    assert {"no-matrix", "p2p-read-unknown", "gpu-lost"} <= codes(answer)
    (matrix,) = [one for one in answer["findings"] if one["code"] == "no-matrix"]
    assert "status 255" in matrix["evidence"][0]
    (lost,) = [one for one in answer["findings"] if one["code"] == "gpu-lost"]
    assert "0000:61:00.0" in lost["subject"]
    # The bus still tells how the others are joined, and that is not certain.
    living = [pair for pair in answer["result"]["pairs"] if 3 not in (pair["a"], pair["b"])]
    assert {pair["link"] for pair in living} == {"PXB", "SYS"} or {pair["link"] for pair in living} == {"PIX", "SYS"}
    assert {pair["certain"] for pair in living} == {False}
    assert answer["result"]["links"] == []


@pytest.mark.parametrize("kind", KINDS)
def test_labels_that_are_glued_are_no_matrix_of_seven(kind: str, tmp_path: Path, start_sshd: Callable[..., TestSshd]) -> None:
    with live(kind, h200(), tmp_path, start_sshd) as host:
        whole = host.smi.answer_to("topo", "-m")
        host.smi.answer(("topo", "-m"), whole.replace("GPU6\tGPU7", "GPU6GPU7", 1))
        glued = host.topo("--json")
        host.smi.answers.clear()
        host.smi.answer(("topo", "-m"), whole.replace("GPU4\tNV18\tNV18", "GPU4\tNV18NV18", 1))
        cells = host.topo("--json")
    for ran in (glued, cells):
        assert ran.code == 10, ran.out
        assert codes(ran.json, "unknown") & {"no-matrix", "matrix-damaged", "matrix-other-gpus"}
        assert not codes(ran.json, "ok") & {"matrix", "nccl"}
        assert not ran.json["result"]["matrix_complete"]


def test_a_matrix_that_never_comes_is_said_and_nothing_more_is_asked(tmp_path: Path, start_sshd: Callable[..., TestSshd]) -> None:
    with live("zsh", rtx_pro_6000(), tmp_path, start_sshd) as host, host.smi.hanging("topo"):
        ran = host.topo("--json", "--p2p-level", "SYS")
        asked = [call for call in host.smi.calls() if call[0] == "topo"]
    assert ran.code == 10, ran.out
    (told,) = [one for one in ran.json["findings"] if one["code"] == "no-matrix"]
    assert "nvidia-smi topo -m did not answer within 20 s" in told["evidence"][0]
    assert asked == [["topo", "-m"]]
    assert [gpu["index"] for gpu in ran.json["result"]["gpus"]] == list(range(8))


@captures.needs_captures
def test_what_a_real_driver_printed_is_read_on_a_live_host(tmp_path: Path, start_sshd: Callable[..., TestSshd]) -> None:
    with live("zsh", h200(), tmp_path, start_sshd) as host:
        host.smi.answer(("topo", "-m"), (captures.FOLDER / "topo_m__8xH200-nv18-8nic-rocep.txt").read_text())
        host.smi.answer(("topo", "-p2p", "p"), (captures.FOLDER / "topo_p2p_p__8gpu-ok__nccl-docs.txt").read_text())
        answer = host.json()
    result = answer["result"]
    assert {pair["link"] for pair in result["pairs"]} == {"NV18"}
    assert {pair["p2p_pcie"] for pair in result["pairs"]} == {"OK"}
    assert result["gpus"][0]["nearest_nics"] == ["NIC0", "NIC1"]
    assert result["nics"][0]["names"] == ["rocep145s0"]
    assert answer["status"] == "ok", answer["findings"]
