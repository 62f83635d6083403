"""Logging in with a key: which ones are tried, in which order, and what is said when none is accepted.

One attempt, never repeated: since OpenSSH 9.8 a server that sees failed logins shuts out the address they came from.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import AuthError, UnreachableError
from ..host import Host
from ..text import safe
from . import keys
from .libraries import paramiko

if TYPE_CHECKING:
    from ..ssh_config import SshSettings

MAX_KEYS = 5
"""Keys that are tried at most; sshd ends the connection at MaxAuthTries, 6 by default."""
_AGENT_TIMEOUT = 5.0
_AGENT_SIGN_TIMEOUT = 60.0
"""An agent may ask its user to confirm or to touch a token."""
_SIGNS = ("ssh-ed25519", "ssh-rsa", "ecdsa-sha2-nistp256", "ecdsa-sha2-nistp384", "ecdsa-sha2-nistp521")
_prompting = threading.Lock()


@dataclass(frozen=True)
class Candidate:
    """A key that may be tried."""

    label: str
    """For people: a path, or ``agent: comment``."""
    origin: str
    """``agent`` or the path, for ``ConnectionFacts.auth_method``."""
    load: Callable[[], Any]
    """Returns the paramiko key; raises KeyUnusable."""


class KeyUnusable(Exception):
    """A key cannot be tried; the message says why."""


class KeyAuthentication:
    """Authenticates one connection; given to paramiko as its authentication strategy.

    Args:
        host: whom it is about, for errors.
        settings: user, identity files, agent.
        patience: entered while a person types a passphrase, so that no deadline runs meanwhile.
    """

    def __init__(
        self,
        host: Host,
        settings: SshSettings,
        *,
        patience: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        self.method: str | None = None
        self.banner = b""
        self._host = host
        self._settings = settings
        self._patience = patience
        self._unusable: list[str] = []
        self._tried: list[str] = []
        self._agent: Any = None

    def authenticate(self, transport: Any) -> None:
        """Log in, or raise AuthError; UnreachableError when the connection ended first."""
        try:
            for candidate in self._candidates():
                if len(self._tried) == MAX_KEYS:
                    self._unusable.append(f"{candidate.label} and any after it were not tried: {MAX_KEYS} is the limit")
                    break
                if self._accepted(transport, candidate):
                    return
            raise self._refused(None)
        finally:
            self.banner = bytes(transport.get_banner() or b"")[: 64 * 1024]
            if self._agent is not None:
                self._agent.close()

    def _accepted(self, transport: Any, candidate: Candidate) -> bool:
        module = paramiko()
        try:
            key = candidate.load()
        except KeyUnusable as error:
            self._unusable.append(f"{candidate.label} {error}")
            return False
        self._tried.append(candidate.label)
        try:
            further = transport.auth_publickey(self._settings.user, key)
        except module.BadAuthenticationType as error:
            raise self._refused(error.allowed_types) from None
        except module.AuthenticationException as error:
            if not transport.is_active():
                raise self._cut_off() from None
            if "timeout" in str(error).lower():
                raise UnreachableError(
                    "the server did not answer the login in time", host=self._host.name, phase="auth", retryable=True
                ) from None
            return False
        except module.SSHException as error:
            # An agent that refuses to sign, or was locked meanwhile.
            if not transport.is_active():
                raise self._cut_off() from None
            self._unusable.append(f"{candidate.label} could not sign: {safe(str(error), limit=100)}")
            return False
        if further:
            raise AuthError(
                f"the server accepted the key {candidate.label} and wants more: {', '.join(map(str, further))}",
                host=self._host.name,
                hint="logins with a second factor are not supported; ask for an exception for this key",
            )
        self.method = f"publickey ({_algorithm(key)}, {candidate.origin})"
        return True

    def _candidates(self) -> Iterator[Candidate]:
        """Yield keys: those named by identity files, then an agent's others, then those that need a passphrase."""
        settings = self._settings
        files = [keys.read(path) for path in dict.fromkeys(settings.identity_files)]
        for file in files:
            # The default names of ssh_config need not exist; a file that somebody chose has to.
            if file.problem and (file.problem != "does not exist" or settings.identities_only):
                self._unusable.append(f"{_shown(file.path)} {file.problem}")
        files = [file for file in files if file.problem is None]
        held: dict[bytes, Any] = {}
        if not settings.identities_only or any(file.encrypted or not file.private for file in files):
            held = self._agent_keys()
        locked: list[keys.KeyFile] = []
        for file in files:
            from_agent = held.pop(file.public, None) if file.public is not None else None
            if file.private and not file.encrypted:
                yield Candidate(_shown(file.path), _shown(file.path), _loader(file.path, settings))
            elif from_agent is not None:
                yield Candidate(_shown(file.path), "agent", _constant(from_agent))
            elif file.private:
                locked.append(file)
            else:
                self._unusable.append(f"{_shown(file.path)} is a public key, and no agent has the private one")
        if not settings.identities_only:
            for key in held.values():
                yield Candidate(f"agent: {safe(key.comment, limit=60)}", "agent", _constant(key))
        for file in locked:
            yield Candidate(_shown(file.path), _shown(file.path), self._unlocker(file.path))

    def _agent_keys(self) -> dict[bytes, Any]:
        """Return the agent's usable keys by public key; an agent that does not answer has none."""
        path = self._settings.identity_agent or os.environ.get("SSH_AUTH_SOCK")
        if not path or path == "none":
            return {}
        try:
            self._agent = connect_agent(path)
        except Exception as error:  # noqa: BLE001 - paramiko fails on a strange agent in many ways
            self._unusable.append(f"the agent at {path} does not answer: {safe(str(error) or type(error).__name__)}")
            return {}
        usable: dict[bytes, Any] = {}
        skipped = 0
        for key in self._agent.get_keys():
            if key.get_name() in _SIGNS:
                usable[key.blob] = key
            else:
                skipped += 1
        if skipped:
            self._unusable.append(f"{skipped} key(s) of the agent are of a type that is not supported (sk-, certificates)")
        return usable

    def _unlocker(self, path: Path) -> Callable[[], Any]:
        def load() -> Any:
            if not sys.stdin or not sys.stdin.isatty():
                raise KeyUnusable("is encrypted, no agent has it, and there is no terminal to ask for its passphrase")
            import getpass

            with self._patience(), _prompting:
                passphrase = getpass.getpass(f"Passphrase for {path}: ")
            if not passphrase:
                raise KeyUnusable("is encrypted, and no passphrase was given")
            return _loaded(path, passphrase, self._settings)

        return load

    def _refused(self, allowed: list[str] | None) -> AuthError:
        user = self._settings.user
        if allowed is not None and "publickey" not in allowed:
            return AuthError(
                f"the server does not let {user} log in with a key (it offers: {', '.join(map(str, allowed)) or 'nothing'})",
                host=self._host.name,
                hint="logins with a password are not supported; add your public key to ~/.ssh/authorized_keys there",
                details=tuple(self._unusable),
            )
        tried = ", ".join(self._tried)
        if not self._tried:
            reason = "; ".join(self._unusable) or "there is no key"
            return AuthError(
                f"no key to log in as {user} with: {reason}",
                host=self._host.name,
                hint="set identity_file in hosts.yaml, or ssh-add a key to an agent",
            )
        return AuthError(
            f"the server refused every key for {user}; tried: {tried}",
            host=self._host.name,
            hint="is the public key in ~/.ssh/authorized_keys there, and is user right? (set identity_file in hosts.yaml "
            "to try one key only)",
            details=tuple(self._unusable),
        )

    def _cut_off(self) -> AuthError | UnreachableError:
        if len(self._tried) > 1:
            return AuthError(
                f"the server ended the connection after {len(self._tried)} keys; tried: {', '.join(self._tried)}",
                host=self._host.name,
                hint="it allows only so many (MaxAuthTries); set identity_file in hosts.yaml to try the right one only",
                details=tuple(self._unusable),
            )
        return UnreachableError(
            "the server ended the connection during the login",
            host=self._host.name,
            phase="auth",
            hint="its log says why; after failed logins it may refuse this address for a while (PerSourcePenalties)",
            details=tuple(self._unusable),
            retryable=True,
        )


