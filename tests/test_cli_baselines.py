"""``--save-baseline`` and what later runs make of it, as a person sees it: on hosts that change, hang and lose cards."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from remote_diag.cli import nccl, p2p
from remote_diag.comparison import differences, findings
from tests.support import stand_in_perf
from tests.support.cli import Ran, rdiag
from tests.support.fake_smi import FakeSmi, h200
from tests.support.gpu_host import pcie_box
from tests.support.nccl_output import Run

OF_BASELINES = {"changed-since-baseline", "not-compared-with-baseline", "baseline-not-saved", "baseline-unreadable", "baseline-does-not-fit"}
OTHER = "GPU-0000abcd-5eed-4000-8000-00000000abcd"


class Box:
    """Two names for this machine with a stand-in driver of eight cards."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.smi = FakeSmi(home / "driver", h200())
        self.smi.lspci()
        self.smi.kernel_log()
        (home / "hosts.yaml").write_text(
            f"defaults: {{environment: {{python: {sys.executable}}}}}\n"
            "hosts:\n  box: {transport: local, gpus: 8}\n  b.o-x: {transport: local, gpus: 8}\n"
        )

    @property
    def stored(self) -> Path:
        return self.home / "data" / "rdiag" / "baselines"

    def rdiag(self, *arguments: str, hosts: tuple[str, ...] = ("box",)) -> Ran:
        named = [word for host in hosts for word in ("-H", host)]
        home, data = self.home, str(self.home / "data")
        return rdiag(arguments[0], *named, "-i", str(home / "hosts.yaml"), *arguments[1:], home=home, PATH=self.smi.path, XDG_DATA_HOME=data)

    def told(self, *arguments: str) -> list[tuple[str, str]]:
        ran = self.rdiag(*arguments, "--json")
        return [(one["level"], one["message"]) for one in ran.json["findings"] if one["code"] in OF_BASELINES]


@pytest.fixture
def box(tmp_path: Path) -> Box:
    return Box(tmp_path)


def test_saving_is_confirmed_for_each_host(box: Box) -> None:
    ran = box.rdiag("gpu", "--save-baseline", hosts=("box", "b.o-x"))
    assert ran.code == 0, ran.err
    lines = [line for line in ran.out.splitlines() if line.startswith("baseline of")]
    assert lines == [f"baseline of {name} saved to {box.stored / name / 'gpu.json'} (8 gpus)" for name in ("box", "b.o-x")]
    told = box.rdiag("gpu", "--save-baseline", "--json", hosts=("box", "b.o-x")).json
    assert [one["baseline"]["saved"] for one in told["hosts"]] == [str(box.stored / name / "gpu.json") for name in ("box", "b.o-x")]
    assert [one["baseline"]["holds"] for one in told["hosts"]] == ["8 gpus", "8 gpus"]


def test_a_driver_that_hangs_makes_no_card_gone(box: Box) -> None:
    box.rdiag("gpu", "--save-baseline")
    with box.smi.hanging():
        told = box.told("gpu")
        assert told == [
            (
                "unknown",
                "whether 8 of the baseline's gpus are still there cannot be told: the driver gave no list (nvidia-smi --help-query-gpu: timeout)",
            ),
            ("skipped", "driver_version can no longer be told"),
        ]
        ran = box.rdiag("gpu", "--save-baseline")
    assert ran.code == 10
    assert " ".join(ran.out.split()).count("no baseline is saved: the driver gave no list") == 1
    assert box.told("gpu") == []


@pytest.mark.parametrize(("text", "status"), [("No devices were found\n", 6), ("Failed to initialize NVML: Driver/library version mismatch\n", 18)])
def test_a_driver_that_refuses_makes_no_card_gone(box: Box, text: str, status: int) -> None:
    box.rdiag("gpu", "--save-baseline")
    box.smi.fail(text, status)
    (about_cards, _) = box.told("gpu")
    assert about_cards[0] == "unknown"
    assert f"the driver gave no list (nvidia-smi --help-query-gpu: status {status})" in about_cards[1]


def test_a_card_that_is_gone_lost_or_swapped(box: Box) -> None:
    box.rdiag("gpu", "--save-baseline")
    card = box.smi.gpus.pop(3)
    box.smi.write()
    box.smi.lspci()
    assert box.told("gpu") == [("fail", f"gpus[{card['uuid']}] is gone since the baseline")]
    box.smi.gpus.insert(3, {**card, "uuid": OTHER})
    box.smi.write()
    box.smi.lspci()
    assert box.told("gpu") == [
        ("degraded", f"gpus[{card['uuid']}] is gone since the baseline: {OTHER} is in its place"),
        ("ok", f"gpus[{OTHER}] is new since the baseline"),
    ]
    box.smi.gpus[3] = card
    box.smi.lose(3)
    (lost,) = box.told("gpu")
    assert lost[0] == "unknown"
    assert "power_limit_w, clock_sm_max_mhz, memory_total_mib, pcie_width, pcie_width_max, pcie_gen_max" in lost[1]
    assert lost[1].endswith(f"of gpus[{card['uuid']}] can no longer be told: gpu-lost")


