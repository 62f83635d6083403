from __future__ import annotations

import os
from pathlib import Path

import pytest

from remote_diag.errors import ConfigError
from remote_diag.files import MAX_BYTES, read_file


def test_a_fifo_is_not_even_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "fifo"
    os.mkfifo(path)
    monkeypatch.setattr(os, "open", lambda *_, **__: pytest.fail("opened"))
    with pytest.raises(ConfigError, match="a pipe, a socket or a device"):
        read_file(path)


def test_a_file_that_becomes_a_fifo_does_not_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "fifo"
    os.mkfifo(path)
    regular = Path(__file__).stat()
    monkeypatch.setattr(os, "stat", lambda *_, **__: regular)
    with pytest.raises(ConfigError, match="a pipe, a socket or a device"):
        read_file(path)


def test_what_is_no_readable_file_is_explained(tmp_path: Path) -> None:
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    for path, reason in (
        (tmp_path, "is a folder"),
        (tmp_path / "missing", "there is no such file"),
        (loop, "cannot be read: Too many levels of symbolic links"),
        (Path("a\0b"), "cannot be read"),
        (Path("/dev/zero"), "a pipe, a socket or a device"),
    ):
        with pytest.raises(ConfigError, match=reason) as caught:
            read_file(path)
        assert caught.value.hint


def test_a_large_file_is_refused_before_it_is_read_in_full(tmp_path: Path) -> None:
    path = tmp_path / "large"
    with path.open("wb") as stream:
        stream.truncate(100 * 1024 * 1024)
    with pytest.raises(ConfigError, match=f"larger than {MAX_BYTES} bytes"):
        read_file(path)
    with path.open("wb") as stream:
        stream.truncate(MAX_BYTES)
    assert len(read_file(path)) == MAX_BYTES
