"""Every exception that paramiko, fabric or the kernel is known to raise, and the error it becomes."""

from __future__ import annotations

import errno

import pytest
from paramiko import ssh_exception
from paramiko.ssh_exception import (
    AuthenticationException,
    BadAuthenticationType,
    ChannelException,
    IncompatiblePeer,
    MessageOrderError,
    NoValidConnectionsError,
    PartialAuthentication,
    ProxyCommandFailure,
    SSHException,
)

from remote_diag.errors import (
    AuthError,
    ConnectionLost,
    HostKeyError,
    InternalError,
    RdiagError,
    UnreachableError,
)
from remote_diag.host import Host
from remote_diag.transport import failures
from remote_diag.transport.sockets import Deadline

HOST = Host(name="h", address="192.0.2.1")
WHERE = "192.0.2.1:22"


def check(error: RdiagError, kind: type[RdiagError], words: str) -> None:
    assert type(error) is kind
    assert words in error.message
    assert error.host == "h"
    assert error.message.strip()
    assert not error.message.endswith((":", ": "))
    if kind is not InternalError:
        assert error.hint or kind in {AuthError, ConnectionLost}


@pytest.mark.parametrize(
    ("raised", "words"),
    [
        (ConnectionRefusedError(errno.ECONNREFUSED, "x"), "refuses connections"),
        (OSError(errno.EHOSTUNREACH, "x"), "no route to the host"),
        (OSError(errno.ENETUNREACH, "x"), "no route to its network"),
        (ConnectionResetError(errno.ECONNRESET, "x"), "reset the connection"),
        (BrokenPipeError(errno.EPIPE, "x"), "closed the connection"),
        (PermissionError(errno.EACCES, "x"), "this machine forbids it"),
        (PermissionError(errno.EPERM, "x"), "this machine forbids it"),
        (OSError(errno.EMFILE, "x"), "too many open files"),
        (OSError(errno.ENFILE, "x"), "too many open files"),
        (OSError(errno.EADDRNOTAVAIL, "x"), "no local port"),
        (OSError(errno.EINVAL, "x"), "no address to connect to"),
        (OSError(errno.EAFNOSUPPORT, "x"), "Address family not supported"),
        (TimeoutError(), "timed out after 10 s connecting"),
        (TimeoutError(errno.ETIMEDOUT, "x"), "timed out after 10 s connecting"),
        (TimeoutError("timed out"), "timed out after 10 s connecting"),
        (OSError(), "OSError"),
        (OSError("odd"), "odd"),
        (NoValidConnectionsError({("192.0.2.1", 22): OSError(errno.ECONNREFUSED, "x")}), "Unable to connect"),
    ],
)
def test_network(raised: OSError, words: str) -> None:
    error = failures.network_failure(raised, HOST, WHERE, "connecting", 10.0)
    check(error, UnreachableError, words)
    assert error.phase == "connect"


@pytest.mark.parametrize("phase", ["host-key", "auth"])
@pytest.mark.parametrize(
    ("raised", "kind", "words"),
    [
        (ConnectionResetError(), UnreachableError, "reset the connection"),
        (ConnectionResetError(errno.ECONNRESET, "x"), UnreachableError, "reset the connection"),
        (EOFError(), UnreachableError, "ended the connection"),
        (OSError(errno.EBADF, "x"), UnreachableError, "ended the connection"),
        (SSHException(), UnreachableError, "ended the connection"),
        (SSHException("No existing session"), UnreachableError, "ended the connection"),
        (SSHException("Negotiation failed."), UnreachableError, "Negotiation failed."),
        (SSHException("Error reading SSH protocol banner"), UnreachableError, "Error reading SSH protocol banner"),
        (SSHException("Server \x1b[2J"), UnreachableError, r"Server \x1b[2J"),
        (SSHException("Signature verification (ssh-ed25519) failed."), HostKeyError, "did not prove"),
        (SSHException("Mismatched MAC"), UnreachableError, "broke the protocol"),
        (MessageOrderError("Expecting packet from (31,), got 2"), UnreachableError, "broke the protocol"),
        (IncompatiblePeer("no acceptable kex algorithm"), UnreachableError, "no encryption algorithm in common"),
        (ProxyCommandFailure("nc", "gone"), UnreachableError, "ended the connection"),
        (ValueError("?"), InternalError, "ValueError"),
        (KeyError(), InternalError, "KeyError"),
    ],
)
def test_handshake(raised: Exception, kind: type[RdiagError], words: str, phase: str) -> None:
    error = failures.handshake_failure(raised, HOST, WHERE, phase)
    check(error, kind, words)
    assert error.phase in {"connect", "host-key", "auth"}


