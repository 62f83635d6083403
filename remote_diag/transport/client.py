"""fabric's Connection, made strict: our socket, our algorithms, our host-key check, our authentication.

fabric as shipped accepts any host key and reads the user's ``~/.fabric.yaml`` and ``~/.ssh/config``; a connection
that is made here does none of it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from .libraries import fabric, paramiko
from .sockets import IDENTIFICATION, Wire

if TYPE_CHECKING:
    from ..ssh_config import SshSettings

KEX = (
    # Cheapest first: 9 ms, 11 ms, ... between paramiko and OpenSSH on loopback; the finite-field groups cost 30 to 80.
    "ecdh-sha2-nistp256",
    "curve25519-sha256@libssh.org",
    "ecdh-sha2-nistp384",
    "ecdh-sha2-nistp521",
    "mlkem768x25519-sha256",
    "diffie-hellman-group14-sha256",
    "diffie-hellman-group16-sha512",
    "diffie-hellman-group-exchange-sha256",
)
CIPHERS = ("aes128-gcm@openssh.com", "aes256-gcm@openssh.com", "aes128-ctr", "aes192-ctr", "aes256-ctr")
WINDOW = 4 * 1024 * 1024
"""Bytes that a server may send ahead of what was read, on each channel: enough for half a Gbit/s at 60 ms."""
MACS = ("hmac-sha2-256-etm@openssh.com", "hmac-sha2-512-etm@openssh.com", "hmac-sha2-256", "hmac-sha2-512", "hmac-sha1")


class Authentication(Protocol):
    """What paramiko calls once the host key was accepted."""

    def authenticate(self, transport: Any) -> object:
        """Log in on ``transport`` or raise."""
        ...


def open_connection(
    settings: SshSettings,
    wire: Wire,
    *,
    key_types: Sequence[str],
    accept_key: Callable[[str, bytes], None],
    authentication: Authentication,
    timeout: float,
) -> Any:
    """Return an authenticated ``fabric.Connection`` over ``wire``.

    Args:
        settings: whom to connect to, for names only; the wire is connected already.
        wire: the stream, after :meth:`Wire.exchange_identification`.
        key_types: types of the keys that are known for this host, offered first; empty for no preference.
        accept_key: called with the server's key (type, blob) before authentication; raises to refuse it.
        authentication: how to log in.
        timeout: seconds for each step of the handshake.

    Raises whatever paramiko, ``accept_key`` or ``authentication`` raise; the wire is closed then.
    """
    # Nothing of paramiko's own log may reach a terminal (it prints tracebacks of a broken connection).
    logging.getLogger("paramiko").addHandler(logging.NullHandler())
    connection = fabric().Connection(
        host=settings.hostname,
        user=settings.user,
        port=settings.port,
        # lazy: no configuration file of fabric, invoke or ssh is read.
        config=fabric().Config(lazy=True),
        forward_agent=False,
        connect_kwargs={
            "sock": wire,
            "timeout": timeout,
            "banner_timeout": timeout,
            "auth_timeout": timeout,
            "channel_timeout": timeout,
            "transport_factory": _TransportFactory(key_types, timeout),
            "auth_strategy": authentication,
        },
    )
    connection.client.set_missing_host_key_policy(_Policy(accept_key))
    try:
        connection.open()
    except BaseException:
        dispose(connection)
        wire.close()
        raise
    return connection


def dispose(connection: Any) -> None:
    """Close ``connection`` without waiting, and without the timers that paramiko leaves behind; never raises."""
    transport = connection.client.get_transport()
    if transport is not None:
        # A timer of an unfinished handshake would otherwise keep the interpreter from exiting.
        transport.packetizer.complete_handshake()
    try:
        connection.client.close()
    except Exception:
        logging.getLogger(__name__).debug("closing failed", exc_info=True)


class _Policy:
    """Asks ``accept_key`` about every server key: no key is loaded into paramiko, so all of them are missing there."""

    def __init__(self, accept_key: Callable[[str, bytes], None]) -> None:
        self._accept_key = accept_key

    def missing_host_key(self, client: Any, hostname: str, key: Any) -> None:  # noqa: ARG002 - paramiko's interface
        self._accept_key(key.get_name(), key.asbytes())


class _TransportFactory:
    """Makes paramiko's Transport, with our algorithms and our identification."""

    def __init__(self, key_types: Sequence[str], timeout: float) -> None:
        self._key_types = key_types
        self._timeout = timeout

    def __call__(self, sock: Wire, **options: Any) -> Any:
        transport = paramiko().Transport(sock, strict_kex=True, default_window_size=WINDOW, **options)
        transport.daemon = True
        transport.local_version = IDENTIFICATION
        transport.handshake_timeout = self._timeout
        security = transport.get_security_options()
        security.kex = _available(KEX, security.kex)
        security.ciphers = _available(CIPHERS, security.ciphers)
        security.digests = _available(MACS, security.digests)
        security.key_types = _preferred(self._key_types, security.key_types)
        return transport


def _available(wanted: Sequence[str], offered: Sequence[str]) -> tuple[str, ...]:
    # Should a later paramiko rename them all, its own choice is better than none.
    return tuple(name for name in wanted if name in offered) or tuple(offered)


def _preferred(known: Sequence[str], offered: Sequence[str]) -> tuple[str, ...]:
    """Return ``offered``, with the algorithms of known keys first; an RSA key signs with either SHA-2 algorithm."""
    first: list[str] = []
    for name in known:
        names = ("rsa-sha2-512", "rsa-sha2-256") if name == "ssh-rsa" else (name,)
        first += [one for one in names if one in offered and one not in first]
    return (*first, *(name for name in offered if name not in first))
