"""Uploads over SFTP that the host refuses, and servers that are odd."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from remote_diag.errors import EnvironmentUnfit
from remote_diag.exitcodes import ExitCode
from remote_diag.transport.base import SafeCommand, SafePath, UploadUnavailable
from remote_diag.transport.ssh import SshTransport
from tests.support import sshd

pytestmark = pytest.mark.ssh


@contextmanager
def connected(server: sshd.TestSshd) -> Iterator[SshTransport]:
    transport = SshTransport(server.host())
    transport.connect()
    yield transport
    # Whatever went wrong with the file, the connection is as good as before.
    channel = transport.execute(SafeCommand("true"))
    channel.send_eof()
    assert channel.exit_status(5.0) == 0
    transport.close()


def refused(server: sshd.TestSshd, path: str, data: bytes = b"data") -> EnvironmentUnfit:
    with connected(server) as transport, pytest.raises(EnvironmentUnfit) as caught:
        transport.upload(data, SafePath(path))
    assert caught.value.exit_code == ExitCode.ENVIRONMENT
    assert caught.value.phase == "upload"
    assert path in caught.value.message
    assert "cache_dir" in str(caught.value.hint)
    return caught.value


def test_a_file_in_the_way(zsh_server: sshd.TestSshd) -> None:
    (zsh_server.home / "in-the-way").write_text("")
    refused(zsh_server, "in-the-way/file")
    (zsh_server.home / "in-the-way").unlink()


def test_a_directory_at_the_target_stays(zsh_server: sshd.TestSshd) -> None:
    (zsh_server.home / "occupied" / "by").mkdir(parents=True)
    refused(zsh_server, "occupied")
    assert [one.name for one in zsh_server.home.glob("occupied*")] == ["occupied"], "no temporary file is left"
    assert (zsh_server.home / "occupied" / "by").is_dir()
    shutil.rmtree(zsh_server.home / "occupied")


def test_no_permission(start_sshd: Callable[..., sshd.TestSshd]) -> None:
    with start_sshd(sftp=f"{sshd.sftp_server()} -R") as server:
        assert "permission denied" in refused(server, "folder/file").message
        assert "permission denied" in refused(server, "file").message
        assert list(server.home.iterdir()) == []


@pytest.mark.parametrize("options", ["size=64k", "size=1m,nr_inodes=1"], ids=["bytes", "inodes"])
def test_no_space(start_sshd: Callable[..., sshd.TestSshd], options: str) -> None:
    with start_sshd() as server:
        small = server.home / "small"
        small.mkdir()
        mounted = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", options, "tmpfs", small], capture_output=True, text=True, check=False
        )
        if mounted.returncode != 0:
            pytest.skip(f"a small file system cannot be mounted here: {mounted.stderr.strip()}")
        try:
            error = refused(server, "small/file", bytes(1_000_000))
            assert "space" in error.message
            assert list(small.iterdir()) == [], "the temporary file is removed"
        finally:
            subprocess.run(["umount", small], check=True)


def test_server_that_dies_in_the_middle(start_sshd: Callable[..., sshd.TestSshd]) -> None:
    # A limit on the size of files kills it with SIGXFSZ.
    with start_sshd(sftp=f"sh -c 'ulimit -f 100; exec {sshd.sftp_server()}'") as server, connected(server) as transport:
        with pytest.raises((UploadUnavailable, EnvironmentUnfit)):
            transport.upload(bytes(1_000_000), SafePath("file"))
        assert not (server.home / "file").exists()


@pytest.mark.parametrize("command", ["/bin/false", "/bin/cat", "sh -c 'echo hi; sleep 5'", "head -c 1000000 /dev/zero"])
def test_no_sftp_server_at_all(
    start_sshd: Callable[..., sshd.TestSshd], command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("remote_diag.transport.upload.REPLY_TIMEOUT", 1.0)
    with start_sshd(sftp=command) as server, connected(server) as transport, pytest.raises(UploadUnavailable):
        transport.upload(b"data", SafePath("file"))


def test_silent_sftp_server(start_sshd: Callable[..., sshd.TestSshd], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("remote_diag.transport.upload.REPLY_TIMEOUT", 0.5)
    with start_sshd(sftp="sleep 20") as server, connected(server) as transport, pytest.raises(UploadUnavailable):
        transport.upload(b"data", SafePath("file"))


PLAIN_SERVER = """
# Passes everything on to OpenSSH's server, but for posix-rename, as if it were a server that has no such extension.
import os, struct, subprocess, sys, threading
inner = subprocess.Popen([sys.argv[1]], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
lock = threading.Lock()
def packets(read):
    while head := read(4):
        yield head, read(struct.unpack(">I", head)[0])
def back():
    for head, body in packets(inner.stdout.read):
        with lock:
            sys.stdout.buffer.write(head + body); sys.stdout.buffer.flush()
threading.Thread(target=back, daemon=True).start()
for head, body in packets(sys.stdin.buffer.read):
    if body[0] == 200 and b"posix-rename" in body:
        text = b"Operation unsupported"
        answer = b"e" + body[1:5] + struct.pack(">II", 8, len(text)) + text + struct.pack(">I", 0)
        with lock:
            sys.stdout.buffer.write(struct.pack(">I", len(answer)) + answer); sys.stdout.buffer.flush()
    else:
        inner.stdin.write(head + body); inner.stdin.flush()
"""


def test_server_without_the_rename_that_replaces(start_sshd: Callable[..., sshd.TestSshd], tmp_path: Path) -> None:
    (tmp_path / "plain.py").write_text(PLAIN_SERVER)
    with start_sshd(sftp=f"{sys.executable} {tmp_path}/plain.py {sshd.sftp_server()}") as server:
        with connected(server) as transport:
            for data in (b"first", b"second"):
                transport.upload(data, SafePath("file"))
                assert (server.home / "file").read_bytes() == data
        assert os.listdir(server.home) == ["file"]


def test_strict_umask(start_sshd: Callable[..., sshd.TestSshd]) -> None:
    with start_sshd(sftp=f"{sshd.sftp_server()} -u 0000") as server, connected(server) as transport:
        transport.upload(b"data", SafePath("a/b"))
        assert (server.home / "a").stat().st_mode & 0o777 == 0o700
        assert (server.home / "a/b").stat().st_mode & 0o777 == 0o600
