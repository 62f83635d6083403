"""Local copies: what is never lost, never overwritten and never shared."""

from __future__ import annotations

import hashlib
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from remote_diag.errors import LocalIOError
from remote_diag.mirror import CHECKED, Busy, Mirror, Position, fingerprint


def view(data: bytes) -> memoryview:
    return memoryview(data)


def test_a_copy_grows_and_its_size_is_where_it_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "new" / "a.log"
    mirror = Mirror(path)
    mirror.append(view(b"one\n"))
    mirror.append(view(b"\x00\xff\n"))
    mirror.close()
    assert path.read_bytes() == b"one\n\x00\xff\n"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    again = Mirror(path)
    assert again.offset == 7
    assert again.read(4, 100) == b"\x00\xff\n"
    assert again.read(7, 100) == b""
    again.close()


@pytest.mark.parametrize("size", [0, 1, CHECKED - 1, CHECKED, CHECKED + 1, 3 * CHECKED])
def test_both_kinds_of_copies_have_the_same_fingerprint(tmp_path: Path, size: int) -> None:
    data = os.urandom(size)
    mirror, position = Mirror(tmp_path / "a.log"), Position()
    for start in range(0, size, 1000):
        piece = view(data[start : start + 1000])
        mirror.append(piece)
        position.append(piece)
    expected = min(size, CHECKED), hashlib.sha256(data[-CHECKED:] if size else b"").hexdigest()
    assert fingerprint(mirror) == fingerprint(position) == expected
    assert mirror.offset == position.offset == size
    mirror.close()


def test_only_one_process_writes(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    mirror = Mirror(path)
    with pytest.raises(Busy):
        Mirror(path)
    code = "import sys, pathlib\nfrom remote_diag.mirror import Mirror, Busy\ntry: Mirror(pathlib.Path(sys.argv[1]))\nexcept Busy: sys.exit(3)"
    assert subprocess.run([sys.executable, "-c", code, path], check=False).returncode == 3
    mirror.close()
    Mirror(path).close()


def test_a_lazy_copy_makes_no_file_before_it_has_a_byte(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    mirror = Mirror(path, lazy=True)
    mirror.sync(now=True)
    assert mirror.tail() == b""
    mirror.close()
    assert not path.exists()
    mirror = Mirror(path, lazy=True)
    path.write_bytes(b"somebody was quicker")
    with pytest.raises(LocalIOError, match="somebody else"):
        mirror.append(view(b"x"))
    mirror.close()
    assert path.read_bytes() == b"somebody was quicker"


def test_what_was_set_aside_keeps_its_bytes_and_may_still_grow(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    (tmp_path / "a.log.old-1").write_bytes(b"an older one")
    first = Mirror(path)
    first.append(view(b"first"))
    older, second = first.set_aside()
    assert older == tmp_path / "a.log.old-2"
    with pytest.raises(Busy):
        Mirror(path)
    second.append(view(b"second"))
    first.append(view(b", later"))
    first.close()
    second.close()
    assert {one.name: one.read_bytes() for one in tmp_path.iterdir()} == {
        "a.log": b"second",
        "a.log.old-1": b"an older one",
        "a.log.old-2": b"first, later",
    }


def test_a_file_system_without_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_links(*_args: object, **_options: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", no_links)
    mirror = Mirror(tmp_path / "a.log")
    mirror.append(view(b"first"))
    older, fresh = mirror.set_aside()
    mirror.close()
    fresh.close()
    assert older.read_bytes() == b"first"
    assert (tmp_path / "a.log").read_bytes() == b""


def test_no_link_no_pipe_no_folder_is_written_to(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    (tmp_path / "link").symlink_to(victim)
    (tmp_path / "dangling").symlink_to(tmp_path / "made")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    for name in ("link", "dangling", "pipe", "folder", "victim/below"):
        with pytest.raises(LocalIOError, match=name.split("/", maxsplit=1)[0]):
            Mirror(tmp_path / name)
    assert victim.read_bytes() == b"precious"
    assert not (tmp_path / "made").exists()


def test_a_disk_that_could_not_keep_it_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_descriptor: int) -> None:
        raise OSError(5, "Input/output error")

    mirror = Mirror(tmp_path / "a.log")
    mirror.append(view(b"x"))
    monkeypatch.setattr(os, "fdatasync", broken)
    with pytest.raises(LocalIOError, match="Input/output error"):
        mirror.sync(now=True)
    monkeypatch.undo()
    mirror.close()
