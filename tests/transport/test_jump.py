"""Jump hosts and ProxyCommand: each hop is checked and logged in to by itself, and nothing waits without a limit."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from remote_diag import ssh_config
from remote_diag.errors import AuthError, ConfigError, HostKeyError, UnreachableError
from remote_diag.host import Host
from remote_diag.transport.base import SafeCommand
from remote_diag.transport.proxy_command import ProxyProcess
from remote_diag.transport.sockets import Deadline, Wire
from remote_diag.transport.ssh import SshTransport
from tests.support import sshd

pytestmark = pytest.mark.ssh


@pytest.fixture(scope="module")
def pair(start_sshd: Callable[..., sshd.TestSshd]) -> Iterator[tuple[sshd.TestSshd, sshd.TestSshd]]:
    """Two servers; the key of the second is not known to the first, and the other way round."""
    with start_sshd() as gate, start_sshd() as inner:
        yield gate, inner


def both_known(gate: sshd.TestSshd, inner: sshd.TestSshd, tmp_path: Path) -> Path:
    path = tmp_path / "known_hosts"
    path.write_text(gate.known_hosts.read_text() + inner.known_hosts.read_text())
    return path


@pytest.fixture
def through(pair: tuple[sshd.TestSshd, sshd.TestSshd], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    """The inner host, by way of the gate; each with its own key."""
    gate, inner = pair
    original = ssh_config.resolve

    def with_own_key(host: Host) -> ssh_config.SshSettings:
        settings = original(host)
        own = gate.identity_file if settings.port == gate.port else inner.identity_file
        return replace(settings, identity_files=(own,), identities_only=True)

    monkeypatch.setattr("remote_diag.route.resolve", with_own_key)
    return inner.host(jump=f"{gate.user}@127.0.0.1:{gate.port}", known_hosts=both_known(gate, inner, tmp_path))


def output(transport: SshTransport, command: str) -> bytes:
    channel = transport.execute(SafeCommand(command))
    channel.send_eof()
    out = b""
    while (received := channel.receive(5.0)) is not None:
        out += received[0]
    channel.close()
    return out


def test_through_a_jump_host(pair: tuple[sshd.TestSshd, sshd.TestSshd], through: Host) -> None:
    gate, inner = pair
    transport = SshTransport(through)
    transport.connect()
    assert output(transport, "pwd") == f"{inner.home}\n".encode()
    assert transport.facts.target.endswith(f":{inner.port}")
    assert any(f":{gate.port}" in note for note in transport.facts.notes)
    assert str(transport.facts.host_key_source).endswith(":2")
    assert transport.ping(5.0) < 5.0
    transport.close()
    assert gate.commands() == [], "a jump host only carries bytes"
    assert sshd.wait_until(lambda: not gate.session_pids(), 5.0), "the carrying connection ends too"


@pytest.mark.parametrize("unknown", ["gate", "inner"])
def test_each_hop_is_verified(
    pair: tuple[sshd.TestSshd, sshd.TestSshd], through: Host, tmp_path: Path, unknown: str
) -> None:
    gate, inner = pair
    known = inner if unknown == "gate" else gate
    before = len(inner.commands())
    transport = SshTransport(replace(through, known_hosts=known.known_hosts))
    with pytest.raises(HostKeyError) as caught:
        transport.connect()
    transport.close()
    assert ("jump host" in caught.value.message) == (unknown == "gate")
    assert len(inner.commands()) == before


def test_login_at_the_jump_host_fails(pair: tuple[sshd.TestSshd, sshd.TestSshd], through: Host,
                                      monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    gate, inner = pair
    original = ssh_config.resolve
    monkeypatch.setattr(
        "remote_diag.route.resolve", lambda host: replace(original(host), identity_files=(inner.identity_file,))
    )
    transport = SshTransport(through)
    with pytest.raises(AuthError, match=f"at the jump host .*:{gate.port}"):
        transport.connect()
    transport.close()


def test_jump_host_cannot_reach_the_host(through: Host) -> None:
    transport = SshTransport(replace(through, port=sshd.free_port(), host_key="SHA256:" + "A" * 43))
    started = time.monotonic()
    with pytest.raises(UnreachableError, match="the jump host cannot reach"):
        transport.connect()
    assert time.monotonic() - started < 5.0
    transport.close()


def test_jump_host_that_forbids_forwarding(
    start_sshd: Callable[..., sshd.TestSshd], pair: tuple[sshd.TestSshd, sshd.TestSshd], tmp_path: Path
) -> None:
    _, inner = pair
    with start_sshd(extra_config="AllowTcpForwarding no") as strict:
        host = inner.host(
            jump=f"{strict.user}@127.0.0.1:{strict.port}",
            identity_file=strict.identity_file,
            known_hosts=both_known(strict, inner, tmp_path),
        )
        transport = SshTransport(host)
        with pytest.raises(UnreachableError, match="AllowTcpForwarding"):
            transport.connect()
        transport.close()


def test_silence_behind_the_jump_host_ends_at_the_deadline(through: Host) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        transport = SshTransport(replace(through, port=silent.getsockname()[1], connect_timeout=1.0))
        started = time.monotonic()
        with pytest.raises(UnreachableError, match="timed out after 1 s"):
            transport.connect()
        assert time.monotonic() - started < 3.0
        transport.close()


def test_a_circle_is_refused(pair: tuple[sshd.TestSshd, sshd.TestSshd]) -> None:
    _, inner = pair
    transport = SshTransport(inner.host(jump=f"{inner.user}@127.0.0.1:{inner.port}"))
    with pytest.raises(ConfigError, match="circle"):
        transport.connect()
    transport.close()


# --- ProxyCommand ---------------------------------------------------------------------------------------------------

RELAY = """
import os, select, socket, sys
far = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
while True:
    ready, _, _ = select.select([0, far], [], [])
    if 0 in ready:
        data = os.read(0, 65536)
        if not data: break
        far.sendall(data)
    if far in ready:
        data = far.recv(65536)
        if not data: break
        os.write(1, data)
