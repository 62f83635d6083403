"""Whatever paramiko, fabric or the kernel raises, as one of rdiag's errors.

Their messages are unreliable (some are empty, some name the wrong cause), so class, errno and phase decide; a text
is only looked at where paramiko gives nothing else to tell two causes apart by.
"""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING

from ..errors import AuthError, ConnectionLost, HostKeyError, InternalError, RdiagError, UnreachableError
from ..host import Host
from ..text import safe

if TYPE_CHECKING:
    from .sockets import Deadline

BUSY_SERVER = (
    "sshd does so when too many logins are pending (MaxStartups) or after failed ones (PerSourcePenalties); wait a moment"
)
_NETWORK: dict[int, tuple[str, str | None, bool]] = {
    errno.ECONNREFUSED: ("refuses connections", "is sshd running there, and is the port right?", True),
    errno.EHOSTUNREACH: ("cannot be reached: no route to the host", "check the address, and the network or VPN", True),
    errno.ENETUNREACH: ("cannot be reached: no route to its network", "check the network or VPN here", True),
    errno.ECONNRESET: ("reset the connection", BUSY_SERVER, True),
    errno.EPIPE: ("closed the connection", BUSY_SERVER, True),
    errno.EACCES: ("cannot be reached: this machine forbids it", "a firewall or sandbox here is in the way", False),
    errno.EPERM: ("cannot be reached: this machine forbids it", "a firewall or sandbox here is in the way", False),
    errno.EMFILE: ("cannot be reached: too many open files here", "raise `ulimit -n`", False),
    errno.ENFILE: ("cannot be reached: too many open files here", "close some programs", False),
    errno.EADDRNOTAVAIL: ("cannot be reached: no local port is free", "connect to fewer hosts at once", True),
    errno.EINVAL: ("is no address to connect to", "check address in hosts.yaml", False),
}
"""Of a failed socket operation: what the host does, the hint, whether trying again may help."""


def timed_out(host: Host, doing: str, phase: str, seconds: float) -> UnreachableError:
    """Return the error for a connect deadline that passed; names the step and the setting."""
    return UnreachableError(
        f"timed out after {seconds:g} s {doing}",
        host=host.name,
        phase=phase,
        hint="is the host up, and is a firewall or VPN in between? (connect_timeout in hosts.yaml)",
        retryable=True,
    )


def network_failure(error: OSError, host: Host, where: str, doing: str, seconds: float) -> UnreachableError:
    """Return the error for a socket operation that failed while connecting.

    Args:
        error: what the operation raised.
        host: whom it is about.
        where: address and port, for people.
        doing: the step, as in "timed out after 10 s <doing>".
        seconds: the connect deadline.
    """
    if isinstance(error, TimeoutError):
        return timed_out(host, doing, "connect", seconds)
    cause, hint, retryable = _NETWORK.get(
        error.errno or 0, (f"cannot be reached: {described(error)}", "check address and port", True)
    )
    return UnreachableError(f"{where} {cause}", host=host.name, phase="connect", hint=hint, retryable=retryable)


def handshake_failure(error: Exception, host: Host, where: str, phase: str) -> RdiagError:
    """Return the error for an exception during key exchange (phase ``host-key``) or login (phase ``auth``)."""
    name, text = type(error).__name__, str(error)
    if isinstance(error, RdiagError):
        return error
    if name == "IncompatiblePeer":
        return UnreachableError(
            f"{where} and rdiag have no encryption algorithm in common: {described(error)}",
            host=host.name,
            phase="connect",
            hint="the server's ssh is very old or locked down; SHA-1 and CBC are not supported",
        )
    if "Signature verification" in text:
        return HostKeyError(
            f"{where} did not prove that it owns the host key it showed",
            host=host.name,
            hint="somebody may be in the way; do not connect to it from this network",
        )
    if name in {"MessageOrderError", "BadHostKeyException"} or "Bad packet" in text or "Mismatched MAC" in text:
        return UnreachableError(
            f"{where} broke the protocol: {described(error)}",
            host=host.name,
            phase=phase,
            hint="something between here and there changes the data, or that is no proper SSH server",
        )
    doing = "during the key exchange" if phase == "host-key" else "during the login"
    if phase == "auth" and name in {"AuthenticationException", "BadAuthenticationType", "PartialAuthentication"}:
        return AuthError(f"the login failed: {described(error)}", host=host.name)
    if isinstance(error, (EOFError, OSError)) or name in {"SSHException", "ProxyCommandFailure", "AuthenticationException"}:
        end = f"{where} ended the connection {doing}"
        if isinstance(error, ConnectionResetError):
            end = f"{where} reset the connection {doing}"
        elif text and name == "SSHException" and "session" not in text:
            end += f": {described(error)}"
        return UnreachableError(end, host=host.name, phase=phase, hint=BUSY_SERVER, retryable=True)
    return InternalError(f"{name} {doing}: {described(error)}", host=host.name, phase=phase)


def jump_failure(error: Exception, host: Host, where: str, deadline: Deadline) -> UnreachableError:
    """Return the error for a jump host that does not carry the connection on to ``where``."""
    if deadline.passed:
        return timed_out(host, f"waiting for the jump host to reach {where}", "connect", deadline.seconds)
    code = getattr(error, "code", None)
    cause = {
        1: "the jump host does not allow forwarding (AllowTcpForwarding)",
        2: f"the jump host cannot reach {where}",
        4: "the jump host has no resources left",
    }.get(code or 0, f"the jump host does not connect to {where}: {described(error)}")
    return UnreachableError(
        cause, host=host.name, phase="connect", hint=f"log in there by hand and try to reach {where}", retryable=code != 1
    )


def no_reply(host: Host, doing: str, seconds: float) -> ConnectionLost:
    """Return the error for a connected server that does not answer any more."""
    return ConnectionLost(
        f"no reply within {seconds:g} s {doing}",
        host=host.name,
        hint="the host is frozen, overloaded, or cut off",
        retryable=True,
    )


def request_failure(error: Exception, host: Host, doing: str, *, refused: bool = False) -> RdiagError:
    """Return the error for a request on a connected server that failed.

    Args:
        error: what paramiko raised.
        host: whom it is about.
        doing: the request, as in "starting the command".
        refused: whether the connection stands, so that the server must have said no.
    """
    name = type(error).__name__
    if name == "ChannelException":
        return UnreachableError(
            f"the server refuses another session: {described(error)}",
            host=host.name,
            phase="start",
            hint="it allows only so many at once (MaxSessions); what else is connected?",
            retryable=True,
        )
    if isinstance(error, TimeoutError) or "Timeout" in str(error):
        return ConnectionLost(
            f"no reply {doing}", host=host.name, hint="the host is frozen, overloaded, or cut off", retryable=True
        )
    if refused:
        return AuthError(
            "the account may not run commands: the server refused to",
            host=host.name,
            phase="start",
            hint="its authorized_keys or sshd_config restrict this key (ForceCommand, command=, restrict)",
        )
    return ConnectionLost(f"the connection ended {doing}", host=host.name, retryable=True)


def described(error: BaseException) -> str:
    """Return what ``error`` says, or at least what it is: many exceptions have an empty message."""
    if isinstance(error, OSError) and error.errno:
        return os.strerror(error.errno)
    return safe(str(error).strip() or type(error).__name__, limit=200)
