from __future__ import annotations

import io
import re
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from remote_diag.discovery import find
from remote_diag.findings import status
from remote_diag.outcome import Outcome, Timing
from remote_diag.testing import RecordingContext
from remote_diag.views import topo, topo_plot
from tests.support import captures
from tests.support.cli import rdiag
from tests.support.fake_smi import FakeSmi, rtx_pro_6000
from tests.support.gpu_host import GpuHost, pcie_box
from tests.support.smi_topology import dgx, matrix, two_switches

EIGHT = [f"GPU{place}" for place in range(8)]
NUMA = [place // 4 for place in range(8)]
SAVED = matrix(EIGHT, two_switches, numa=NUMA)


@pytest.fixture
def box(tmp_path: Path) -> GpuHost:
    return pcie_box(tmp_path / "root", FakeSmi(tmp_path / "bin", rtx_pro_6000(8)))


def test_a_saved_matrix(tmp_path: Path) -> None:
    file = tmp_path / "topo-m.txt"
    file.write_text(SAVED)
    ran = rdiag("topo", "--parse", str(file), "--json", home=tmp_path)
    assert ran.code == 1, ran.err
    answer = ran.json
    assert (answer["schema_version"], answer["host"], answer["probe"], answer["status"]) == (1, "-", "topo", "degraded")
    assert [gpu["index"] for gpu in answer["result"]["gpus"]] == list(range(8))
    assert answer["result"]["islands"] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert rdiag("topo", "--parse", str(file), "--p2p-level", "SYS", "--gpus", "8", home=tmp_path).code == 0
    assert rdiag("topo", "--parse", str(file), "--p2p-level", "SYS", "--gpus", "9", home=tmp_path).code == 1


@pytest.mark.parametrize("codec", ["utf-16-le", "utf-16-be", "utf-8"])
def test_a_matrix_as_it_is_saved_elsewhere(tmp_path: Path, codec: str) -> None:
    plain = tmp_path / "plain"
    plain.write_text(SAVED)
    (tmp_path / "saved").write_bytes(("\ufeff" + SAVED.replace("\n", "\r\n")).encode(codec))
    there, here = (rdiag("topo", "--parse", name, "--json", home=tmp_path).json for name in ("saved", "plain"))
    assert there["result"] == here["result"]
    assert there["result"]["matrix_complete"]


def test_a_matrix_of_what_peers_may_do_is_none_of_links(tmp_path: Path) -> None:
    (tmp_path / "saved").write_text(" \tGPU0\tGPU1\t\n GPU0\tX\tOK\t\n GPU1\tOK\tX\t\n")
    ran = rdiag("topo", "--parse", "saved", home=tmp_path)
    assert (ran.code, ran.out) == (3, "")
    assert "this is nvidia-smi topo -p2p" in ran.err


def test_nothing_is_called_an_island_where_a_way_is_unknown(tmp_path: Path) -> None:
    (tmp_path / "saved").write_text(SAVED.replace("SYS", "???"))
    ran = rdiag("topo", "--parse", "saved", home=tmp_path)
    assert ran.code == 10
    assert "island" not in ran.out
    assert rdiag("topo", "--parse", "saved", "--json", home=tmp_path).json["result"]["islands"] == []


def test_eight_nics_leave_each_row_its_name_in_80_columns(tmp_path: Path) -> None:
    names = [*EIGHT, *(f"NIC{place}" for place in range(8))]
    (tmp_path / "saved").write_text(matrix(names, lambda _a, _b: "SYS", numa=NUMA))
    lines = rdiag("topo", "--parse", "saved", home=tmp_path, COLUMNS="80").out.splitlines()
    assert max(map(len, lines)) <= 80
    rows = [line.split() for line in lines if line.split()[:1] in ([name] for name in names)]
    assert [row[0] for row in rows if len(row) == 9] == names


@captures.needs_captures
def test_a_capture_from_stdin_for_people(tmp_path: Path) -> None:
    ran = rdiag("topo", "--parse", str(captures.FOLDER / "topo_m__8xH200-nv18-8nic-rocep.txt"), home=tmp_path)
    assert ran.code == 0
    lines = ran.out.splitlines()
    assert lines[0] == "topo_m__8xH200-nv18-8nic-rocep.txt: topo: ok - 8 GPUs; pairs as NCCL will join them: 28 NVLink"
    assert "\x1b" not in ran.out
    assert re.search(r"^GPU3 +NV18 +NV18 +NV18 +X +NV18", ran.out, re.MULTILINE)
    assert re.search(r"^│  ├─ NIC0 rocep145s0$", ran.out, re.MULTILINE)


def test_what_is_no_matrix(tmp_path: Path) -> None:
    file = tmp_path / "other.txt"
    file.write_text("Failed to run topology matrix\n")
    ran = rdiag("topo", "--parse", str(file), home=tmp_path)
    assert ran.code not in {0, 1, 10}
    assert "other.txt" in ran.err
    assert "RDMA" in ran.err
    assert rdiag("topo", "--parse", str(tmp_path / "absent"), home=tmp_path).code not in {0, 1, 10}


def test_an_unknown_is_never_a_success(tmp_path: Path) -> None:
    file = tmp_path / "cut.txt"
    file.write_text("\n".join(matrix(EIGHT, dgx, numa=NUMA).splitlines()[:5]))
    assert rdiag("topo", "--parse", str(file), home=tmp_path).code == 10


@pytest.mark.parametrize("arguments", [("--p2p-level", "sys"), ("--gpus", "-1"), ("--parse", "x", "--root", "/y"), ("--plot", "x.pdf")])
def test_misuse(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    assert rdiag("topo", *arguments, home=tmp_path).code == 2


def test_a_host_through_the_whole_way(tmp_path: Path, box: GpuHost) -> None:
    box.set("0000:41:00.0", current_link_width="8")
    box.smi.kernel_log("[  200.0] NVRM: Xid (PCI:0000:61:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.")
    path = tmp_path / "box.html"
    ran = rdiag(
        "topo", "--root", str(box.root), "--p2p-level", "SYS", "--gpus", "8", "--plot", str(path), home=tmp_path, PATH=box.smi.path
    )
    assert ran.code == 1, ran.err
    assert ran.out.splitlines()[0].startswith("local: topo: fail - 8 GPUs; pairs as NCCL will join them: 28 PCIe P2P")
    assert "gpu 2 0000:41:00.0" in ran.out
    # The table of Xids has come along.
    assert "Xid 79" in ran.out
    assert "power-cycle" in ran.out
    assert "gen1 x8 idle" in ran.out
    assert "host bridge pci0000:10" in ran.out
    assert "<svg" in path.read_text()


def test_the_inventory_says_how_many_there_should_be(tmp_path: Path, box: GpuHost) -> None:
    (tmp_path / "hosts.yaml").write_text("hosts:\n  box: {transport: local, gpus: 9}\n")
    ran = rdiag("topo", "--host", "box", "-i", str(tmp_path / "hosts.yaml"), "--root", str(box.root), "--json", home=tmp_path, PATH=box.smi.path)
    assert ran.code == 1, ran.err
    assert ran.json["result"]["expected_gpus"] == 9
    (count,) = [finding for finding in ran.json["findings"] if finding["code"] == "gpu-count"]
    assert (count["level"], count["threshold_source"]) == ("fail", "gpus in hosts.yaml")
    given = ("--gpus", "7", "--root", str(box.root), "--json")
    ran = rdiag("topo", "--host", "box", "-i", str(tmp_path / "hosts.yaml"), *given, home=tmp_path, PATH=box.smi.path)
    (count,) = [finding for finding in ran.json["findings"] if finding["code"] == "gpu-count"]
    assert (count["threshold"], count["threshold_source"]) == (7, "gpus given for this run")


def test_a_baseline_shows_what_changed(tmp_path: Path, box: GpuHost) -> None:
    arguments = ("topo", "--root", str(box.root), "--p2p-level", "SYS", "--json")
    first = rdiag(*arguments, "--save-baseline", home=tmp_path, PATH=box.smi.path)
    assert first.code == 0, first.out + first.err
    box.set("0000:41:00.0", numa_node="1")
    again = rdiag(*arguments, home=tmp_path, PATH=box.smi.path)
    assert again.code == 1, again.out
    assert [(change["old"], change["new"]) for change in again.json["baseline"]["differences"]] == [(0, 1)]


def test_without_a_gpu_nothing_is_ok(tmp_path: Path) -> None:
    smi = FakeSmi(tmp_path / "bin", [])
    smi.fail("No devices were found\n", 6)
    smi.lspci()
    root = tmp_path / "root"
    root.mkdir()
    ran = rdiag("topo", "--root", str(root), "--json", home=tmp_path, PATH=smi.path)
    assert ran.code in {1, 10}
    assert ran.json["status"] in {"fail", "unknown"}
    assert ran.json["result"]["gpus"] == []


# Pictures ------------------------------------------------------------------------------------------------------------


def outcome(text: str, folder: Path) -> Outcome[Any]:
    probe = find("topo")
    context = RecordingContext(folder)
    result = probe.module.parse(text.encode(), probe.Params(), context)
    return Outcome("-", "topo", "", status(tuple(context.findings)), result, tuple(context.findings), Timing(0.0, 0.0, 0.0, 0.0))


def test_pictures(tmp_path: Path) -> None:
    made = outcome(matrix([*EIGHT, "NIC0", "NIC1"], lambda a, b: "PHB" if max(a, b) > 7 else dgx(a, b), numa=NUMA, nics=["mlx5_0", "<b>"]), tmp_path)
    page = topo_plot.draw(made, Path("x.html")).decode()
    assert page.count(">NV18</text>") == 56
    assert page.count(">NVL*</text>") == 56
    assert "<b>" not in page
    assert "&lt;b&gt;" in page
    assert "http" not in page.replace("http://www.w3.org/2000/svg", "")
    drawing = ET.fromstring(topo_plot.draw(made, Path("x.SVG")))  # noqa: S314 - our own
    words = {"".join(each.itertext()) for each in drawing.iter("{http://www.w3.org/2000/svg}text")}
    assert {"Who is near whom", "The tree", "GPU0", "GPU7"} <= words
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    assert topo_plot.draw(made, Path("x.png")).startswith(b"\x89PNG")


def test_a_picture_of_the_bus(tmp_path: Path, box: GpuHost, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", box.smi.path)
    probe = find("topo")
    result = probe.module.run(probe.Params(root=str(box.root)), RecordingContext(tmp_path / "run"))
    made = Outcome("box", "topo", "", "ok", result, (), Timing(0.0, 0.0, 0.0, 0.0))
    page = topo_plot.draw(made, Path("x.html")).decode()
    assert page.count(">SHM</text>") == 32
    assert page.count(">P2P</text>") == 24
    for bus_id in ("0000:10:08.0", "0000:70:13.0", "0000:e1:00.0"):
        assert bus_id in page
    lines = [line for root in topo.tree(result) for line in topo.drawn(root)]
    assert lines[0].startswith("NUMA 0 > host bridge pci0000:10 > root port 0000:10:01.0")
    assert sum("GPU" in line for line in lines) == 8


def test_nothing_to_draw() -> None:
    with pytest.raises(ValueError, match="nothing to draw"):
        topo_plot.draw(Outcome("-", "topo", "", "skipped", None, (), Timing(0.0, 0.0, 0.0, 0.0)), Path("x.html"))


def test_more_devices_than_a_terminal_shows(tmp_path: Path) -> None:
    names = [*(f"GPU{place}" for place in range(16)), *(f"NIC{place}" for place in range(8))]
    made = outcome(matrix(names, lambda a, b: "NV18" if max(a, b) < 16 else "SYS", numa=[place // 8 for place in range(16)]), tmp_path)
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(topo.render(made))
    assert "the matrix of 24 devices is in --json" in console.export_text()