"""


def by_command(monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    original = ssh_config.resolve
    monkeypatch.setattr("remote_diag.route.resolve", lambda host: replace(original(host), proxy_command=command))


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_through_a_proxy_command(zsh_server: sshd.TestSshd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "relay.py").write_text(RELAY)
    by_command(monkeypatch, f"{sys.executable} {tmp_path}/relay.py %p 2>{tmp_path}/errors")
    transport = SshTransport(zsh_server.host())
    transport.connect()
    assert output(transport, "pwd") == f"{zsh_server.home}\n".encode()
    transport.close()
    running = subprocess.run(["pgrep", "-f", f"{tmp_path}/relay.py"], capture_output=True, text=True, check=False)
    assert running.stdout == "", "ended and reaped"


def test_proxy_command_that_fails_is_quoted(zsh_server: sshd.TestSshd, monkeypatch: pytest.MonkeyPatch) -> None:
    by_command(monkeypatch, "sh -c 'echo no way to %h >&2; exit 3'")
    transport = SshTransport(zsh_server.host())
    with pytest.raises(UnreachableError) as caught:
        transport.connect()
    transport.close()
    assert caught.value.details == ("ProxyCommand: no way to 127.0.0.1",)


def test_proxy_command_that_is_silent(zsh_server: sshd.TestSshd, monkeypatch: pytest.MonkeyPatch) -> None:
    by_command(monkeypatch, "sleep 30")
    transport = SshTransport(zsh_server.host(connect_timeout=0.7))
    with pytest.raises(UnreachableError, match=r"timed out after 0.7 s"):
        transport.connect()
    transport.close()


def test_proxy_process_reports_its_end_and_is_reaped() -> None:
    process = ProxyProcess("printf hello")
    process.settimeout(5.0)
    assert process.recv(100) == b"hello"
    assert process.recv(100) == b""
    process.close()
    process.close()
    assert not alive(process.pid)


def test_proxy_process_that_ignores_the_end_is_killed() -> None:
    process = ProxyProcess("sh -c 'trap \"\" TERM HUP; while :; do sleep 1; done'")
    started = time.monotonic()
    process.close()
    assert time.monotonic() - started < 2.0
    assert not alive(process.pid)


def test_wire_over_a_proxy_process_times_out() -> None:
    wire = Wire(ProxyProcess("cat"))
    wire.settimeout(0.1)
    with pytest.raises(TimeoutError):
        wire.recv(1)
    with pytest.raises(TimeoutError):
        # It echoes our own identification, which is no server's; then there is silence.
        Wire(ProxyProcess("sleep 5")).exchange_identification(Deadline(0.2))
    wire.close()