def connect_agent(path: str) -> Any:
    """Return paramiko's client of the agent at ``path``; whatever that raises, this raises."""
    from paramiko.agent import AgentSSH

    class Agent(AgentSSH):  # type: ignore[misc]
        """An agent at a given path; paramiko's own knows only SSH_AUTH_SOCK."""

        def close(self) -> None:
            """End the connection."""
            self._close()

    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    agent = Agent()
    try:
        connection.settimeout(_AGENT_TIMEOUT)
        connection.connect(path)
        agent._connect(connection)  # there is no public way to name the socket
        connection.settimeout(_AGENT_SIGN_TIMEOUT)
    except BaseException:
        with contextlib.suppress(OSError):
            connection.close()
        raise
    return agent


def _constant(key: Any) -> Callable[[], Any]:
    return lambda: key


def _loader(path: Path, settings: SshSettings) -> Callable[[], Any]:
    return lambda: _loaded(path, None, settings)


def _loaded(path: Path, passphrase: str | None, settings: SshSettings) -> Any:
    secret = None if passphrase is None else passphrase.encode("utf-8")
    try:
        key = paramiko().PKey.from_path(path, secret)
        for certificate in settings.certificate_files:
            with contextlib.suppress(OSError, ValueError):
                key.load_certificate(str(certificate))
    except Exception as error:  # noqa: BLE001 - paramiko and cryptography raise a dozen unrelated types here
        if passphrase is not None:
            raise KeyUnusable("cannot be decrypted with that passphrase") from None
        raise KeyUnusable(f"cannot be loaded: {safe(str(error) or type(error).__name__, limit=100)}") from None
    return key


def _algorithm(key: Any) -> str:
    name = str(key.get_name()).removeprefix("ssh-")
    return "ecdsa" if name.startswith("ecdsa") else name


def _shown(path: Path) -> str:
    home = Path("~").expanduser()
    return f"~/{path.relative_to(home)}" if path.is_relative_to(home) else str(path)
