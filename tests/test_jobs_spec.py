"""JOB.yaml, the files a job takes along, where it was launched from, and what this machine remembers."""

from __future__ import annotations

import hashlib
import os
import subprocess
from pathlib import Path

import pytest

from remote_diag import job_records
from remote_diag.errors import ConfigError
from remote_diag.job_files import collect, parts
from remote_diag.job_spec import load
from remote_diag.provenance import MAX_DIFF, launched_from
from tests.support.home import make_private_home

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "job.yaml"
    path.write_text(text)
    return path


def test_a_whole_file(tmp_path: Path) -> None:
    spec = load(written(tmp_path, """\
name: finetune
command: [torchrun, --nproc_per_node, 8, train.py, --lr, 5e-5, --steps, 1000, --flag, "no", --ratio, 0.10]
files: [train.py, configs/]
env: {NCCL_DEBUG: WARN, OMP_NUM_THREADS: 8}
gpus: 0-3
workdir: /data/eagle3
needs: {disk: 200 GB, shm: 16 GiB}
"""))  # fmt: skip
    # Exactly as written: 5e-5 and 0.10 are words, not numbers.
    assert spec.command == (
        "torchrun", "--nproc_per_node", "8", "train.py", "--lr", "5e-5", "--steps", "1000", "--flag", "no", "--ratio", "0.10",
    )  # fmt: skip
    assert spec.env == {"NCCL_DEBUG": "WARN", "OMP_NUM_THREADS": "8"}
    assert (spec.gpus, spec.workdir) == ((0, 1, 2, 3), "/data/eagle3")
    assert (spec.disk_bytes, spec.shm_bytes) == (200 * 10**9, 16 * 2**30)
    assert (spec.base, spec.files) == (tmp_path, ("train.py", "configs/"))


