"""The server's key is checked before anything is sent to it; fabric as shipped accepts any."""

from __future__ import annotations

import base64
import hashlib
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from remote_diag.errors import HostKeyError
from remote_diag.exitcodes import ExitCode
from remote_diag.host import Host
from remote_diag.transport.ssh import SshTransport
from tests.support import sshd
from tests.support.proxy import Proxy

pytestmark = pytest.mark.ssh

# What a client says up to the end of the key exchange, in bytes: identification, KEXINIT, ECDH_INIT, NEWKEYS.
# One more message (the smallest is 36 bytes) would be beyond it.
SERVICE_REQUEST = 36


def refused(host: Host) -> HostKeyError:
    transport = SshTransport(host)
    with pytest.raises(HostKeyError) as caught:
        transport.connect()
    transport.close()
    assert caught.value.exit_code == ExitCode.HOST_KEY
    assert caught.value.phase == "host-key"
    assert caught.value.host == host.name
    assert transport.facts.auth_method is None
    return caught.value


def bytes_of_a_bare_key_exchange(server: sshd.TestSshd) -> int:
    """Return what a client sends that stops after the key exchange: a login, less its authentication."""
    sent: list[int] = []
    with Proxy(server.port) as proxy:
        transport = SshTransport(server.host(port=proxy.port, known_hosts=None, host_key=pin(server)))

        def look(*_: object) -> str:
            # The key exchange is done: all that belongs to it has been sent, and nothing that comes after it.
            sshd.wait_until(lambda: settled(proxy), 2.0)
            sent.append(proxy.from_client)
            raise HostKeyError("stop here")

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("remote_diag.known_hosts.HostKeyVerifier.verify", look)
            with pytest.raises(HostKeyError):
                transport.connect()
        transport.close()
    return sent[0]


def settled(proxy: Proxy) -> bool:
    before = proxy.from_client
    time.sleep(0.1)
    return proxy.from_client == before


def pin(server: sshd.TestSshd) -> str:
    return " ".join(server.host_key())


def test_a_swapped_key_is_refused_and_nothing_is_sent(start_sshd: Callable[..., sshd.TestSshd]) -> None:
    with start_sshd() as server:
        old = server.host_key()
        expected = bytes_of_a_bare_key_exchange(server)
        server.new_host_keys()
        new = server.host_key()
        assert old != new
        with Proxy(server.port) as proxy:
            server.known_hosts.write_text(f"[127.0.0.1]:{proxy.port} {old[0]} {old[1]}\n")
            error = refused(server.host(port=proxy.port))
            assert sshd.wait_until(lambda: settled(proxy), 5.0)
            assert proxy.connections == 1
            assert proxy.from_client <= expected < proxy.from_client + SERVICE_REQUEST
        assert "SHA256:" in f"{error.message} {error.hint} {error.details}"
        assert f"{server.known_hosts}:1" in f"{error.message} {error.hint} {error.details}"
        assert server.commands() == []
        assert "Accepted" not in server.log().split("Server listening")[-1]
        assert "userauth" not in server.log().split("Server listening")[-1]


def test_fabric_alone_would_have_accepted_it(start_sshd: Callable[..., sshd.TestSshd]) -> None:
    """The reason for all this; should it fail, fabric has learnt to check keys."""
    import fabric

    with start_sshd() as server:
        connection = fabric.Connection(
            "127.0.0.1", user=server.user, port=server.port, connect_kwargs={"key_filename": str(server.identity_file)}
        )
        connection.open()
        assert connection.is_connected
        connection.close()


def test_unknown_key(start_sshd: Callable[..., sshd.TestSshd], tmp_path: Path) -> None:
    empty = tmp_path / "known_hosts"
    empty.write_text("")
    with start_sshd() as server:
        error = refused(server.host(known_hosts=empty))
        digest = hashlib.sha256(base64.b64decode(server.host_key()[1])).digest()
        assert base64.b64encode(digest).decode().rstrip("=") in f"{error.message} {error.hint} {error.details}"
        assert server.commands() == []
        assert empty.read_text() == "", "nothing is recorded by itself"


def test_revoked_key(start_sshd: Callable[..., sshd.TestSshd]) -> None:
    with start_sshd() as server:
        kind, key = server.host_key()
        server.known_hosts.write_text(
            f"[127.0.0.1]:{server.port} {kind} {key}\n@revoked * {kind} {key}\n"
        )
        error = refused(server.host())
        assert "revoked" in error.message.lower()
        assert server.commands() == []


def test_a_check_that_fails_refuses(start_sshd: Callable[..., sshd.TestSshd], monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> str:
        raise MemoryError

    monkeypatch.setattr("remote_diag.known_hosts.HostKeyVerifier._verify", broken)
    with start_sshd() as server:
        refused(server.host())
        assert server.commands() == []


@pytest.mark.parametrize("known", ["rsa", "ecdsa", "ed25519"])
def test_the_known_type_is_negotiated(start_sshd: Callable[..., sshd.TestSshd], known: str) -> None:
    with start_sshd(host_key_types=("ed25519", "ecdsa", "rsa")) as server:
        kind, key = server.host_key(known)
        server.known_hosts.write_text(f"[127.0.0.1]:{server.port} {kind} {key}\n")
        transport = SshTransport(server.host())
        transport.connect()
        assert transport.facts.host_key_type == kind
        assert transport.facts.host_key_source == f"{server.known_hosts}:1"
        transport.close()


def test_any_of_several_keys_of_one_type(start_sshd: Callable[..., sshd.TestSshd]) -> None:
    with start_sshd() as server:
        other = "AAAAC3NzaC1lZDI1NTE5AAAAI" + "A" * 43
        kind, key = server.host_key()
        place = f"[127.0.0.1]:{server.port}"
        server.known_hosts.write_text(f"{place} {kind} {other}\n{place} {kind} {key}\n")
        transport = SshTransport(server.host())
        transport.connect()
        assert transport.facts.host_key_source == f"{server.known_hosts}:2"
        transport.close()


def test_strict_key_exchange_is_on(zsh_server: sshd.TestSshd) -> None:
    transport = SshTransport(zsh_server.host())
    transport.connect()
    inner = transport._transport
    assert inner.agreed_on_strict_kex
    assert inner.local_cipher == "aes128-gcm@openssh.com"
    assert inner.preferred_kex[:2] == ("ecdh-sha2-nistp256", "curve25519-sha256@libssh.org")
    assert not [name for name in (*inner.preferred_ciphers, *inner.preferred_macs) if "cbc" in name or "md5" in name]
    transport.close()


def test_weak_algorithms_are_not_offered(start_sshd: Callable[..., sshd.TestSshd]) -> None:
    from remote_diag.errors import UnreachableError

    with start_sshd(extra_config="Ciphers aes128-cbc") as server:
        transport = SshTransport(server.host())
        with pytest.raises(UnreachableError, match="no encryption algorithm in common"):
            transport.connect()
        transport.close()
