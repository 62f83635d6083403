"""How bytes reach a host: the interface that the ssh and the local transport share.

One contract test-suite (``tests/test_transport_contract.py``) runs unchanged on each of them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Protocol

_SAFE = re.compile(r"[A-Za-z0-9._/-]+(?: [A-Za-z0-9._/-]+)*\Z")


class SafeCommand(str):
    """A command made of characters that no shell interprets: letters, digits, ``. _ / -`` and single blanks.

    The only type that a transport executes. Raises ValueError for anything else, so a value that came from a
    user or a host cannot become part of what a remote shell reads.
    """

    __slots__ = ()

    def __new__(cls, text: str) -> SafeCommand:
        """Check ``text``; a word that starts with ``-`` is allowed only after the first."""
        if not _SAFE.match(text) or text.startswith("-"):
            raise ValueError(f"not a command that may be sent to a shell: {text!r}")
        return super().__new__(cls, text)


class SafePath(SafeCommand):
    """A remote path inside the safe class; relative ones start at the login directory."""

    __slots__ = ()

    def __new__(cls, text: str) -> SafePath:
        """Check ``text``: no blank, no ``..`` component, no empty component."""
        parts = text.split("/")
        if " " in text or ".." in parts or "" in parts[1:]:
            raise ValueError(f"not a path that may be sent to a shell: {text!r}")
        return super().__new__(cls, text)  # type: ignore[return-value]


@dataclass
class ConnectionFacts:
    """What is known of a connection; filled in as far as it got, for ``rdiag check`` and for ``timing``."""

    transport: str
    """``ssh`` or ``local``."""
    target: str
    """Who is connected to, for people: ``root@203.0.113.7:22``, or ``this machine``."""
    phase_seconds: dict[str, float] = field(default_factory=dict)
    """Seconds spent in each phase (``resolve``, ``connect``, ``host-key``, ``auth``), in order."""
    server_version: str | None = None
    """The server's identification line, as sent (untrusted)."""
    host_key_type: str | None = None
    host_key_fingerprint: str | None = None
    """``SHA256:`` and the unpadded base64 digest, as ssh-keygen prints it."""
    host_key_source: str | None = None
    """Where the key was found, ``file:line`` or ``hosts.yaml``."""
    auth_method: str | None = None
    """For example ``publickey (ed25519, agent)``."""
    banner: bytes = b""
    """The server's authentication banner, as sent (untrusted), at most 64 KiB."""
    notes: list[str] = field(default_factory=list)
    """Things a person should know: no ssh client for ``ssh -G``, known_hosts lines that were skipped."""


class Channel(Protocol):
    """One command being executed on the host."""

    def send(self, data: bytes) -> None:
        """Write all of ``data`` to the command's stdin; raise ConnectionLost when nobody reads it any more."""
        ...

    def send_eof(self) -> None:
        """Close the command's stdin; harmless when repeated or when the command has ended."""
        ...

    def receive(self, timeout: float) -> tuple[bytes, bytes] | None:
        """Return what arrived on (stdout, stderr), at most 256 KiB each, waiting up to ``timeout`` seconds.

        ``(b"", b"")`` when nothing came in time; None when both streams have ended. Raises ConnectionLost when
        the connection ended without the streams having ended properly.
        """
        ...

    def exit_status(self, timeout: float) -> int | None:
        """Return the command's exit status, None when it is not known within ``timeout`` seconds.

        Never -1: death by a signal and a lost connection are None here.
        """
        ...

    def close(self) -> None:
        """End the channel; idempotent, never raises, never blocks longer than a second."""
        ...


class Transport(Protocol):
    """A way to a host. Not safe for use by several threads at once, except ``close``."""

    facts: ConnectionFacts

    def prestart(self) -> None:
        """Begin to connect in the background, and meanwhile import what ``connect`` needs; never raises.

        ``connect`` goes on from there. Harmless when repeated.
        """
        ...

    def connect(self) -> None:
        """Establish the connection within the host's ``connect_timeout``; raise an RdiagError by phase."""
        ...

    def execute(self, command: SafeCommand) -> Channel:
        """Start ``command`` in the login directory; raise TypeError for anything but a SafeCommand."""
        ...

    def upload(self, data: bytes, path: SafePath) -> None:
        """Create ``path`` (0600, in directories made 0700 as needed) holding ``data``; replace atomically.

        Raises UploadUnavailable when this way of carrying files does not work on the host (SFTP switched off
        or noisy); EnvironmentUnfit when it works and the host refuses (permission, space, quota).
        """
        ...

    def ping(self, timeout: float) -> float:
        """Return the seconds a replied round trip took; raise ConnectionLost when no reply came in time."""
        ...

    def close(self) -> None:
        """End everything; idempotent, never raises."""
        ...


class UploadUnavailable(Exception):
    """This transport cannot carry files to this host; the session sends them through a channel instead."""
