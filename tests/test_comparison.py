"""A value that changed, a thing that is gone, and what nobody can tell are three different things."""

from __future__ import annotations

from typing import Any

import pytest

from remote_diag.comparison import Comparison, Watch, differences, findings
from remote_diag.findings import Finding

GPUS = {"driver": "590.48", "gpus": [{"uuid": "a", "limit_w": 600.0}, {"uuid": "b", "limit_w": 600.0}]}


def found(new: dict[str, Any], *watched: Watch) -> list[tuple[str, Any, Any]]:
    return [(item.key, item.old, item.new) for item in differences(GPUS, new, Comparison(watched))]


def told(old: dict[str, Any], new: dict[str, Any], comparison: Comparison, *codes: str) -> list[Finding]:
    return findings(differences(old, new, comparison, frozenset(codes)), "the baseline")


def test_items_are_matched_by_what_identifies_them() -> None:
    new = {"driver": "595", "gpus": [{"uuid": "b", "limit_w": 600.0}, {"uuid": "a", "limit_w": 450.0}]}
    watched = (Watch("driver"), Watch("gpus[uuid].limit_w", tolerance=0.01))
    assert found(new, *watched) == [("driver", "590.48", "595"), ("gpus[a].limit_w", 600.0, 450.0)]


def test_new_and_lost_items_are_one_difference_each() -> None:
    new = {"gpus": [{"uuid": "b", "limit_w": 600.0}, {"uuid": "c", "limit_w": 1.0}]}
    watched = (Watch("gpus[uuid]"), Watch("gpus[uuid].limit_w"))
    assert found(new, *watched) == [("gpus[a]", True, False), ("gpus[c]", False, True)]


def test_a_value_that_is_gone_is_no_agreement() -> None:
    new = {"gpus": [{"uuid": "a", "limit_w": None}, {"uuid": "b", "limit_w": 600.0}]}
    assert found(new, Watch("gpus[uuid].limit_w", tolerance=9.9)) == [("gpus[a].limit_w", 600.0, None)]


@pytest.mark.parametrize("gpus", [None, 3, "ab", [1], [{"uuid": "a"}, {"uuid": "a"}], [{"uuid": None}], [{"uuid": []}]])
def test_lists_that_make_no_sense_are_no_crash_and_nothing_is_gone(gpus: Any) -> None:
    comparison = Comparison((Watch("gpus[uuid]", level="fail"), Watch("gpus[uuid].limit_w")))
    for finding in told(GPUS, {"gpus": gpus}, comparison):
        assert (finding.level, "gone" in finding.message) == ("unknown", False) or gpus == [{"uuid": []}]
    differences({"gpus": gpus}, GPUS, comparison)


# -- which things are there

LEFT = Comparison(
    (Watch("gpus[uuid]", level="fail", worse="lower"), Watch("gpus[uuid].limit_w"), Watch("gpus[uuid].clock_mhz"), Watch("gpus[uuid].vbios", level="ok")),
    places={"gpus": "bus_id"},
    unlisted=lambda _result, codes: "the driver hangs" if "hung" in codes else None,
)


def gpu(name: str | None, bus: str | None, **more: Any) -> dict[str, Any]:
    return {"uuid": name, "bus_id": bus, "limit_w": 600.0, "clock_mhz": 2000, "vbios": "1", **more}


ALL = {"gpus": [gpu(name, f"0{place}") for place, name in enumerate("abcd")]}


def levels(new: list[dict[str, Any]], *codes: str) -> list[tuple[str, str]]:
    return [(finding.level, finding.message) for finding in told(ALL, {"gpus": new}, LEFT, *codes)]


def test_what_a_whole_listing_lacks_is_gone() -> None:
    assert levels(ALL["gpus"][1:]) == [("fail", "gpus[a] is gone since the baseline")]


def test_an_unanswering_driver_is_one_unknown_and_nothing_is_gone() -> None:
    assert levels([], "hung") == [("unknown", "whether 4 of the baseline's gpus are still there cannot be told: the driver hangs")]


def test_what_half_a_listing_tells_is_compared() -> None:
    new = [gpu("a", "00", limit_w=450.0), gpu("b", "01")]
    assert levels(new, "hung") == [
        ("degraded", "gpus[a].limit_w was 600.0 and is 450.0 (-25.0%)"),
        ("unknown", "whether 2 of the baseline's gpus are still there cannot be told: the driver hangs"),
    ]


