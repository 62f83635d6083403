"""What is expected of a collective, where that is from, and what falls short of it."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from probes.lib.comm import bandwidth, expectation, reference, verdict
from probes.lib.comm.expectation import Conditions, expect, judge
from probes.lib.gpu.thresholds import Thresholds

STANDARD = Thresholds()
GB, MB = 1 << 30, 1 << 20
RTX = "NVIDIA RTX PRO 6000 Blackwell Server Edition"
H200, H100, A100, B200 = "NVIDIA H200", "NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB", "NVIDIA B200"


def on(gpu: str | None, ranks: int | None = 8, collective: str | None = "all_reduce", **more: Any) -> Conditions:
    return Conditions(gpu, ranks, more.pop("nodes", 1), collective, **more)


def level(known: Conditions, size: int, measured: float) -> str | None:
    expected = expect(known, size, STANDARD)
    return None if expected is None else judge(measured, expected, known, STANDARD).level


# The table -----------------------------------------------------------------------------------------------------------


def test_every_figure_has_its_source_and_fits_its_time() -> None:
    rows = reference.shipped()
    assert len(rows) > 140
    for row in rows:
        assert re.search(r"[@#]", row.source), row
        assert reference.family_of(row.gpu) is not None
        if row.time_us is not None and row.size_bytes is not None and row.size_bytes >= MB:
            assert bandwidth.busbw_gbs(row.collective, row.gpus, row.size_bytes, row.time_us) == pytest.approx(row.busbw_gbs, rel=0.01)


def test_no_ring_exceeds_its_link() -> None:
    for row in reference.shipped():
        family = reference.family_of(row.gpu)
        assert family is not None
        if row.algorithm == "ring" and family.link_gbs is not None:
            assert row.busbw_gbs < family.link_gbs


def test_thresholds_that_no_box_reaches_are_not_in_it() -> None:
    assert not [row for row in reference.shipped() if row.gpu == "H100-SXM" and row.gpus == 8 and row.busbw_gbs > 500]


@pytest.mark.parametrize(
    ("name", "family"),
    [
        (H200, "H200-SXM"), ("NVIDIA H200 NVL", "H200-NVL"), (H100, "H100-SXM"), ("NVIDIA H100 PCIe", "H100-PCIe"),
        ("NVIDIA H100 NVL", "H100-NVL"), (A100, "A100-SXM"), ("A100-SXM4-40GB", "A100-SXM"), ("NVIDIA A100 80GB PCIe", "A100-PCIe"),
        ("NVIDIA A100-PCIE-40GB", "A100-PCIe"), (B200, "B200-SXM"), ("NVIDIA GB200", "GB200"), (RTX, "RTX PRO 6000 Blackwell"),
        ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", "RTX PRO 6000 Blackwell"),
        ("NVIDIA GeForce RTX 5090", "RTX 5090"), ("NVIDIA GeForce RTX 5090 D", "RTX 5090"), ("NVIDIA L40S", "L40S"),
        ("NVIDIA L40", None), ("Tesla T4", None), ("NVIDIA A10", None), ("cpu", None), ("", None),
        ("NVIDIA RTX 6000 Ada Generation", None),
    ],
)  # fmt: skip
def test_families(name: str, family: str | None) -> None:
    assert reference.family(name) == family


@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        ("H200,8,1,nvlink,,,all_reduced,ring,8,1", "all_reduced"), ("H200,0,1,nvlink,,,all_reduce,ring,8,1", "gpus"),
        ("H200,8,1,cable,,,all_reduce,ring,8,1", "link"), ("H200,8,1,nvlink,,,all_reduce,ring,8,nan", "busbw_gbs"),
        ("H200,8,1,nvlink,,,all_reduce,ring,8,-1", "busbw_gbs"), ("H200,8,1,nvlink,,,all_reduce,ring,8,0", "busbw_gbs"),
        ("H200,8,1,nvlink,,,all_reduce,tree,8,1", "algorithm"), ("H200,8,1,nvlink,,,all_reduce,ring,8 MB,1", "size_bytes"),
    ],
)  # fmt: skip
def test_a_table_of_ones_own_that_is_wrong(line: str, wrong: str) -> None:
    with pytest.raises(ValueError, match=f"line 2.*{re.escape(wrong)}"):
        reference.parse([",".join(reference.COLUMNS[:10]), line], own=True)
    with pytest.raises(ValueError, match="no column gpu"):
        reference.parse([line], own=True)


# What is expected ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("known", "size", "busbw", "kind"),
    [
        (on(H200), 16 * GB, 482.26, "published"),
        (on(H200), 64 * GB, 482.26, "published"),
        (on(H200, nvls=False), 16 * GB, 367.2, "published"),
        (on(H200, 6), 8 * GB, 435.6, "published"),
        (on(H200, 6, nvls=False), 8 * GB, 365.1, "published"),
        (on(H200, collective="all_gather"), 16 * GB, 361.4, "published"),
        (on(B200), 40_160_460, 389.23, "published"),
        (on(A100), 16 * GB, 234.89, "published"),
        (on(RTX), 1 * GB, 37.6, "published"),
        (on("NVIDIA GeForce RTX 5090"), 1 * GB, 28.0, "published"),
        (on(H100, 2), 1 * GB, 360.0, "physics"),
        (on("NVIDIA GeForce RTX 4090"), 1 * GB, 25.2, "physics"),
        (on("NVIDIA GeForce RTX 4090", pcie_gen=4, pcie_width=8), 1 * GB, 12.6, "physics"),
        (on("NVIDIA H100 NVL", 2), 16 * GB, 208.0, "floor"),
        (on(H100, 16, nodes=None), 16 * GB, 471.0, "published"),
    ],
)  # fmt: skip
def test_expectations(known: Conditions, size: int, busbw: float, kind: str) -> None:
    expected = expect(known, size, STANDARD)
    assert expected is not None
    assert expected.busbw_gbs == pytest.approx(busbw, rel=2e-3)
    assert expected.kind == kind
    assert expected.source
    assert str(known.ranks) in expected.conditions


def test_between_two_sizes() -> None:
    low, middle, high = (expect(on(H200), size, STANDARD) for size in (256 * MB, 384 * MB, 512 * MB))
    assert low is not None
    assert middle is not None
    assert high is not None
    assert low.busbw_gbs < middle.busbw_gbs < high.busbw_gbs


@pytest.mark.parametrize(
    ("known", "size"),
    [
        (on(None), GB), (on("Tesla T4"), GB), (on(H200, None), GB), (on(H200, 1), GB), (on(H200, 16, nodes=2), GB), (on(H100, 4, nodes=None), GB),
        (on(H200, collective=None), GB), (on(H200, collective="alltoall"), GB), (on(RTX, 2), 4 * MB), (on(H100, 3), 16 * MB),
    ],
)  # fmt: skip
def test_where_nothing_is_known(known: Conditions, size: int) -> None:
    assert expect(known, size, STANDARD) is None


def test_ones_own_figures_win() -> None:
    own = reference.parse(
        ["gpu,gpus,nodes,link,layout,settings,collective,algorithm,size_bytes,busbw_gbs,source",
         "H200,8,1,nvlink,rack 7,,all_reduce,nvls,8589934592,500,acceptance test"],
        own=True,
    )  # fmt: skip
    expected = expect(on(H200), 8 * GB, STANDARD, own)
    assert expected is not None
    assert (expected.busbw_gbs, expected.kind, expected.source) == (500, "yours", "yours: acceptance test")
    assert expect(on(A100), 16 * GB, STANDARD, own) == expect(on(A100), 16 * GB, STANDARD)


# Verdicts ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("measured", "expected"), [(480, "ok"), (440, "ok"), (390, "ok"), (380, "degraded"), (290, "degraded"), (280, "fail"), (1, "fail")]
)
def test_bands(measured: float, expected: str) -> None:
    assert level(on(H200), 16 * GB, measured) == expected


def test_more_than_is_known_of_such_gpus_is_not_ok() -> None:
    # 483 GB/s are no all-reduce over PCIe: somebody named the wrong GPU.
    expected = expect(on(RTX), 16 * GB, STANDARD)
    assert expected is not None
    best = expected.best_gbs or expected.busbw_gbs
    told = judge(483, expected, on(RTX), STANDARD)
    assert (told.level, told.bound.name, told.of_gbs) == ("unknown", "nccl.above_ratio", best)
    assert judge(1.4 * best, expected, on(RTX), STANDARD).level == "ok"
    assert judge(483, replace(expected, kind="yours"), on(RTX), STANDARD).level == "ok"
    assert judge(483, replace(expected, kind="floor"), on(RTX), STANDARD).level == "ok"


def test_bands_of_ones_own() -> None:
    strict = Thresholds({"nccl.note_ratio": 0.95, "nccl.degraded_ratio": 0.9})
    expected = expect(on(H200), 16 * GB, strict)
    assert expected is not None
    assert judge(440, expected, on(H200), strict).level == "degraded"


@pytest.mark.parametrize(
    ("own", "measured", "expected", "bound"),
    [
        # 480 GB/s are expected; 0.8 is where the shipped bands begin to be degraded.
        ({"nccl.ok_ratio": 0.7}, 350, "ok", "nccl.note_ratio"),
        ({"nccl.ok_ratio": 0.95}, 440, "ok", "nccl.note_ratio"),
        ({"nccl.note_ratio": 0.95}, 440, "degraded", "nccl.note_ratio"),
        ({"nccl.degraded_ratio": 0.95}, 440, "fail", "nccl.degraded_ratio"),
        ({"nccl.note_ratio": 0.5}, 260, "ok", "nccl.note_ratio"),
    ],
)
def test_each_bound_of_ones_own_decides(own: dict[str, float], measured: float, expected: str, bound: str) -> None:
    mine = Thresholds(own, "own.yaml")
    held = expect(on(H200), 16 * GB, mine)
    assert held is not None
    told = judge(measured, held, on(H200), mine)
    assert (told.level, told.bound.name) == (expected, bound)
    said = told.text + told.bound.provenance
    assert "yours (own.yaml" in said
    assert ("nccl.ok_ratio, yours" in said) == (own == {"nccl.ok_ratio": 0.95})


def test_bounds_of_ones_own_that_contradict_each_other() -> None:
    with pytest.raises(ValueError, match=r"nccl.note_ratio \(0.9\) must not be above nccl.ok_ratio \(0.8\)"):
        Thresholds({"nccl.ok_ratio": 0.8, "nccl.note_ratio": 0.9})
    moved = Thresholds({"nccl.latency_32k_good_us": 60}, "own.yaml")["nccl.latency_32k_bad_us"]
    assert (moved.value, moved.provenance) == (60.0, "yours (own.yaml), with nccl.latency_32k_good_us")


def test_a_ring_where_nvls_was_expected_is_named() -> None:
    expected = expect(on(H200), 16 * GB, STANDARD)
    assert expected is not None
    told = judge(363, expected, on(H200), STANDARD)
    assert told.level == "degraded"
    assert "NCCL_NVLS_ENABLE=0" in str(told.hint)
    assert level(on(H200, nvls=False), 16 * GB, 363) == "ok"


def test_untuned_boxes_are_named() -> None:
    expected = expect(on(RTX), 64 * MB, STANDARD)
    assert expected is not None
    told = judge(22.0, expected, on(RTX), STANDARD)
    assert told.level == "fail"
    assert "NCCL_MIN_CTAS" in str(told.hint)


def test_what_only_physics_tells_is_no_fault_over_pcie() -> None:
    assert level(on("NVIDIA GeForce RTX 4090"), GB, 3.0) == "unknown"
    assert level(on(H100, 2), GB, 100.0) == "fail"


def test_the_peak_is_that_of_large_sizes() -> None:
    points = [(8, 900.0), (64 * MB, 300.0), (GB, 200.0)]
    assert expectation.peak(points, "nvlink") == (GB, 200.0)
    assert expectation.peak(points, "pcie") == (64 * MB, 300.0)
    assert expectation.peak(points[:2], "nvlink") == (64 * MB, 300.0)
    assert expectation.peak(points[:1], "pcie") is None


@pytest.mark.parametrize(
    ("known", "time", "expected"),
    [
        (on(RTX), 24.5, "ok"), (on(RTX), 30.0, "ok"), (on(RTX), 36.0, "unknown"), (on(RTX), 48.2, "degraded"),
        (on(RTX, 2), 48.2, None), (on(H200), 48.2, None), (on(RTX, collective="all_gather"), 48.2, None), (on(RTX, pcie_gen=4), 48.2, None),
        (on(RTX, nodes=2), 48.2, None), (on("NVIDIA GeForce RTX 4090"), 48.2, None), (on(None), 48.2, None),
    ],
)  # fmt: skip
def test_bands_of_small_messages(known: Conditions, time: float, expected: str | None) -> None:
    found = expectation.latency(known, [(8, 1.0), (32 << 10, time), (64 << 10, 99.0)], STANDARD)
    assert (found and found[0]) == expected
    assert expectation.latency(known, [(8, time), (MB, time)], STANDARD) is None


def test_nvls_is_known_to_be_off() -> None:
    algorithms = ("Ring", "^NVLS", "^tree, nvls", "ring,tree", "nvls;allreduce:ring", "AllReduce:^NVLS;allgather:nvls")
    for settings in ({"NCCL_NVLS_ENABLE": "0"}, *({"NCCL_ALGO": algorithm} for algorithm in algorithms)):
        known = verdict.conditions([H200] * 8, ranks=8, nodes=1, collective="all_reduce", settings=settings)
        assert (known.nvls, known.gpu_name) == (False, H200)
    for algorithm in ("", "NVLS", "^Tree", "ring,nvls", "NVLSTree", "ring;allreduce:ring,nvls", "allgather:ring", "^ring;broadcast:^nvls"):
        known = verdict.conditions([H200] * 8, ranks=8, nodes=1, collective="all_reduce", settings={"NCCL_ALGO": algorithm})
        assert known.nvls is None, algorithm
    mixed = verdict.conditions([H200, A100], ranks=2, nodes=1, collective="all_reduce", settings={"NCCL_ALGO": "NVLS"})
    assert (mixed.nvls, mixed.gpu_name) == (None, None)


def test_the_curve_to_draw() -> None:
    course = expectation.curve(on(RTX))
    sizes = [row.size_bytes or 0 for row in course]
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == GB
    assert expectation.curve(on("Tesla T4")) == ()