@pytest.mark.parametrize(
    "raised",
    [
        AuthenticationException(),
        AuthenticationException("Authentication failed."),
        BadAuthenticationType("Bad authentication type", ["password"]),
        PartialAuthentication(["password"]),
    ],
)
def test_refused_logins(raised: Exception) -> None:
    check(failures.handshake_failure(raised, HOST, WHERE, "auth"), AuthError, "the login failed")


def test_our_own_errors_pass() -> None:
    own = HostKeyError("swapped", host="h")
    assert failures.handshake_failure(own, HOST, WHERE, "host-key") is own


@pytest.mark.parametrize(
    ("raised", "words", "retryable"),
    [
        (ChannelException(1, "Administratively prohibited"), "AllowTcpForwarding", False),
        (ChannelException(2, "Connect failed"), f"cannot reach {WHERE}", True),
        (ChannelException(4, "Resource shortage"), "no resources", True),
        (SSHException("Timeout opening channel."), "Timeout opening channel.", True),
        (SSHException(), "SSHException", True),
    ],
)
def test_jump(raised: Exception, words: str, *, retryable: bool) -> None:
    error = failures.jump_failure(raised, HOST, WHERE, Deadline(5.0))
    check(error, UnreachableError, words)
    assert error.retryable == retryable
    late = failures.jump_failure(raised, HOST, WHERE, Deadline(0.0))
    assert "timed out" in late.message


@pytest.mark.parametrize("refused", [True, False])
@pytest.mark.parametrize(
    ("raised", "kind", "words"),
    [
        (ChannelException(2, "Connect failed"), UnreachableError, "refuses another session"),
        (ChannelException(1, "Administratively prohibited"), UnreachableError, "refuses another session"),
        (SSHException("Timeout opening channel."), ConnectionLost, "no reply"),
        (TimeoutError(), ConnectionLost, "no reply"),
        (SSHException("Channel closed."), None, ""),
        (SSHException("SSH session not active"), None, ""),
        (EOFError(), None, ""),
        (OSError("Socket is closed"), None, ""),
        (ConnectionResetError(), None, ""),
    ],
)
def test_requests(raised: Exception, kind: type[RdiagError] | None, words: str, *, refused: bool) -> None:
    error = failures.request_failure(raised, HOST, "starting the command", refused=refused)
    if kind is None:
        kind, words = (AuthError, "may not run commands") if refused else (ConnectionLost, "the connection ended")
    check(error, kind, words)


def test_every_paramiko_exception_has_a_row() -> None:
    known = {
        "AuthenticationException", "BadAuthenticationType", "PartialAuthentication", "ChannelException",
        "IncompatiblePeer", "MessageOrderError", "NoValidConnectionsError", "ProxyCommandFailure", "SSHException",
        # Passwords, several authentication sources and paramiko's own known_hosts and ssh_config: not used here.
        "PasswordRequiredException", "UnableToAuthenticate", "BadHostKeyException", "CouldNotCanonicalize",
        "ConfigParseError",
    }  # fmt: skip
    found = {
        name
        for name, thing in vars(ssh_exception).items()
        if isinstance(thing, type) and issubclass(thing, Exception) and thing.__module__ == ssh_exception.__name__
    }
    assert found <= known, "a new exception of paramiko: give it a row"