def test_one_without_a_name_is_known_by_its_place() -> None:
    nameless = gpu(None, "00", missing={"uuid": {"reason": "gpu-lost", "text": "x"}})
    assert levels([nameless, *ALL["gpus"][2:]]) == [
        ("fail", "gpus[b] is gone since the baseline"),
        ("unknown", "whether one of the baseline's gpus is still there cannot be told: 1 listed without uuid (gpu-lost)"),
    ]
    # Without a place it may be either of them.
    (only,) = levels([gpu(None, None), *ALL["gpus"][2:]])
    assert only == ("unknown", "whether 2 of the baseline's gpus are still there cannot be told: 1 listed without uuid")


def test_a_card_in_the_place_of_another_is_told_as_such() -> None:
    assert levels([gpu("z", "00"), *ALL["gpus"][1:]]) == [
        ("degraded", "gpus[a] is gone since the baseline: z is in its place"),
        ("ok", "gpus[z] is new since the baseline"),
    ]


def test_missing_values_are_told_once_for_all_that_lack_them_alike() -> None:
    why = {name: {"reason": "not-permitted"} for name in ("limit_w", "clock_mhz")}
    new = [gpu(name, f"0{place}", limit_w=None, clock_mhz=None, missing=why) for place, name in enumerate("abcd")]
    assert levels(new) == [("unknown", "limit_w, clock_mhz of 4 gpus can no longer be told: not-permitted")]
    new[0] = gpu("a", "00")
    assert levels(new) == [("unknown", "limit_w, clock_mhz of 3 gpus can no longer be told: not-permitted")]
    only = [gpu("a", "00", limit_w=None), *ALL["gpus"][1:]]
    assert levels(only) == [("unknown", "limit_w of gpus[a] can no longer be told")]


def test_what_is_only_worth_knowing_is_not_worth_an_unknown() -> None:
    assert levels([gpu("a", "00", vbios=None), *ALL["gpus"][1:]]) == [("skipped", "vbios of gpus[a] can no longer be told")]


def test_none_may_be_an_answer() -> None:
    watch = Comparison((Watch("cuda", null_says=True),))
    (changed,) = told({"cuda": "12.8"}, {"cuda": None}, watch)
    assert (changed.level, changed.message) == ("degraded", "cuda was 12.8 and is none")
    (changed,) = told({"cuda": None}, {"cuda": "12.8"}, watch)
    assert (changed.level, changed.message) == ("degraded", "cuda was none and is 12.8")


def test_a_part_that_is_missing_is_no_agreement() -> None:
    torch = Comparison((Watch("torch.version"), Watch("torch.cuda")))
    (finding,) = told({"torch": {"version": "2.9", "cuda": "12.8"}}, {"torch": None}, torch)
    assert (finding.level, finding.message) == ("unknown", "torch.version, torch.cuda can no longer be told")


def test_rows_that_were_not_asked_for_are_not_missed_and_values_of_rows_are() -> None:
    rows = Comparison((Watch("rows[size].latency.p50_us", tolerance=0.3, worse="higher", source="own limit", optional=True),))
    old = {"rows": [{"size": size, "latency": {"p50_us": 10.0}} for size in (8, 16)]}
    assert told(old, {"rows": [{"size": 8, "latency": {"p50_us": 12.9}}, {"size": 32, "latency": None}]}, rows) == []
    (slow,) = told(old, {"rows": [{"size": 8, "latency": {"p50_us": 13.1}}]}, rows)
    assert (slow.level, slow.evidence) == ("degraded", ("up to 30% is no change (own limit)",))
    (faster,) = told(old, {"rows": [{"size": 8, "latency": {"p50_us": 5.0}}]}, rows)
    assert faster.level == "ok"
    (missing,) = told(old, {"rows": [{"size": 8, "latency": None}]}, rows)
    assert (missing.level, missing.message) == ("unknown", "latency.p50_us of rows[8] can no longer be told")
    (nothing,) = told(old, {"rows": []}, rows)
    assert (nothing.level, nothing.message) == ("unknown", "rows.latency.p50_us can no longer be told: nothing of it was told now")


def test_many_changes_are_counted_and_none_is_dropped_in_silence() -> None:
    old = {"gpus": [gpu(str(place), str(place)) for place in range(300)]}
    new = {"gpus": [gpu(str(place), str(place), limit_w=1.0) for place in range(300)]}
    all_of_them = told(old, new, LEFT)
    assert len(all_of_them) == 201
    assert (all_of_them[-1].level, all_of_them[-1].message) == ("degraded", "100 more changes; --json lists them all")


@pytest.mark.parametrize("path", ["", "a..b", "a[b].c[d]", "A", "a[]"])
def test_a_path_that_is_none_is_refused(path: str) -> None:
    with pytest.raises(ValueError, match="not a path of a watch"):
        differences({}, {}, Comparison((Watch(path),)))
