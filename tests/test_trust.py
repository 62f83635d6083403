"""``rdiag trust``: looking at a key, recording it, and never more than that."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import pty
import re
import select
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remote_diag import known_hosts, trust
from remote_diag.errors import (
    AuthError,
    ConfigError,
    HostKeyError,
    LocalIOError,
    UnreachableError,
    UsageProblem,
)
from remote_diag.host import Host
from remote_diag.known_hosts import ChangedHostKey, HostKeyVerifier, UnknownHostKey, fingerprint, look_up
from remote_diag.ssh_config import SshSettings
from remote_diag.trust import ScannedKey, known_hosts_line, record, scan

from .support import cli
from .support.home import make_private_home
from .support.sshd import TestSshd, free_port
from .test_known_hosts import ED, OTHER, RSA, text

HOST = Host("gpu8", address="h.example")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    make_private_home(monkeypatch, tmp_path)
    return tmp_path / "home"


@pytest.fixture
def own(home: Path) -> Path:
    """Rdiag's own file; it does not exist at first."""
    return home / "config" / "rdiag" / "known_hosts"


def scanned(blob: bytes = ED, *, name: str = "h.example", port: int = 22, files: tuple[Path, ...] = ()) -> ScannedKey:
    settings = SshSettings(name, name, port, "root", user_known_hosts=files)
    return ScannedKey(
        HOST, settings, known_hosts.blob_type(blob), blob, jump_host=False, source=None, refusal=None
    )