def test_better_and_newer_is_told_and_no_fault_and_what_may_not_be_read_is_one_unknown(box: Box) -> None:
    box.rdiag("gpu", "--save-baseline")
    for gpu in box.smi.gpus:
        gpu.update({"driver_version": "595.10", "remapped_rows.uncorrectable": "0", "power.limit": "[Insufficient Permissions]"})
    box.smi.gpus[0]["power.limit"] = "710.00 W"
    box.smi.write()
    assert box.told("gpu") == [
        ("ok", "driver_version was 590.48.01 and is 595.10"),
        ("ok", f"gpus[{box.smi.gpus[0]['uuid']}].power_limit_w was 700.0 and is 710.0 (+1.4%)"),
        ("unknown", "power_limit_w of 7 gpus can no longer be told: not-permitted"),
    ]


def test_a_baseline_that_cannot_be_read_or_written(box: Box) -> None:
    box.rdiag("gpu", "--save-baseline")
    (box.stored / "box" / "gpu.json").write_text("{")
    ran = box.rdiag("gpu", "--json")
    assert (ran.code, ran.json["status"], len(ran.json["result"]["gpus"])) == (10, "unknown", 8)
    assert "gpu.json: is no baseline" in ran.json["findings"][-1]["message"]
    ran = box.rdiag("gpu")
    assert "nothing is compared with the baseline" in ran.out
    assert box.rdiag("gpu", "--save-baseline").code == 0
    (box.stored / "b.o-x").write_text("in the way")
    calls = len(box.smi.calls())
    ran = box.rdiag("gpu", "--save-baseline", hosts=("b.o-x",))
    assert (ran.code, ran.out) == (74, "")
    assert "b.o-x: output: no baseline can be written to" in ran.err
    # Nothing is measured for a baseline that nobody can keep, and one host's trouble is not the other's.
    assert len(box.smi.calls()) == calls
    both = box.rdiag("gpu", "--save-baseline", hosts=("box", "b.o-x"))
    assert (both.code, "baseline of box saved to" in both.out) == (74, True)


def test_topology_with_a_driver_that_hangs(box: Box, tmp_path: Path) -> None:
    host = pcie_box(tmp_path / "root", box.smi)
    arguments = ("topo", "--root", str(host.root))
    assert "baseline of box saved to" in box.rdiag(*arguments, "--save-baseline").out
    with box.smi.hanging():
        told = box.told(*arguments)
    assert told
    assert {level for level, _ in told} <= {"unknown", "skipped"}
    assert not [message for _, message in told if "gone" in message]
    assert len(told) <= 3
    ran = box.rdiag(*arguments, "--p2p-level", "SYS")
    assert "note: there is no baseline of box for --p2p-level SYS; there is one for no --p2p-level" in ran.out


def test_other_ranks_are_not_held_against_these(box: Box) -> None:
    programs = {}
    for ranks, gbs in ((2, 40.0), (8, 9.0)):
        folder = box.home / str(ranks)
        folder.mkdir()
        programs[ranks] = stand_in_perf.write(folder, "ok", run=Run(ranks=ranks, gbs=gbs))

    def ran(ranks: int, *more: str) -> Ran:
        # What the arguments ask for are conditions too; sizes are not.
        return box.rdiag("nccl", "--binary", str(programs[ranks]), "--force", *more, "--", "-b", "8", "-g", str(ranks))

    saved = ran(2, "--save-baseline").out
    assert "(all_reduce, 2 ranks, float, " in saved
    other = ran(8)
    assert other.out.count("note: there is no baseline of box for 8 ranks, the arguments -g 8; there is one for 2 ranks, the arguments -g 2") == 1
    told = ran(8, "--json").json
    assert "baseline" not in told
    assert [note for note in told["notes"] if "no baseline" in note]
    assert ran(2, "--json").json["baseline"]["differences"] == []
    assert len(list((box.stored / "box").glob("nccl@*.json"))) == 1


# -- what is compared

LATENCY: dict[str, Any] = {"p50_us": 20.0, "p99_us": 30.0}


def of_nccl(**changes: Any) -> dict[str, Any]:
    row = {"collective": "all_reduce", "dtype": "bf16", "in_place": False, "size_bytes": 8, "busbw_gbs": 1.0, "latency": {**LATENCY, **changes}}
    return {"source": "measured", "backend": "nccl", "collective": "all_reduce", "ranks": 8, "settings": {}, "library_version": "2", "rows": [row]}


