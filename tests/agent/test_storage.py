"""Folders and files on the host: private, whole, and not where somebody else wants them."""

from __future__ import annotations

import errno
import json
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from remote_diag.agent import storage
from remote_diag.agent.storage import Blobs, StorageError, create, private_directory
from tests.support.agent_driver import AgentDriver, lay_out_bundle, probe_source

PROBE = probe_source("return Result(value=1)")


def test_a_private_folder_is_made_private_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        private_directory(str(tmp_path / "new"))
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o700
    private_directory(str(tmp_path / "new"))


def test_a_link_a_file_and_an_open_folder_are_refused(tmp_path: Path) -> None:
    (tmp_path / "target").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "target")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    (tmp_path / "file").touch()
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    for name, words in (
        ("link", "symbolic link"),
        ("dangling", "symbolic link"),
        ("file", "not a folder"),
        ("open", "other users"),
    ):
        with pytest.raises(StorageError, match=words) as refused:
            private_directory(str(tmp_path / name))
        assert refused.value.hint
    with pytest.raises(StorageError, match="No such file"):
        private_directory(str(tmp_path / "no" / "parent"))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_somebody_elses_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir(mode=0o700)
    os.chown(tmp_path / "theirs", 12345, 12345)
    with pytest.raises(StorageError, match="belongs to user 12345"):
        private_directory(str(tmp_path / "theirs"))


@pytest.mark.parametrize("name", ["runs", "blobs", "."])
def test_the_agent_writes_through_no_link(tmp_path: Path, name: str) -> None:
    bundle = lay_out_bundle(tmp_path / "cache", blobs=() if name == "blobs" else (PROBE,))
    (tmp_path / "elsewhere").mkdir()
    if name == ".":
        (tmp_path / "cache").rename(tmp_path / "moved")
        (tmp_path / "cache").symlink_to(tmp_path / "moved")
    else:
        (tmp_path / "cache" / name).symlink_to(tmp_path / "elsewhere")
    with AgentDriver(bundle) as driver:
        answer = driver.run(PROBE)
    assert answer.outcome == "environment"
    assert "symbolic link" in answer.end["message"]
    assert "cache_dir" in answer.end["hint"]
    assert os.listdir(tmp_path / "elsewhere") == []


def test_a_shipped_probe_needs_no_file(tmp_path: Path) -> None:
    with AgentDriver(lay_out_bundle(tmp_path / "cache", blobs=(PROBE,))) as driver:
        answer = driver.run(PROBE)
    assert answer.of("need") == []
    assert answer.result == {"value": 1}