class TestRecord:
    def test_file_and_folder_are_private_whatever_the_umask(self, own: Path) -> None:
        before = os.umask(0)
        try:
            assert record(scanned()) == f"{own}:1"
        finally:
            os.umask(before)
        assert own.stat().st_mode & 0o777 == 0o600
        assert own.parent.stat().st_mode & 0o777 == 0o700

    @pytest.mark.parametrize(
        ("name", "port", "written"),
        [
            ("h.example", 22, "h.example"),
            ("H.Example", 22, "h.example"),
            ("h.example", 2222, "[h.example]:2222"),
            ("::1", 22, "::1"),
            ("fe80::1%eth0", 2222, "[fe80::1%eth0]:2222"),
        ],
    )
    def test_line(self, own: Path, name: str, port: int, written: str) -> None:
        record(scanned(name=name, port=port))
        assert own.read_text().startswith(f"{written} {text(ED)} rdiag-trust-")
        settings = scanned(name=name, port=port).settings
        assert HostKeyVerifier(HOST, settings).verify("ssh-ed25519", ED) == f"{own}:1"

    @given(name=st.from_regex(r"[A-Za-z0-9._:%+][A-Za-z0-9._:%+-]{0,40}", fullmatch=True), port=st.integers(1, 65535))
    def test_what_is_written_is_found(self, tmp_path_factory: pytest.TempPathFactory, name: str, port: int) -> None:
        key = scanned(name=name, port=port)
        file = tmp_path_factory.getbasetemp() / "written"
        file.write_bytes(b"# first\n" + known_hosts_line(key))
        (entry,) = look_up([file], [key.name]).entries
        assert (entry.blob, entry.number, entry.line.marker) == (ED, 2, "")
        assert not look_up([file], ["x" + key.name]).entries

    @pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="ssh-keygen is not installed")
    def test_ssh_keygen_finds_it(self, own: Path) -> None:
        record(scanned(port=2222))
        found = subprocess.run(["ssh-keygen", "-F", "[h.example]:2222", "-f", str(own)], capture_output=True, text=True)
        assert "found: line 1" in found.stdout

    @pytest.mark.parametrize("alias", ["*", "a,b", "!a", "a b", "a\nb", "|1|x", "@revoked", "#a", "", "h?"])
    def test_alias_that_would_mean_something_else(self, own: Path, alias: str) -> None:
        key = scanned()
        with pytest.raises(ConfigError, match="cannot be recorded"):
            record(replace(key, settings=replace(key.settings, host_key_alias=alias)))
        assert not own.exists()

    def test_no_duplicates(self, own: Path) -> None:
        assert record(scanned()) == record(scanned()) == f"{own}:1"
        assert own.read_text().count("\n") == 1

    def test_key_that_ssh_knows_is_not_written(self, own: Path, tmp_path: Path) -> None:
        file = tmp_path / "known"
        file.write_text(f"h.example {text(ED)}\n")
        assert record(scanned(files=(file,))) == f"{file}:1"
        assert own.read_text() == ""

    def test_appends_after_what_is_there(self, own: Path) -> None:
        own.parent.mkdir()
        own.write_bytes(b"# mine, caf\xe9\nother.example " + text(OTHER).encode())
        own.chmod(0o600)
        assert record(scanned()) == f"{own}:3"
        assert own.read_bytes().startswith(b"# mine, caf\xe9\nother.example " + text(OTHER).encode() + b"\nh.example ")

    @pytest.mark.parametrize("replace_it", [False, True])
    def test_revoked_key_is_never_recorded(self, own: Path, tmp_path: Path, replace_it: bool) -> None:
        file = tmp_path / "known"
        file.write_text(f"@revoked * {text(ED)}\n")
        with pytest.raises(HostKeyError, match="revoked"):
            record(scanned(files=(file,)), replace=replace_it)
        assert own.read_text() == ""

    def test_other_key_needs_replace(self, own: Path) -> None:
        record(scanned(OTHER))
        before = own.read_bytes()
        with pytest.raises(ChangedHostKey):
            record(scanned())
        assert own.read_bytes() == before

    def test_replace_removes_the_host_s_other_keys_and_nothing_else(self, own: Path) -> None:
        own.parent.mkdir()
        own.write_bytes(
            b"# caf\xe9\r\njunk\n" + f"h.example {text(OTHER)}\n[h.example]:2222 {text(OTHER)}\n"
            f"h.example {text(RSA)}\n@revoked h.example {text(RSA)}\nother {text(OTHER)}".encode()
        )
        own.chmod(0o600)
        inode = own.stat().st_ino
        assert record(scanned(), replace=True) == f"{own}:6"
        lines = own.read_bytes().split(b"\n")
        assert lines[:2] == [b"# caf\xe9\r", b"junk"]
        assert lines[2:5] == [
            line.encode()
            for line in (f"[h.example]:2222 {text(OTHER)}", f"@revoked h.example {text(RSA)}", f"other {text(OTHER)}")
        ]
        assert lines[5].startswith(f"h.example {text(ED)} ".encode())
        assert own.stat().st_ino != inode
        assert own.stat().st_mode & 0o777 == 0o600
        assert [path.name for path in own.parent.iterdir()] == ["known_hosts"]

    def test_replace_never_touches_ssh_s_file(self, own: Path, tmp_path: Path) -> None:
        file = tmp_path / "known"
        file.write_text(f"h.example {text(OTHER)}\n")
        with pytest.raises(ChangedHostKey, match="changed"):
            record(scanned(files=(file,)), replace=True)
        assert file.read_text() == f"h.example {text(OTHER)}\n"
        assert own.read_text() == ""

    @pytest.mark.parametrize("hosts", ["h.example,other", "*.example"])
    def test_replace_leaves_a_line_for_several_hosts_to_a_person(self, own: Path, hosts: str) -> None:
        own.parent.mkdir()
        own.write_text(f"{hosts} {text(OTHER)}\n")
        own.chmod(0o600)
        with pytest.raises(LocalIOError, match="other hosts too"):
            record(scanned(), replace=True)
        assert own.read_text() == f"{hosts} {text(OTHER)}\n"

    def test_symbolic_link_is_refused(self, own: Path, tmp_path: Path) -> None:
        victim = tmp_path / "victim"
        own.parent.mkdir()
        for exists in (False, True):
            if exists:
                victim.write_text("")
            own.unlink(missing_ok=True)
            own.symlink_to(victim)
            with pytest.raises(LocalIOError, match="symbolic link"):
                record(scanned())
        assert victim.read_text() == ""

    @pytest.mark.parametrize("kind", ["pipe", "folder"])
    def test_what_is_no_file_is_refused(self, own: Path, kind: str) -> None:
        own.parent.mkdir()
        if kind == "pipe":
            os.mkfifo(own)
        else:
            own.mkdir()
        with pytest.raises(LocalIOError):
            record(scanned())

    @pytest.mark.parametrize("which", ["file", "folder"])
    def test_what_others_may_write_is_refused(self, own: Path, which: str) -> None:
        own.parent.mkdir(mode=0o700)
        own.touch(mode=0o600)
        (own if which == "file" else own.parent).chmod(0o777)
        with pytest.raises(LocalIOError, match="others may write"):
            record(scanned())

    @pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
    def test_what_belongs_to_another_is_refused(self, own: Path) -> None:
        own.parent.mkdir(mode=0o700)
        own.touch(mode=0o600)
        os.chown(own, 12345, 12345)
        with pytest.raises(LocalIOError, match="another user"):
            record(scanned())

    def test_full_disk_leaves_no_half_line(self, own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        record(scanned(OTHER, name="other.example"))
        before = own.read_bytes()
        write = os.write
        monkeypatch.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:10]))
        with pytest.raises(LocalIOError, match="no space"):
            record(scanned())
        assert own.read_bytes() == before

    def test_lock_is_waited_for_and_not_for_ever(self, own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(trust, "LOCK_SECONDS", 0.1)
        own.parent.mkdir()
        with own.open("w") as holder:
            own.chmod(0o600)
            fcntl.flock(holder, fcntl.LOCK_EX)
            with pytest.raises(LocalIOError, match="locked"):
                record(scanned())
        assert record(scanned())

    def test_many_at_once_lose_nothing(self, own: Path) -> None:
        names = [f"h{number}.example" for number in range(12)] * 2
        record(scanned(OTHER, name="changing.example"))
        jobs = [threading.Thread(target=record, args=(scanned(name=name),)) for name in names]
        jobs.append(threading.Thread(target=record, args=(scanned(name="changing.example"),), kwargs={"replace": True}))
        for job in jobs:
            job.start()
        for job in jobs:
            job.join(20)
        lines = own.read_text().splitlines()
        assert sorted(line.split()[0] for line in lines) == sorted({*names, "changing.example"})
        assert all(text(ED) in line for line in lines)


# --- With a real server ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server() -> Iterator[TestSshd]:
    with TestSshd(host_key_types=("ed25519", "rsa")) as sshd:
        yield sshd


def blob(server: TestSshd, kind: str = "ed25519") -> bytes:
    return base64.b64decode(server.host_key(kind)[1])


@pytest.fixture
def stranger(server: TestSshd, tmp_path: Path) -> Host:
    """The server, known by no file."""
    return server.host(known_hosts=tmp_path / "none")


class TestScan:
    def test_unknown_key_is_seen_and_nothing_is_sent(self, server: TestSshd, stranger: Host) -> None:
        accepted = server.log().count("Accepted")
        key = scan(stranger)
        assert (key.key_type, key.blob, key.jump_host, key.source) == ("ssh-ed25519", blob(server), False, None)
        assert isinstance(key.refusal, UnknownHostKey)
        assert key.name == f"[127.0.0.1]:{server.port}"
        assert server.log().count("Accepted") == accepted

    def test_known_key_is_known_and_still_nobody_logs_in(self, server: TestSshd) -> None:
        accepted = server.log().count("Accepted")
        key = scan(server.host())
        assert (key.refusal, key.source) == (None, f"{server.known_hosts}:1")
        assert server.log().count("Accepted") == accepted

    def test_type_of_the_known_key_is_asked_for(self, server: TestSshd, stranger: Host) -> None:
        assert stranger.known_hosts is not None
        stranger.known_hosts.write_text(f"[127.0.0.1]:{server.port} {text(blob(server, 'rsa'))}\n")
        key = scan(stranger)
        assert (key.key_type, key.refusal) == ("ssh-rsa", None)

    def test_changed_key(self, server: TestSshd, stranger: Host) -> None:
        assert stranger.known_hosts is not None
        stranger.known_hosts.write_text(f"[127.0.0.1]:{server.port} {text(OTHER)}\n")
        key = scan(stranger)
        assert isinstance(key.refusal, ChangedHostKey)
        assert fingerprint(OTHER) in key.refusal.message

    def test_pinned_key(self, server: TestSshd, stranger: Host) -> None:
        assert scan(replace(stranger, host_key=fingerprint(blob(server)))).source == "hosts.yaml"
        refusal = scan(replace(stranger, host_key=fingerprint(OTHER))).refusal
        assert refusal is not None
        assert "pins" in refusal.message

    def test_nobody_there(self) -> None:
        with pytest.raises(UnreachableError):
            scan(Host("gone", address="127.0.0.1", port=free_port(), user="root", connect_timeout=5))

    def test_this_machine(self) -> None:
        with pytest.raises(UsageProblem, match="this machine"):
            scan(Host("local", transport="local"))

    def test_recorded_key_lets_the_connection_through(self, stranger: Host) -> None:
        from remote_diag.transport.ssh import SshTransport

        transport = SshTransport(stranger)
        with pytest.raises(UnknownHostKey):
            transport.connect()
        where = record(scan(stranger))
        transport = SshTransport(stranger)
        try:
            transport.connect()
            assert transport.facts.host_key_source == where
        finally:
            transport.close()


class TestJumpHosts:
    @pytest.fixture(scope="class")
    @classmethod
    def bastion(cls) -> Iterator[TestSshd]:
        with TestSshd() as sshd:
            yield sshd

    @pytest.fixture
    def behind(self, server: TestSshd, bastion: TestSshd, stranger: Host) -> Host:
        """The server behind the bastion; both are strangers, and the key of the bastion's user opens both."""
        shutil.copy(server.identity_file.with_suffix(".pub"), bastion.known_hosts.parent / "authorized_keys")
        return replace(stranger, jump=f"{bastion.user}@127.0.0.1:{bastion.port}")

    def test_one_key_after_the_other(self, server: TestSshd, bastion: TestSshd, behind: Host) -> None:
        first = scan(behind)
        assert (first.jump_host, first.blob) == (True, blob(bastion))
        assert isinstance(first.refusal, UnknownHostKey)
        record(first)
        second = scan(behind)
        assert (second.jump_host, second.blob) == (False, blob(server))
        record(second)
        assert scan(behind).refusal is None

    def test_pinned_key_says_nothing_about_the_jump_host(self, server: TestSshd, behind: Host) -> None:
        pinned = replace(behind, host_key=fingerprint(blob(server)))
        record(scan(pinned))
        assert scan(pinned).source == "hosts.yaml"

    def test_jump_host_that_refuses_the_login(self, bastion: TestSshd, behind: Host) -> None:
        record(scan(behind))
        (bastion.known_hosts.parent / "authorized_keys").write_text("")
        with pytest.raises(AuthError) as caught:
            scan(behind)
        assert f"at the jump host {bastion.user}@127.0.0.1:{bastion.port}" in caught.value.message


# --- The command ----------------------------------------------------------------------------------------------------


@pytest.fixture
def inventory(stranger: Host, home: Path) -> Path:
    path = home / "hosts.yaml"
    path.write_text(
        f"hosts:\n  local: {{transport: local}}\n  testhost:\n    address: 127.0.0.1\n    user: {stranger.user}\n"
        f"    port: {stranger.port}\n    identity_file: {stranger.identity_file}\n    known_hosts: {stranger.known_hosts}\n"
    )
    return path


@pytest.fixture
def call(inventory: Path, home: Path) -> Any:
    return lambda *arguments: cli.rdiag("trust", *arguments, "-i", str(inventory), home=home)


class TestCommand:
    def test_without_a_terminal_nobody_is_asked_and_nothing_happens(self, call: Any, own: Path) -> None:
        ran = call("testhost")
        assert ran.code == 2
        assert "--fingerprint" in ran.err
        assert not own.exists()

    def test_expected_fingerprint(self, call: Any, own: Path, server: TestSshd) -> None:
        ran = call("testhost", "--fingerprint", fingerprint(blob(server)))
        assert (ran.code, ran.err) == (0, "")
        assert fingerprint(blob(server)) in ran.out
        assert f"Recorded in {own}:1" in ran.out
        assert text(blob(server)) in own.read_text()

    def test_other_fingerprint(self, call: Any, own: Path, server: TestSshd) -> None:
        ran = call("testhost", "--yes", "--fingerprint", fingerprint(OTHER))
        assert ran.code == 6
        assert fingerprint(blob(server)) in ran.err
        assert not own.exists()

    @pytest.mark.parametrize("value", ["SHA256:short", "MD5:aa:bb", "", "x" * 50])
    def test_nonsense_fingerprint(self, call: Any, value: str) -> None:
        assert call("testhost", "--fingerprint", value).code == 2

    def test_yes_records_and_says_so_as_json(self, call: Any, own: Path, server: TestSshd) -> None:
        ran = call("testhost", "--yes", "--json")
        assert ran.code == 0
        (key,) = ran.json["keys"]
        assert (ran.json["schema_version"], ran.json["host"]) == (1, "testhost")
        assert (key["status"], key["source"]) == ("recorded", f"{own}:1")
        assert (key["fingerprint"], key["key_type"]) == (fingerprint(blob(server)), "ssh-ed25519")
        again = call("testhost", "--yes", "--json")
        assert again.json["keys"][0]["status"] == "known"
        assert own.read_text().count("\n") == 1

    def test_json_without_a_decision(self, call: Any) -> None:
        ran = call("testhost", "--json")
        assert ran.code == 2
        assert ran.json["error"]["code"] == "USAGE"

    def test_changed_in_the_own_file(self, call: Any, own: Path, server: TestSshd) -> None:
        own.parent.mkdir(mode=0o700)
        own.write_text(f"[127.0.0.1]:{server.port} {text(OTHER)}\n")
        own.chmod(0o600)
        refused = call("testhost", "--yes")
        assert refused.code == 6
        assert "--replace" in refused.err
        assert fingerprint(OTHER) in refused.err
        assert call("testhost", "--yes", "--replace").code == 0
        assert text(OTHER) not in own.read_text()
        assert text(blob(server)) in own.read_text()

    def test_changed_in_ssh_s_file(self, call: Any, own: Path, stranger: Host, server: TestSshd) -> None:
        assert stranger.known_hosts is not None
        stranger.known_hosts.write_text(f"[127.0.0.1]:{server.port} {text(OTHER)}\n")
        ran = call("testhost", "--yes", "--replace")
        assert ran.code == 6
        assert f"ssh-keygen -R '[127.0.0.1]:{server.port}' -f {stranger.known_hosts}" in ran.err
        assert not own.exists()

    def test_revoked(self, call: Any, own: Path, stranger: Host, server: TestSshd) -> None:
        assert stranger.known_hosts is not None
        stranger.known_hosts.write_text(f"@revoked * {text(blob(server))}\n")
        ran = call("testhost", "--yes", "--replace")
        assert ran.code == 6
        assert "revoked" in ran.err
        assert not own.exists()

    def test_skipped_lines_are_said(self, call: Any, stranger: Host) -> None:
        assert stranger.known_hosts is not None
        stranger.known_hosts.write_text("junk\n")
        ran = call("testhost", "--yes")
        assert ran.code == 0
        assert f"{stranger.known_hosts}:1: line skipped" in ran.err

    def test_this_machine_and_unknown_names(self, call: Any) -> None:
        assert call("local", "--yes").code == 2
        assert call("nobody", "--yes").code == 3

    @pytest.mark.parametrize(("typed", "code"), [(b"y\n", 0), (b"yes\n", 0), (b"\n", 6), (b"n\n", 6), (b"\x03", 130)])
    def test_question_on_a_terminal(self, inventory: Path, home: Path, own: Path, typed: bytes, code: int) -> None:
        ran, shown = on_a_terminal(["trust", "testhost", "-i", str(inventory)], home, typed)
        assert ran == code, shown
        assert "SHA256:" in shown
        assert "[y/N]" in shown
        assert own.exists() == (code == 0)


def on_a_terminal(arguments: list[str], home: Path, typed: bytes) -> tuple[int, str]:
    """Run rdiag on a pseudo-terminal, type when it asks, and return its exit status and what it showed."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(home)
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # whatever the test runner inherited
        command = cli.command(*arguments)
        os.execve(command[0], command, cli.environment(home))  # noqa: S606
    shown = b""
    asked = False
    deadline = time.monotonic() + 30
    try:
        while time.monotonic() < deadline:
            if not select.select([terminal], [], [], 0.5)[0]:
                if asked and typed == b"\x03":
                    # A signal that arrives just before the read begins does not interrupt it; a person repeats it.
                    os.write(terminal, typed)
                continue
            try:
                data = os.read(terminal, 4096)
            except OSError:
                break
            if not data:
                break
            shown += data
            if not asked and re.search(rb"\[y/N\]: ?$", shown):
                asked = True
                os.write(terminal, typed)
    finally:
        os.close(terminal)
        _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status), shown.decode(errors="replace")


def test_json_is_an_object_of_plain_values() -> None:
    from remote_diag.cli.trust import _outcome

    assert json.loads(json.dumps(_outcome(scanned(), "known", "file:1")))["name"] == "h.example"
