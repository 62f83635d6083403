"""Cleaning up: what rdiag made and nobody needs, and nothing else."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from remote_diag.agent.jobs.clean import clean as clean_here
from remote_diag.agent.jobs.remove import remove_tree
from remote_diag.agent.operations import Gone
from tests.support.agent_driver import lay_out_bundle
from tests.support.job_host import Ended, JobHost


@pytest.fixture
def host(tmp_path: Path) -> Iterator[JobHost]:
    with JobHost(lay_out_bundle(tmp_path / "cache")) as jobs:
        yield jobs


def clean(host: JobHost, older_than_s: float = 0, *, dry_run: bool = False) -> dict[str, Any]:
    return host.operate("clean", older_than_s=older_than_s, dry_run=dry_run)


def removed(answer: dict[str, Any], what: str) -> list[str]:
    return [one["name"] for one in answer["removed"] if one["what"] == what]


def age(path: Path, days: float) -> None:
    then = time.time() - days * 86400
    os.utime(path, (then, then), follow_symlinks=False)


def test_finished_jobs_go_and_running_ones_stay(host: JobHost) -> None:
    host.launch(["/bin/true"], name="done", files={"a": b"only for done"})
    host.wait_for("done.v1", "exited")
    host.launch(["/bin/sleep", "100"], name="busy", files={"a": b"for busy"})
    answer = clean(host)
    assert removed(answer, "job") == ["done.v1"]
    assert [(one["name"], one["why"]) for one in answer["kept"]] == [("busy.v1", "running")]
    assert len(removed(answer, "file")) == 1
    assert not host.directory("done.v1").exists()
    assert host.job("busy.v1")["state"] == "running"
    assert host.stop("busy.v1")["state"] == "stopped"


class Peer:
    """A client that goes away after so many signs of life."""

    def __init__(self, stays: int) -> None:
        self.stays = stays
        self.pulses = 0

    def pulse(self) -> None:
        self.pulses += 1
        if self.pulses > self.stays:
            raise Gone("cancelled", "the client went away")


@pytest.mark.parametrize("stays", [0, 1000])
def test_the_client_hears_that_it_goes_on_and_need_not_stay(host: JobHost, stays: int) -> None:
    host.launch(["/bin/true"], files={f"file{number}": b"x" for number in range(20)})
    host.wait_for("job.v1", "exited")
    peer = Peer(stays)
    answer = clean_here({"older_than_s": 0, "dry_run": False}, peer, str(host.bundle), str(host.cache))  # type: ignore[arg-type]
    assert removed(answer, "job") == ["job.v1"]
    assert peer.pulses > 20


def test_folders_in_folders_without_end_are_a_problem_and_no_crash(tmp_path: Path) -> None:
    (tmp_path / "outer").mkdir()
    inner = os.open(tmp_path / "outer", os.O_RDONLY)
    for _ in range(1100):
        os.mkdir("d", dir_fd=inner)
        deeper = os.open("d", os.O_RDONLY, dir_fd=inner)
        os.close(inner)
        inner = deeper
    os.close(inner)
    assert remove_tree(str(tmp_path / "outer")).problems
    subprocess.run(["rm", "-rf", *tmp_path.glob(".gone-*")], check=True)


def test_what_is_too_young_stays(host: JobHost) -> None:
    host.launch(["/bin/true"])
    host.wait_for("job.v1", "exited")
    answer = clean(host, 3600)
    assert answer["removed"] == []
    assert answer["kept"] == [{"what": "job", "name": "job.v1", "why": "too young"}]


def test_a_rehearsal_removes_nothing(host: JobHost) -> None:
    host.launch(["/bin/true"], files={"a": b"x" * 5000})
    host.wait_for("job.v1", "exited")
    answer = clean(host, dry_run=True)
    assert removed(answer, "job") == ["job.v1"]
    assert answer["bytes"] > 5000
    assert host.job("job.v1")["state"] == "exited"


def test_numbers_are_not_given_twice(host: JobHost) -> None:
    for _ in range(2):
        host.launch(["/bin/true"])
        host.wait_for(host.jobs()[-1]["job"], "exited")
    clean(host)
    assert host.jobs() == []
    assert host.launch(["/bin/true"])["job"] == "job.v3"


def test_old_releases_go_but_not_one_that_works_or_is_needed(host: JobHost) -> None:
    host.launch(["/bin/sleep", "100"])
    old, young = host.cache / ("a" * 64), host.cache / ("b" * 64)
    half, strange = host.cache / f"{'c' * 64}.{'d' * 32}", host.cache / "mine"
    for folder in (old, young, half, strange):
        folder.mkdir()
        (folder / "file").write_text("x")
    for folder in (old, half, strange, host.bundle):
        age(folder, 30)
    answer = clean(host, 14 * 86400)
    assert removed(answer, "release") == [old.name]
    assert removed(answer, "half an installation") == [half.name]
    assert (young / "file").exists()
    assert (strange / "file").exists()
    assert host.bundle.exists()


def test_nothing_is_reached_through_a_link(host: JobHost, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_text("x")
    host.launch(["/bin/sh", "-c", f"ln -s {outside} inner; mkdir locked; touch locked/f; chmod 0 locked"])
    host.wait_for("job.v1", "exited")
    for link in (host.cache / ("e" * 64), host.cache / "jobs" / "linked.v1", host.cache / "blobs" / ("f" * 64)):
        link.parent.mkdir(exist_ok=True)
        link.symlink_to(outside)
        age(link, 100)
    answer = clean(host)
    assert removed(answer, "job") == ["job.v1"]
    assert (outside / "precious").exists()
    assert not host.directory("job.v1").exists()


def test_a_cache_that_was_replaced_by_a_link_is_left_alone(host: JobHost, tmp_path: Path) -> None:
    blobs, elsewhere = host.cache / "blobs", tmp_path / "elsewhere"
    elsewhere.mkdir()
    victim = elsewhere / ("a" * 64)
    victim.write_text("x")
    age(victim, 100)
    blobs.symlink_to(elsewhere)
    clean(host)
    assert victim.exists()


def test_a_job_with_a_living_process_stays_though_its_record_says_it_ended(host: JobHost) -> None:
    host.launch(["/bin/sleep", "100"])
    state = host.directory("job.v1") / "state.json"
    os.kill(host.record("job.v1").state["supervisor_pid"], 9)
    state.write_text(state.read_text().replace('"running"', '"exited"').replace('"ended_at":null', '"ended_at":1'))
    assert clean(host)["kept"] == [{"what": "job", "name": "job.v1", "why": "processes of it are alive"}]


def test_remains_of_an_interrupted_cleaning_go(host: JobHost) -> None:
    (host.cache / "jobs" / ".gone-0123456789abcdef").mkdir(parents=True)
    assert removed(clean(host), "leftover") == [".gone-0123456789abcdef"]


@pytest.mark.parametrize("fields", [{"older_than_s": -1}, {"older_than_s": "x"}, {"dry_run": 1}])
def test_a_request_that_does_not_fit_removes_nothing(host: JobHost, fields: dict[str, Any]) -> None:
    with pytest.raises(Ended):
        host.operate("clean", **{"older_than_s": 0, "dry_run": False, **fields})


def test_a_mounted_file_system_is_left_alone(tmp_path: Path) -> None:
    from tests.support.places import mounted

    folder = tmp_path / "folder"
    folder.mkdir()
    with mounted(folder / "mount", "size=1m") as mount:
        (mount / "precious").write_text("x")
        removal = remove_tree(str(folder))
        assert any("another file system" in problem for problem in removal.problems)
        (left,) = [one for one in tmp_path.iterdir() if one.name.startswith(".gone-")]
        left.rename(folder)
        assert (folder / "mount" / "precious").exists()