@pytest.mark.parametrize(
    ("gpus", "expected"), [("8", 8), ("0", 0), ("[0, 2]", (0, 2)), ("'3-5,1'", (1, 3, 4, 5)), ("'5-5'", (5,)), ("'4'", 4)]
)
def test_gpus(tmp_path: Path, gpus: str, expected: object) -> None:
    assert load(written(tmp_path, f"name: a\ncommand: [x]\ngpus: {gpus}\n")).gpus == expected


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("", ":1:1: a job file must begin with name:", "the smallest useful file is"),
        ("name: a\n", ":1:1: command: is missing", "smallest"),
        ("name: A b\ncommand: [x]\n", ":1:7: name: 'A b' cannot be the name of a job", "for example a-b"),
        ("name: a.v2\ncommand: [x]\n", ":1:7: name: 'a.v2' cannot be", "for example a"),
        ("name: a\ncommand: python train.py\n", ":2:10: command: ", "word by word"),
        ("name: a\ncommand: []\n", ":2:10: command: ", "at least one word"),
        ("name: a\ncommand: [x, true]\n", ":2:14: command.1: ", "quote it: 'true'"),
        ("name: a\ncommand: [x]\ngpu: 8\n", ":3:1: unknown field 'gpu'", "did you mean gpus?"),
        ("name: a\ncmd: [x]\n", ":2:1: unknown field 'cmd'", "did you mean command?"),
        ("name: a\ncommand: [x]\ngpus: 3-1\n", ":3:7: gpus: '3-1' names no GPUs", "a count like 8"),
        ("name: a\ncommand: [x]\ngpus: [1, 1]\n", ":3:7: gpus: names a GPU twice", "count"),
        ("name: a\ncommand: [x]\nenv: {A B: c}\n", "cannot be an environment variable", None),
        ("name: a\ncommand: [x]\nenv: {RDIAG_JOB: c}\n", "are used by rdiag itself", None),
        ("name: a\ncommand: [x]\nworkdir: here\n", ":3:10: workdir: 'here' is relative", None),
        ("name: a\ncommand: [x]\nneeds: {disk: much}\n", ":3:15: needs.disk: must be a size", "200 GB"),
        ("name: a\ncommand: [x]\nneeds: {ram: 1}\n", ":3:9: unknown field 'ram'", "shm"),
        ("name: a\nname: b\n", ":2:1: duplicate key 'name'", None),
        ("name: a\ncommand:\n", ":2:9: command: is empty", None),
    ],
)
def test_every_mistake_has_a_place_and_a_way_out(tmp_path: Path, text: str, message: str, hint: str | None) -> None:
    path = written(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        load(path)
    assert str(caught.value).startswith(str(path))
    assert message in str(caught.value)
    assert hint is None or hint in (caught.value.hint or "")


def test_the_example_is_a_job_file() -> None:
    spec = load(EXAMPLES / "finetune.yaml")
    assert spec.name == "finetune"
    assert spec.gpus == 8
    assert spec.command[0] == "torchrun"
    assert "{logs}" in spec.command


# -- files


def test_folders_keep_their_shape_and_leave_rubbish_out(tmp_path: Path) -> None:
    for name in ("train.py", "configs/a.json", "configs/deep/b.json", "configs/__pycache__/c.pyc", "configs/.git/x"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    (tmp_path / "train.py").chmod(0o777)
    (tmp_path / "configs" / "loop").symlink_to("..")
    (tmp_path / "configs" / "link.json").symlink_to("a.json")
    found = {file.path: file for file in collect(["train.py", "configs/"], tmp_path)}
    assert sorted(found) == ["configs/a.json", "configs/deep/b.json", "configs/link.json", "train.py"]
    assert found["train.py"].sha256 == hashlib.sha256(b"train.py").hexdigest()
    assert found["train.py"].mode == 0o755
    assert b"".join(data for _, data in parts(found["train.py"], 3)) == b"train.py"


def test_what_lies_elsewhere_stands_in_the_folder_itself(tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    (tmp_path / "shared.py").write_text("x")
    assert [file.path for file in collect(["../shared.py"], tmp_path / "work")] == ["shared.py"]
    (tmp_path / "work" / "shared.py").write_text("y")
    with pytest.raises(ConfigError, match=r"would both be shared\.py"):
        collect(["../shared.py", "shared.py"], tmp_path / "work")
    assert len(collect(["shared.py", "./shared.py"], tmp_path / "work")) == 1


@pytest.mark.parametrize("kind", ["missing", "pipe", "dangling"])
def test_what_is_no_file_is_named(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "x"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "dangling":
        path.symlink_to("nowhere")
    with pytest.raises(ConfigError, match=str(path)):
        collect(["x"], tmp_path)


# -- provenance


def git(folder: Path, *arguments: str) -> None:
    subprocess.run(
        ["git", "-c", "user.name=t", "-c", "user.email=t@example.org", *arguments], cwd=folder, check=True, capture_output=True
    )


def test_commit_and_difference_are_recorded(tmp_path: Path) -> None:
    assert launched_from(tmp_path)["git"] is None
    git(tmp_path, "init", "-q", "-b", "main")
    (tmp_path / "a").write_text("one\n")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "x")
    clean = launched_from(tmp_path)
    assert (clean["git"]["dirty"], clean["git"]["branch"], len(clean["git"]["commit"])) == (False, "main", 40)
    assert "dirty_diff" not in clean
    (tmp_path / "a").write_text("two\n")
    (tmp_path / "new").write_text("x")
    dirty = launched_from(tmp_path)
    assert "-one\n+two\n" in dirty["dirty_diff"]
    assert dirty["git"]["untracked"] == ["new"]
    assert dirty["git"]["diff_sha256"] == hashlib.sha256(dirty["dirty_diff"].encode()).hexdigest()
    (tmp_path / "a").write_text("x" * (2 * MAX_DIFF))
    large = launched_from(tmp_path)
    assert len(large["dirty_diff"]) == MAX_DIFF
    assert large["git"]["diff_truncated"] is True


def test_a_repository_runs_nothing(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q")
    (tmp_path / "a").write_text("one\n")
    (tmp_path / ".gitattributes").write_text("a diff=evil\n")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "x")
    trap = tmp_path / "trap"
    for name in ("core.fsmonitor", "diff.external", "diff.evil.textconv", "diff.evil.command", "core.pager"):
        git(tmp_path, "config", name, f"touch {trap}; true")
    (tmp_path / "a").write_text("two\n")
    assert "+two" in launched_from(tmp_path)["dirty_diff"]
    assert not trap.exists()


# -- what this machine remembers


def test_where_jobs_are_is_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_private_home(monkeypatch, tmp_path)
    assert job_records.hosts() == []
    job_records.remember("gpu8", "a.v1", "0" * 32)
    job_records.remember("gpu9", "a.v2", "0" * 32)
    job_records.remember("gpu9", "../../x.v1", "0" * 32)
    assert job_records.hosts() == ["gpu8", "gpu9"]
    assert set(job_records.hosts_of("a")) == {"gpu8", "gpu9"}
    assert job_records.hosts_of("a.v2") == ["gpu9"]
    job_records.forget("gpu9", "a.v2")
    assert job_records.hosts_of("a") == ["gpu8"]


@pytest.mark.parametrize("content", ["", "{", "[]", '{"host": "other", "job": "a.v1"}', "[" * 100_000])
def test_a_damaged_note_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str) -> None:
    make_private_home(monkeypatch, tmp_path)
    job_records.remember("gpu8", "a.v1", "0" * 32)
    (note,) = (tmp_path / "home" / "state" / "rdiag" / "jobs" / "gpu8").iterdir()
    note.write_text(content)
    assert job_records.hosts_of("a") == []
    job_records.remember("gpu8", "a.v1", "0" * 32)
    assert job_records.hosts_of("a") == ["gpu8"]