def test_create_replaces_nothing_and_leaves_nothing_half_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "there").write_text("x")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for name in ("there", "link"):
        with pytest.raises(FileExistsError):
            create(str(tmp_path / name), b"y")
    assert (tmp_path / "there").read_text() == "x"

    def no_space(_descriptor: int, _content: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(storage, "write_all", no_space)
    with pytest.raises(OSError, match="space"):
        create(str(tmp_path / "new"), b"y")
    assert sorted(os.listdir(tmp_path)) == ["link", "there"]


def test_a_blob_is_never_seen_half_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blobs = Blobs(str(tmp_path / "bundle"), str(tmp_path))
    name = "a" * 64

    def cut(descriptor: int, content: bytes) -> None:
        os.write(descriptor, content[:1])
        assert name not in os.listdir(tmp_path / "blobs")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(storage, "write_all", cut)
    with pytest.raises(StorageError, match="No space left") as refused:
        blobs.store(name, b"content")
    assert "cache_dir" in str(refused.value.hint)
    assert os.listdir(tmp_path / "blobs") == []


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MiB: twice what the agent takes."""
    place = tmp_path / "tiny"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m,mode=0700", "rdiag-test", str(place)], capture_output=True
    )
    if mounted.returncode != 0:
        pytest.skip(f"a full disk needs the right to mount a small one: {mounted.stderr.decode().strip()}")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def fill(place: Path, leave: int = 0) -> None:
    free = shutil.disk_usage(place).free
    (place / "ballast").write_bytes(bytes(max(0, free - leave)))


def test_a_full_disk_is_the_environment(tiny_disk: Path) -> None:
    bundle = lay_out_bundle(tiny_disk / "cache")
    fill(tiny_disk)
    with AgentDriver(bundle) as driver:
        answer = driver.run(PROBE)
    assert answer.outcome == "environment"
    assert "No space left" in answer.end["message"]
    assert "cache_dir" in answer.end["hint"]
    assert os.listdir(tiny_disk / "cache" / "blobs") == []
    shutil.rmtree(tiny_disk / "cache" / "runs", ignore_errors=True)


def test_a_disk_that_fills_up_spoils_the_kept_copy_and_not_the_run(tiny_disk: Path) -> None:
    probe = probe_source("""
        os.write(1, b"x" * 400_000)
        return Result(value="y" * 100_000)
    """)
    bundle = lay_out_bundle(tiny_disk / "cache", blobs=(probe,))
    with AgentDriver(bundle) as driver:
        assert driver.run(probe).outcome == "ok"  # writes what Python compiles
    fill(tiny_disk, leave=100_000)
    with AgentDriver(bundle) as driver:
        answer = driver.run(probe, keep=True)
    assert answer.outcome == "ok"
    assert len(answer.log()) == 400_000
    assert answer.result == {"value": "y" * 100_000}
    assert any("stdout is incomplete: No space left" in line for line in answer.end["details"])
    assert any("result.json was not written: No space left" in line for line in answer.end["details"])


@pytest.mark.parametrize("place", ["agent/runner.py", "probes/lib/__init__.py", "probes/more.py", "library", "enter"])
def test_a_damaged_bundle_says_so_and_runs_nothing(tmp_path: Path, place: str) -> None:
    bundle = lay_out_bundle(tmp_path / "cache")
    (bundle / place).write_text("damaged = True\n")
    with AgentDriver(bundle) as driver:
        driver.begin(PROBE)
        said = json.loads(driver.wait_for("bundle-damaged").payload)
        assert driver.process.wait(10) == 0
    assert said["expected"] != said["bundle"]
    assert [frame.kind for frame in driver.frames] == ["bundle-damaged"]
    assert not (tmp_path / "cache" / "runs").exists()


def test_damage_in_the_library_is_no_matter_for_what_does_not_use_it(tmp_path: Path) -> None:
    bundle = lay_out_bundle(tmp_path / "cache")
    shutil.rmtree(bundle / "probes")
    with AgentDriver(bundle, check="agent") as driver:
        assert driver.run(PROBE).outcome == "ok"


@pytest.mark.parametrize(
    ("sent", "said"),
    [(b"all\n", b"second line"), (b"whole\nxyz\n", b"third line"), (b"\xff" * 100, b"second line")],
    ids=["word", "nonce", "noise"],
)
def test_an_agent_that_is_talked_to_by_somebody_else_ends(tmp_path: Path, sent: bytes, said: bytes) -> None:
    bundle = lay_out_bundle(tmp_path / "cache")
    argv = [sys.executable, "-E", "-s", "-S", str(bundle / "agent" / "__main__.py"), "0" * 32]
    done = subprocess.run(argv, input=sent, capture_output=True, timeout=30)
    assert (done.returncode, said in done.stderr) == (2, True), done.stderr


@pytest.mark.parametrize("sent", [b"", b"whole\n"])
def test_an_agent_whose_client_leaves_says_nothing_of_it(tmp_path: Path, sent: bytes) -> None:
    bundle = lay_out_bundle(tmp_path / "cache")
    argv = [sys.executable, "-E", "-s", "-S", str(bundle / "agent" / "__main__.py"), "0" * 32]
    done = subprocess.run(argv, input=sent, capture_output=True, timeout=30)
    assert (done.returncode, done.stderr, b"hello" in done.stdout) == (0, b"", bool(sent))


def test_a_kept_run_can_be_repeated_by_hand(bundle: Path, tmp_path: Path) -> None:
    probe = probe_source("""
        print("printed")
        context.finding("ok", "all-well", "fine")
        return Result(value=[params.value, os.environ["HAND"], os.getcwd(), os.environ["CUDA_VISIBLE_DEVICES"]])
    """)
    with AgentDriver(bundle) as driver:
        answer = driver.run(probe, keep=True, params={"value": [1]}, env={"HAND": "é"}, workdir=str(tmp_path))
    run_dir = Path(answer.end["run_dir"])
    assert run_dir == driver.run_dir
    assert stat.S_IMODE(run_dir.stat().st_mode) == 0o700
    names = ["probe.py", "request.json", "result.json", "stderr", "stdout"]
    assert sorted(os.listdir(run_dir)) == names
    assert {stat.S_IMODE((run_dir / name).stat().st_mode) for name in names} == {0o600}
    assert (run_dir / "stdout").read_bytes() == b"printed\n"
    first = json.loads((run_dir / "result.json").read_text())
    assert first == answer.result == {"value": [[1], "é", str(tmp_path), ""]}

    hello = answer.json("hello")[0]
    (run_dir / "result.json").unlink()
    by_hand = subprocess.run(
        [hello["executable"], str(bundle / "agent" / "probe_main.py"), str(run_dir)], capture_output=True, timeout=30
    )
    assert by_hand.returncode == 0, by_hand.stderr
    assert by_hand.stdout == b"printed\n"
    assert str(run_dir / "result.json").encode() in by_hand.stderr
    assert b"all-well" in by_hand.stderr
    assert json.loads((run_dir / "result.json").read_text()) == first

    (run_dir / "probe.py").write_bytes(probe_source("raise ValueError('edited')"))
    by_hand = subprocess.run(
        [hello["executable"], str(bundle / "agent" / "probe_main.py"), str(run_dir)], capture_output=True, timeout=30
    )
    assert by_hand.returncode == 1
    assert b"ValueError: edited" in by_hand.stderr
    shutil.rmtree(run_dir)


def test_a_run_that_fails_is_kept_as_well(bundle: Path) -> None:
    with AgentDriver(bundle) as driver:
        answer = driver.run(probe_source("print('x'); raise ValueError"), keep=True)
    assert answer.outcome == "probe-error"
    assert answer.end["run_dir"] == str(driver.run_dir)
    assert (driver.run_dir / "stdout").read_bytes() == b"x\n"
    shutil.rmtree(driver.run_dir)