@pytest.mark.parametrize(
    ("changes", "backend", "level"),
    [({"p50_us": 25.0}, "nccl", None), ({"p50_us": 27.0}, "nccl", "degraded"), ({"p50_us": 9.0}, "nccl", "ok"), ({"p99_us": 59.0}, "nccl", None),
     ({"p99_us": 61.0}, "nccl", "degraded"), ({"p50_us": 27.0}, "gloo", None)],
)  # fmt: skip
def test_latency_is_compared_within_limits_that_have_a_source(changes: dict[str, float], backend: str, level: str | None) -> None:
    told = findings(differences(of_nccl(), of_nccl(**changes), nccl.watched(backend)), "x")
    assert [finding.level for finding in told] == ([] if level is None else [level])
    assert all("rdiag's own limit" in finding.evidence[0] for finding in told)


def test_limits_of_ones_own_count() -> None:
    watched = nccl.watched("nccl", {"nccl.baseline_p50_pct": 50.0}, "mine.yaml")
    assert differences(of_nccl(), of_nccl(p50_us=27.0), watched) == ()
    (slow,) = findings(differences(of_nccl(), of_nccl(p50_us=31.0), watched), "x")
    assert slow.evidence == ("up to 50% is no change (yours (mine.yaml))",)


@pytest.mark.parametrize(
    ("changes", "asked", "words"),
    [
        ({"collective": "all_gather"}, {}, "all_gather"), ({"ranks": 2}, {}, "2 ranks"), ({"backend": "gloo"}, {}, "gloo"),
        ({"rows": [{"dtype": "fp32"}]}, {}, "fp32"), ({"devices": [{"name": "H200"}, {"name": "H200"}]}, {}, "H200"), ({}, {"graph": True}, "CUDA graphs"),
        ({"settings": {"NCCL_P2P_DISABLE": "1"}}, {}, "P2P off"), ({"settings": {"NCCL_P2P_LEVEL": "SYS"}}, {}, "NCCL_P2P_LEVEL=SYS"),
        ({"settings": {"CUDA_VISIBLE_DEVICES": "0,1"}}, {}, "CUDA_VISIBLE_DEVICES=0,1"), ({"source": "binary"}, {}, "nccl-tests"),
        ({}, {"arguments": ["-b", "8", "-e", "1G", "-G", "1"]}, "the arguments -G 1"),
    ],
)  # fmt: skip
def test_what_another_measurement_is(changes: dict[str, Any], asked: dict[str, Any], words: str) -> None:
    watched = nccl.watched()
    usual, other = watched.conditions_of(of_nccl(), {}), watched.conditions_of({**of_nccl(), **changes}, asked)
    assert watched.tell(other, watched.differing(usual, other)) == words
    assert watched.conditions_of(of_nccl(), {"arguments": ["-b", "8", "-e", "1G"], "graph": False}) == usual
    for damaged in ({}, {"rows": 3, "devices": {}, "settings": []}):
        watched.conditions_of(damaged, {})


def copies(*buses: str | None, bandwidth: float = 50.0) -> dict[str, Any]:
    count = range(len(buses))
    return {
        "gpus": [{"index": index, "name": "H200", "bus_id": bus} for index, bus in enumerate(buses)],
        "pairs": [
            {"source": one, "target": two, "can_access": True, "bandwidth_gbs": bandwidth + 20 * (one + two)} for one in count for two in count if one != two
        ],
        "host_links": [{"gpu": one, "h2d_gbs": 20.0, "d2h_gbs": 20.0} for one in count],
    }  # fmt: skip


def test_copies_behind_a_lost_card_are_compared_with_their_own() -> None:
    (gone,) = [one for one in differences(copies("a", "b", "c"), copies("a", "b"), p2p.watched()) if one.kind == "gone"]
    assert gone.key == "gpus[c]"
    # b and c are 1 and 2 before, 0 and 1 after: by index all of them would have become slower.
    after = copies("b", "c", bandwidth=90.0)
    assert [one.key for one in differences(copies("a", "b", "c"), after, p2p.watched())] == ["gpus[a]"]
    assert [one.key for one in differences(copies(None, None), copies(None, None), p2p.watched())] == []


def test_chosen_cards_and_sizes_are_other_measurements() -> None:
    watched = p2p.watched()
    everything = watched.conditions_of(copies("a", "b"), {"gpus": (), "size_bytes": 64 << 20})
    assert everything == watched.conditions_of(copies("a", "b"), {})
    chosen = watched.conditions_of(copies("a", "b"), {"gpus": (5, 2), "size_bytes": 1 << 20})
    assert watched.tell(chosen, watched.differing(chosen, everything)) == "GPUs 2,5, copies of 1048576 bytes"
    # A file from before conditions tells by gaps that it was not all of them.
    old = copies("a", "b")
    old["gpus"][1]["index"] = 5
    assert watched.conditions_of(old, {})["gpus"] == "0,5"


def test_links_to_the_host_that_nobody_asked_for_are_not_missed() -> None:
    after = {**copies("a", "b"), "host_links": []}
    assert differences(copies("a", "b"), after, p2p.watched(host_links=False)) == ()
    assert {one.kind for one in differences(copies("a", "b"), after, p2p.watched())} == {"unknown"}
