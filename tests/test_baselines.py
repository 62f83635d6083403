"""What was normal on a host is kept, and what changed since is told."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from remote_diag import baselines, paths
from remote_diag.baselines import Watch, differences
from remote_diag.errors import ConfigError, LocalIOError
from remote_diag.findings import Finding
from remote_diag.outcome import Outcome, Timing

GPUS = {"driver": "590.48", "gpus": [{"uuid": "a", "limit_w": 600.0}, {"uuid": "b", "limit_w": 600.0}]}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(paths, "baselines", lambda: tmp_path / "baselines")
    return tmp_path / "baselines"


def found(new: dict[str, Any], *watched: Watch) -> list[tuple[str, Any, Any]]:
    return [(item.key, item.old, item.new) for item in differences(GPUS, new, watched)]


def test_what_is_saved_is_loaded_and_a_later_one_replaces_it(folder: Path) -> None:
    assert baselines.load("gpu8", "gpu") is None
    baselines.save("gpu8", "gpu", {"old": 1})
    assert baselines.save("gpu8", "gpu", GPUS) == folder / "gpu8" / "gpu.json"
    stored = baselines.load("gpu8", "gpu")
    assert stored is not None
    assert stored.result == GPUS
    assert baselines.load("gpu8", "nccl") is None
    assert [path.name for path in (folder / "gpu8").iterdir()] == ["gpu.json"]


@pytest.mark.parametrize("name", ["..", ".", "a/../../b", "/etc", "a\0b"])
def test_no_name_leaves_the_folder(folder: Path, name: str) -> None:
    path = baselines.save(name, "gpu", {})
    assert path.resolve().parent.parent == folder
    assert baselines.load(name, "gpu") is not None


@pytest.mark.parametrize("data", ["", "{", "[]", '{"schema_version": 2}', '{"schema_version": 1, "probe": "gpu"}'])
def test_a_damaged_baseline_is_an_error_and_no_agreement(folder: Path, data: str) -> None:
    baselines.save("h", "gpu", {}).write_text(data)
    with pytest.raises(ConfigError, match=r"gpu\.json: is no baseline"):
        baselines.load("h", "gpu")


def test_a_folder_that_cannot_be_written_is_an_error(folder: Path) -> None:
    folder.write_text("a file")
    with pytest.raises(LocalIOError, match="cannot be written"):
        baselines.save("h", "gpu", {})


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


@pytest.mark.parametrize("gpus", [None, 3, "ab", [1], [{"uuid": "a"}, {"uuid": "a"}], [{"uuid": None}]])
def test_lists_that_make_no_sense_are_no_crash(gpus: Any) -> None:
    assert all(new is False for _, _, new in found({"gpus": gpus}, Watch("gpus[uuid]"), Watch("gpus[uuid].limit_w")))


@dataclass(frozen=True)
class Answer:
    driver: str
    busbw_gbs: float | None


def outcome(busbw: float | None, driver: str = "590") -> Outcome[Answer]:
    timing = Timing(connect_s=0, upload_s=0, run_s=0, total_s=0)
    return Outcome("h", "nccl", "r", "ok", Answer(driver, busbw), (Finding("ok", "x", "y"),), timing)


WATCHED = (Watch("busbw_gbs", tolerance=0.05, worse="lower", unit="GB/s"), Watch("driver", level="ok"))


@pytest.mark.parametrize(
    ("busbw", "driver", "status", "levels"),
    [
        (46.0, "590", "ok", []),
        (44.5, "590", "ok", []),
        (30.0, "590", "degraded", ["degraded"]),
        (60.0, "590", "ok", ["ok"]),
        (None, "590", "unknown", ["unknown"]),
        (46.0, "595", "ok", ["ok"]),
    ],
)
def test_a_change_for_the_worse_decides_the_status(busbw: float | None, driver: str, status: str, levels: list[str]) -> None:
    saved = baselines.apply(outcome(46.0), WATCHED, save_now=True)
    assert saved.baseline is not None
    assert saved.baseline["saved"].endswith("nccl.json")
    now = baselines.apply(outcome(busbw, driver), WATCHED)
    assert now.status == status
    assert [finding.level for finding in now.findings[1:]] == levels
    plain = json.loads(json.dumps(now.as_dict()))
    assert len(plain["baseline"]["differences"]) == len(levels)
    for finding in now.findings[1:]:
        assert finding.code == "changed-since-baseline"
        assert finding.threshold in {46.0, "590"}
        assert "baseline of h, saved 20" in (finding.threshold_source or "")


@dataclass(frozen=True)
class Measured:
    complete: bool
    correctness: str


@pytest.mark.parametrize(("complete", "correctness", "why"), [(False, "ok", "not complete"), (True, "wrong", "arrived wrong")])
def test_what_was_not_well_replaces_no_baseline(complete: bool, correctness: str, why: str) -> None:
    def saved(complete: bool, correctness: str) -> Outcome[Measured]:
        timing = Timing(connect_s=0, upload_s=0, run_s=0, total_s=0)
        ran = Outcome("h", "nccl", "r", "ok", Measured(complete, correctness), (Finding("ok", "x", "y"),), timing)
        return baselines.apply(ran, (), save_now=True)

    assert saved(complete=True, correctness="ok").baseline is not None
    refused = saved(complete, correctness)
    assert (refused.status, refused.baseline) == ("unknown", None)
    assert why in refused.findings[-1].message
    stored = baselines.load("h", "nccl")
    assert stored is not None
    assert stored.result == {"complete": True, "correctness": "ok"}


def test_without_a_baseline_nothing_is_added() -> None:
    now = baselines.apply(outcome(46.0), WATCHED)
    assert now.baseline is None
    assert "baseline" not in now.as_dict()
