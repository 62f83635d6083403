"""What is removed on the host, and what never is."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from remote_diag.agent import removal
from remote_diag.agent.removal import remove_tree, sweep

DAY = 24 * 3600.0


def identity(path: Path) -> tuple[int, int]:
    status = path.lstat()
    return status.st_dev, status.st_ino


def make_run(runs: Path, name: str, *, age: float = 3 * DAY, keep: object = False, deadline_s: object = 600.0) -> Path:
    run = runs / name
    (run / "scratch").mkdir(parents=True)
    (run / "request.json").write_text(json.dumps({"keep": keep, "deadline_s": deadline_s, "env": {"TOKEN": "secret"}}))
    for path in (run / "request.json", run):
        os.utime(path, (time.time() - age, time.time() - age))
    return run


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    (tmp_path / "runs").mkdir()
    return tmp_path / "runs"


def test_runs_of_killed_agents_are_removed_once_they_cannot_be_going_on(runs: Path) -> None:
    make_run(runs, "abandoned")
    spared = [
        make_run(runs, "young", age=3600.0),
        make_run(runs, "long", deadline_s=30 * DAY),
        make_run(runs, "kept", keep=True),
        make_run(runs, "odd", keep="no"),
        make_run(runs, "odder", deadline_s="soon"),
        make_run(runs, "job"),
    ]
    (spared[-1] / "request.json").unlink()
    os.utime(spared[-1], (0, 0))
    sweep(str(runs))
    assert sorted(runs.iterdir()) == sorted(spared)


def test_sweeping_follows_no_link(runs: Path, tmp_path: Path) -> None:
    target = make_run(tmp_path / "elsewhere", "run")
    (runs / "link").symlink_to(target)
    os.utime(runs / "link", (0, 0), follow_symlinks=False)
    linked = make_run(runs, "linked")
    (linked / "request.json").rename(tmp_path / "request.json")
    (linked / "request.json").symlink_to(tmp_path / "request.json")
    os.utime(linked, (0, 0))
    sweep(str(runs))
    assert (target / "request.json").exists()
    assert linked.exists()


def test_sweeping_where_there_is_nothing(tmp_path: Path) -> None:
    sweep(str(tmp_path / "nowhere"))


def test_removing_can_be_interrupted_and_goes_on(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    for number in range(3):
        (folder / str(number) / "deep").mkdir(parents=True)
        (folder / str(number) / "deep" / "file").touch()
    assert not remove_tree(str(folder), identity(folder), until=time.monotonic())
    assert len(list(folder.rglob("file"))) == 3
    assert remove_tree(str(folder), identity(folder))
    assert not folder.exists()


def test_another_folder_of_that_name_is_spared(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    mine = identity(tmp_path / "mine")
    (tmp_path / "mine").rename(tmp_path / "moved")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").touch()
    assert not remove_tree(str(tmp_path / "mine"), mine)
    assert (tmp_path / "mine" / "file").exists()


def test_what_resists_costs_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a", "stuck", "z"):
        (tmp_path / "folder" / name).mkdir(parents=True)
    unopened = removal._open_folder

    def refuse(name: str, parent: int) -> int:
        if name == "stuck":
            raise OSError("no")
        return unopened(name, parent)

    monkeypatch.setattr(removal, "_open_folder", refuse)
    assert not remove_tree(str(tmp_path / "folder"), identity(tmp_path / "folder"))
    assert os.listdir(tmp_path / "folder") == ["stuck"]
