from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from remote_diag import scaffold
from remote_diag.errors import LocalIOError, UsageProblem
from remote_diag.probe import load
from tests.support.cli import CHECKOUT, environment


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    return work


def run(*command: str, cwd: Path, home: Path) -> None:
    done = subprocess.run(
        [sys.executable, *command], cwd=cwd, env=environment(home), capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_what_is_written_works_at_once(work: Path, tmp_path: Path) -> None:
    written = scaffold.create("disk-room", Path("probes"))
    assert (written.name, written.probe, written.test) == (
        "disk-room",
        Path("probes/disk_room.py"),
        Path("tests/test_disk_room.py"),
    )
    probe = load(written.probe)
    assert (probe.name, probe.effects) == ("disk-room", ("reads-files",))
    assert "rdiag run disk-room" in (probe.Params.__doc__ or "")
    for path in (written.probe, written.test):
        assert "sample" not in path.read_text()
    run("-m", "pytest", "-q", "-p", "no:cacheprovider", str(written.test), cwd=work, home=tmp_path / "home")


def test_what_is_written_pleases_the_linters(work: Path) -> None:
    written = scaffold.create("disk_room", Path("probes"))
    files = [str(path.resolve()) for path in (written.probe, written.test)]
    run("-m", "ruff", "check", "--isolated", "--no-cache", *files, cwd=work, home=work)
    # From the checkout, whose cache of remote_diag's types mypy can use.
    run("-m", "mypy", "--strict", *files, cwd=CHECKOUT, home=work)


@pytest.mark.parametrize("directory", ["my probes", "deep/er/probes", "."])
def test_other_folders(directory: str, work: Path, tmp_path: Path) -> None:
    (work / "here").mkdir()
    base = work / "here"
    target = base / directory
    target.mkdir(parents=True, exist_ok=True)
    written = scaffold.create("disk-room", target)
    assert written.probe == target / "disk_room.py"
    assert written.test.resolve() == target.resolve().parent / "tests" / "test_disk_room.py"
    code = compile(written.test.read_text(), str(written.test), "exec")
    names: dict[str, object] = {"__file__": str(written.test), "__name__": "disk_room_test"}
    exec(code, names)  # noqa: S102
    assert names["PROBE"] == written.probe.resolve()


def test_nothing_is_overwritten(work: Path) -> None:
    scaffold.create("disk-room", Path("probes"))
    before = Path("probes/disk_room.py").read_text()
    with pytest.raises(UsageProblem, match=r"probes/disk_room\.py exists already"):
        scaffold.create("disk_room", Path("probes"))
    Path("tests/test_other.py").write_text("mine")
    with pytest.raises(UsageProblem, match=r"tests/test_other\.py exists already"):
        scaffold.create("other", Path("probes"))
    assert not Path("probes/other.py").exists()
    Path("probes/link.py").symlink_to("nowhere")
    with pytest.raises(UsageProblem, match=r"probes/link\.py exists already"):
        scaffold.create("link", Path("probes"))
    assert Path("probes/disk_room.py").read_text() == before


@pytest.mark.parametrize("name", ["", "Disk", "disk room", "../evil", "a/b", "-x", "_x", "1st", "class", "disk--room", "d\u00efsk"])
def test_names_that_are_none(name: str, work: Path) -> None:
    with pytest.raises(UsageProblem):
        scaffold.create(name, Path("probes"))
    assert list(work.iterdir()) == []


def test_a_place_that_cannot_be_written_to(work: Path) -> None:
    Path("file").write_text("")
    with pytest.raises(LocalIOError, match="cannot be written"):
        scaffold.create("disk-room", Path("file/probes"))
