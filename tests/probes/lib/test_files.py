from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from probes.lib.files import Damaged, File, Meter, Unreadable, quoted, read_small, shown


def open_file(path: Path | str) -> File:
    return File(str(path), Meter())


def test_bytes_come_from_where_they_were_asked_for_and_are_counted(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(bytes(range(200)))
    meter = Meter()
    with File(str(tmp_path / "f"), meter) as file:
        assert file.size == 200
        assert file.read(10, 5) == bytes([10, 11, 12, 13, 14])
        assert file.read(200, 0) == b""
    assert meter.bytes == 5
    assert meter.files == [str(tmp_path / "f")]


def test_a_named_pipe_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(Unreadable, match="named pipe"):
        open_file(tmp_path / "pipe")


def test_what_is_no_regular_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Unreadable, match="character device"):
        open_file("/dev/zero")
    with pytest.raises(Unreadable, match="folder"):
        open_file(tmp_path)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "s"))
        with pytest.raises(Unreadable):
            open_file(tmp_path / "s")


def test_nothing_stays_open_when_a_file_is_refused(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        with pytest.raises(Unreadable):
            open_file(tmp_path)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_link_is_followed(tmp_path: Path) -> None:
    (tmp_path / "blob").write_bytes(b"abc")
    (tmp_path / "link").symlink_to("blob")
    with open_file(tmp_path / "link") as file:
        assert file.read(0, 3) == b"abc"


@pytest.mark.parametrize(
    ("path", "hint"),
    [("~/missing", "taken literally"), ("missing", "below"), ("/nonexistent/missing", "on the host")],
)
def test_a_missing_file_is_explained(path: str, hint: str) -> None:
    with pytest.raises(Unreadable, match="No such file") as caught:
        open_file(path)
    assert hint in (caught.value.hint or "")


def test_a_broken_link_says_where_it_leads(tmp_path: Path) -> None:
    (tmp_path / "model").symlink_to("../../blobs/123")
    with pytest.raises(Unreadable) as caught:
        open_file(tmp_path / "model")
    assert "../../blobs/123" in (caught.value.hint or "")


def test_a_path_with_nul_is_an_error_like_any_other() -> None:
    with pytest.raises(Unreadable):
        open_file("a\0b")


def test_reading_beyond_the_end_is_damage(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"12345")
    with open_file(tmp_path / "f") as file:
        for offset, count in ((0, 6), (5, 1), (-1, 2), (0, -1), (1 << 70, 1)):
            with pytest.raises(Damaged):
                file.read(offset, count)


def test_a_file_that_shrinks_is_damage(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"x" * 100)
    with open_file(tmp_path / "f") as file:
        os.truncate(tmp_path / "f", 50)
        with pytest.raises(Damaged, match="shorter while"):
            file.read(0, 100)


def test_small_files_have_a_limit(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"12345")
    assert read_small(str(tmp_path / "f"), Meter(), 5) == b"12345"
    with pytest.raises(Damaged, match="at most 4"):
        read_small(str(tmp_path / "f"), Meter(), 4)


def test_names_from_a_disk_become_text() -> None:
    assert shown(os.fsdecode(b"caf\xe9")) == "caf\\udce9"
    assert shown("naïve 模型") == "naïve 模型"


def test_names_from_a_file_are_escaped_and_short() -> None:
    assert quoted("a\x1b[2J") == "'a\\x1b[2J'"
    assert len(quoted("x" * 1000)) < 90
