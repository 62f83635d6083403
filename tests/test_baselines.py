"""What was normal on a host is kept, and what changed since is told."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from remote_diag import baselines, paths
from remote_diag.comparison import Comparison, Condition, Watch
from remote_diag.errors import ConfigError, LocalIOError
from remote_diag.findings import Finding
from remote_diag.outcome import Outcome, Timing

GPUS = {"driver": "590.48", "gpus": [{"uuid": "a", "limit_w": 600.0}, {"uuid": "b", "limit_w": 600.0}]}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(paths, "baselines", lambda: tmp_path / "baselines")
    return tmp_path / "baselines"


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


@pytest.mark.parametrize(
    "data",
    [
        "", "{", "[]", "\xff", "[" * 200_000, '{"schema_version": 2}', '{"schema_version": 1, "probe": "gpu"}',
        '{"schema_version": 1, "probe": "gpu", "host": "h", "saved_at": "2026", "result": {}, "conditions": [1]}',
    ],
)  # fmt: skip
def test_a_damaged_baseline_is_an_error_and_no_agreement(folder: Path, data: str) -> None:
    baselines.save("h", "gpu", {}).write_text(data)
    with pytest.raises(ConfigError, match=r"gpu\.json: is no baseline"):
        baselines.load("h", "gpu")


def test_a_folder_that_cannot_be_written_is_an_error(folder: Path) -> None:
    folder.write_text("a file")
    with pytest.raises(LocalIOError, match="cannot be written"):
        baselines.save("h", "gpu", {})
    with pytest.raises(LocalIOError, match="no baseline can be written"):
        baselines.check_writable("h", "gpu")


@dataclass(frozen=True)
class Answer:
    driver: str
    busbw_gbs: float | None


def outcome(busbw: float | None, driver: str = "590") -> Outcome[Answer]:
    timing = Timing(connect_s=0, upload_s=0, run_s=0, total_s=0)
    return Outcome("h", "nccl", "r", "ok", Answer(driver, busbw), (Finding("ok", "x", "y"),), timing)


WATCHED = Comparison((Watch("busbw_gbs", tolerance=0.05, worse="lower", unit="GB/s"), Watch("driver", level="ok")))


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
        assert finding.code == ("changed-since-baseline" if busbw else "not-compared-with-baseline")
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
        return baselines.apply(ran, Comparison(()), save_now=True)

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


def test_the_file_of_another_host_is_not_taken(folder: Path) -> None:
    path = baselines.save("gpu8", "gpu", GPUS)
    (folder / "gpu9").mkdir()
    path.rename(folder / "gpu9" / "gpu.json")
    with pytest.raises(ConfigError, match="is the baseline of the host 'gpu8', not of gpu9"):
        baselines.load("gpu9", "gpu")


def test_a_file_that_is_too_large_is_not_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    baselines.save("h", "nccl", {"driver": "1" * 2000})
    monkeypatch.setattr(baselines, "MAX_BYTES", 1000)
    now = baselines.apply(outcome(46.0), WATCHED)
    assert now.status == "unknown"
    assert "larger than 1000 bytes" in now.findings[-1].message
    assert now.answer is not None


@pytest.mark.parametrize("what", ["damaged", "a folder", "of another host"])
def test_what_was_measured_is_not_lost_to_a_baseline(folder: Path, what: str) -> None:
    path = baselines.save("other" if what == "of another host" else "h", "nccl", {})
    mine = folder / "h" / "nccl.json"
    mine.parent.mkdir(exist_ok=True)
    if what == "of another host":
        path.rename(mine)
    elif what == "a folder":
        mine.unlink()
        mine.mkdir()
    else:
        mine.write_text("{")
    now = baselines.apply(outcome(46.0), WATCHED)
    assert (now.status, now.answer, now.findings[-1].code) == ("unknown", Answer("590", 46.0), "baseline-unreadable")
    assert now.findings[-1].action
    with pytest.raises(ConfigError):
        baselines.apply(outcome(46.0), WATCHED, like="h")


def test_a_disk_that_is_full_costs_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    now = baselines.apply(outcome(46.0), WATCHED, save_now=True)
    assert (now.status, now.baseline) == ("unknown", None)
    assert "No space left on device; an older one stays" in now.findings[-1].message


@pytest.mark.parametrize(("codes", "why"), [((), None), (("fail",), "something has failed: x: it broke"), (("hung",), "nobody listed all")])
def test_what_failed_or_was_not_told_whole_is_no_baseline(codes: tuple[str, ...], why: str | None) -> None:
    ran = outcome(46.0)
    findings = [Finding("fail" if code == "fail" else "unknown", code, "it broke", subject="x") for code in codes]
    ran = replace(ran, findings=(*ran.findings, *findings))
    watched = Comparison(WATCHED.watches, unlisted=lambda _result, told: "nobody listed all" if "hung" in told else None)
    saved = baselines.apply(ran, watched, save_now=True)
    assert (saved.baseline is None) == (why is not None)
    if why is not None:
        assert saved.findings[-1].message == f"no baseline is saved: {why}; an older one stays"


# -- conditions


@dataclass(frozen=True)
class Ran:
    ranks: int | None
    busbw_gbs: float


BY_RANKS = Comparison(
    (Watch("busbw_gbs", tolerance=0.05, worse="lower"),),
    (
        Condition("ranks", lambda result, _: result.get("ranks"), "{} ranks", "unknown ranks", option="ranks"),
        Condition("graph", lambda _, asked: "graphs" if asked.get("graph") else None, usual="no graphs"),
    ),
)


def run(ranks: int | None, busbw: float, /, *, save: bool = False, **asked: Any) -> Outcome[Any]:
    timing = Timing(connect_s=0, upload_s=0, run_s=0, total_s=0)
    ran = Outcome("box", "nccl", "r", "ok", Ran(ranks, busbw), (Finding("ok", "x", "y"),), timing)
    return baselines.apply(ran, BY_RANKS, save_now=save, asked=asked)


def test_each_set_of_conditions_has_a_baseline_of_its_own(folder: Path) -> None:
    run(2, 20.0, save=True, ranks=2)
    other = run(8, 5.0, ranks=8)
    assert (other.status, other.baseline) == ("ok", None)
    assert other.notes == ("there is no baseline of box for 8 ranks; there is one for 2 ranks",)
    saved = run(8, 5.0, save=True, ranks=8)
    assert saved.baseline is not None
    assert saved.baseline["holds"] == "8 ranks"
    assert saved.baseline["conditions"] == {"ranks": 8}
    assert len(list((folder / "box").glob("nccl@*-ranks,*.json"))) == 2
    assert (run(2, 10.0, ranks=2).status, run(8, 5.0, ranks=8).status, run(8, 3.0, ranks=8).status) == ("degraded", "ok", "degraded")
    run(2, 10.0, save=True, ranks=2)
    assert (run(2, 10.0, ranks=2).status, run(8, 3.0, ranks=8).status) == ("ok", "degraded")
    assert run(4, 1.0, graph=True, ranks=4).notes == (
        "there is no baseline of box for 4 ranks, graphs; there is one for 2 ranks, no graphs; one for 8 ranks, no graphs",
    )
    assert run(2, 1.0, graph=True).notes[0].startswith("there is no baseline of box for 2 ranks, graphs; there is one for no graphs; one for 8 ranks")


def test_fewer_ranks_that_nobody_asked_for_are_not_ok() -> None:
    run(8, 20.0, save=True, ranks=None)
    lost = run(7, 20.0, ranks=None)
    assert (lost.status, lost.findings[-1].code) == ("unknown", "baseline-does-not-fit")
    assert lost.findings[-1].message == "there is no baseline of box for 7 ranks; there is one for 8 ranks"
    assert run(7, 20.0, ranks=7).status == "ok"


def test_a_file_from_before_conditions_holds_for_what_its_result_says(folder: Path) -> None:
    (folder / "box").mkdir(parents=True)
    old = folder / "box" / "nccl.json"
    content = {"schema_version": 1, "host": "box", "probe": "nccl", "saved_at": "2026-01-01", "result": {"ranks": 2, "busbw_gbs": 20.0}}
    old.write_text(json.dumps(content))
    assert run(2, 10.0).status == "degraded"
    assert run(8, 10.0, ranks=8).notes == ("there is no baseline of box for 8 ranks; there is one for 2 ranks",)
    run(8, 10.0, save=True)
    assert old.exists()
    run(2, 10.0, save=True)
    assert not old.exists()
    assert run(2, 10.0).status == "ok"


def test_two_that_save_at_once_leave_one_whole_file(folder: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda number: baselines.save("h", "gpu", {"number": number, "text": "x" * 100_000}), range(40)))
    stored = baselines.load("h", "gpu")
    assert stored is not None
    assert len(stored.result["text"]) == 100_000
    assert [path.name for path in (folder / "h").iterdir()] == ["gpu.json"]


@pytest.mark.parametrize("name", ["h\u00f6st", "a.b.c", "a/b", "A" * 60])
def test_conditions_of_any_text_are_a_name_of_a_file(folder: Path, name: str) -> None:
    path = baselines.path_of(name, "nccl", {"device": "NVIDIA / H200 \u00e4 \0 " * 40, "ranks": 8})
    assert path.parent.parent == folder
    assert len(path.name) < 255
    assert path != baselines.path_of(name, "nccl", {"device": "NVIDIA / H200 \u00e4 \0 " * 40, "ranks": 9})


def test_the_usual_conditions_do_not_fit_whatever_an_older_file_holds(folder: Path) -> None:
    (folder / "box").mkdir(parents=True)
    content = {"schema_version": 1, "host": "box", "probe": "nccl", "saved_at": "2026-01-01", "result": {"ranks": 2, "busbw_gbs": 20.0}}
    (folder / "box" / "nccl.json").write_text(json.dumps(content))
    # A run of which nobody knows the ranks has the file's own name, and is not held against it.
    timing = Timing(connect_s=0, upload_s=0, run_s=0, total_s=0)
    ran = Outcome("box", "nccl", "r", "ok", Ran(None, 1.0), (Finding("ok", "x", "y"),), timing)
    now = baselines.apply(ran, BY_RANKS, asked={"ranks": 2})
    assert (now.status, now.notes) == ("ok", ("there is no baseline of box for unknown ranks; there is one for 2 ranks",))
