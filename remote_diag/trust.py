"""Recording the keys of hosts: look at the key that a host shows, and write it into rdiag's own known_hosts file.

ssh's own files are read, never written. rdiag's file only ever grows, one line in one write, under a lock;
``replace`` alone rewrites it, atomically.
"""

from __future__ import annotations

import base64
import fcntl
import os
import re
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from .errors import ConfigError, HostKeyError, LocalIOError, UsageProblem
from .host import Host
from .known_hosts import (
    ChangedHostKey,
    HostKeyVerifier,
    UnknownHostKey,
    fingerprint,
    lookup_name,
    matches,
    parse_line,
)
from .paths import own_known_hosts
from .ssh_config import SshSettings

LOCK_SECONDS = 5.0
"""How long another rdiag may hold the file."""
_NAME = re.compile(r"[a-z0-9_.%:+-]+\Z|\[[a-z0-9_.%:+-]+\]:[0-9]{1,5}\Z")
_TYPE = re.compile(r"[a-z0-9@.-]+\Z")


@dataclass(frozen=True)
class ScannedKey:
    """The key that a host, or a jump host on the way to it, shows; nothing says that it is the right one."""

    host: Host
    settings: SshSettings
    key_type: str
    blob: bytes = field(repr=False)
    """The public key in SSH wire format."""
    jump_host: bool
    """Whether it is the key of a jump host; the host itself cannot be seen before that one is trusted."""
    source: str | None
    """Where the key is known from already, ``file:line`` or ``hosts.yaml``."""
    refusal: HostKeyError | None
    """Why rdiag would not connect now; None when it would."""
    notes: tuple[str, ...] = ()
    """What a person should know: settings that were not read, lines that were skipped."""

    @property
    def fingerprint(self) -> str:
        """``SHA256:...``, as ssh-keygen prints it."""
        return fingerprint(self.blob)

    @property
    def name(self) -> str:
        """What the host is called in known_hosts."""
        return lookup_name(self.settings)

    @property
    def address(self) -> str:
        """Address and port, for people."""
        return f"{self.settings.hostname} port {self.settings.port}"


# --- Looking --------------------------------------------------------------------------------------------------------


class _Seen(HostKeyError):
    """Ends the connection once the key was seen; the host is sent nothing more."""


class _Onlooker(HostKeyVerifier):
    """Remembers the first key that is not trusted yet; never lets the connection to the host itself go on."""

    def __init__(self, host: Host, settings: SshSettings, target: Host, seen: list[ScannedKey]) -> None:
        super().__init__(host, settings)
        self._leg = host
        self._route_settings = settings
        self._is_target = host is target
        self._seen = seen

    def verify(self, key_type: str, key_blob: bytes) -> str:
        source: str | None = None
        refusal: HostKeyError | None = None
        try:
            source = super().verify(key_type, key_blob)
        except HostKeyError as error:
            refusal = error
        if source is not None and not self._is_target:
            return source
        self._seen.append(
            ScannedKey(
                host=self._leg,
                settings=self._route_settings,
                key_type=key_type,
                blob=key_blob,
                jump_host=not self._is_target,
                source=source,
                refusal=refusal,
                notes=(*self._route_settings.notes, *self.notes),
            )
        )
        raise _Seen("seen", host=self._leg.name)


def scan(host: Host) -> ScannedKey:
    """Connect to ``host`` as far as its key, on a connection of its own, and return the key.

    Where jump hosts are in between, these are logged in to; the key of the first of them that is not trusted yet is
    returned in place of the host's.

    Raises:
        UsageProblem: the host is this machine.
        RdiagError: by phase, as for every connection.
    """
    if host.transport != "ssh":
        raise UsageProblem("this machine is not reached over ssh: there is no host key to trust", host=host.name)
    from .transport.base import ConnectionFacts
    from .transport.client import dispose
    from .transport.handshake import run
    from .transport.opening import Opening
    from .transport.sockets import Deadline

    seen: list[ScannedKey] = []
    connections: list[object] = []
    opening = Opening(host, Deadline(host.connect_timeout))
    try:
        run(
            host,
            opening,
            ConnectionFacts(transport="ssh", target=host.name),
            connections,
            verifier=lambda leg, settings: _Onlooker(leg, settings, host, seen),
        )
    except _Seen:
        return seen[-1]
    finally:
        for connection in reversed(connections):
            dispose(connection)
        opening.abandon()
    raise HostKeyError("the host accepted the connection without showing a key", host=host.name)


# --- Recording ------------------------------------------------------------------------------------------------------


def record(key: ScannedKey, *, replace: bool = False) -> str:
    """Write ``key`` into rdiag's own known_hosts file, unless it is known already; return where it stands.

    The key is judged again while the file is locked, so that two calls at once leave one line.

    Args:
        key: what :func:`scan` returned and a person agreed to.
        replace: whether other keys of this host may be removed from the file first.

    Raises:
        HostKeyError: the key is revoked or a certificate, another key is pinned, or another key is known: by one of
            ssh's files, or by rdiag's own and ``replace`` is not set.
        LocalIOError: the file cannot be written, or is not ours.
    """
    line = known_hosts_line(key)
    path = own_known_hosts()
    try:
        with _locked(path) as descriptor:
            try:
                return HostKeyVerifier(key.host, key.settings).verify(key.key_type, key.blob)
            except UnknownHostKey:
                number = _append(descriptor, path, line)
            except ChangedHostKey as error:
                if not replace or any(entry.path != path for entry in error.known):
                    raise
                number = _rewrite(path, key.name, line)
    except OSError as error:
        raise LocalIOError(f"cannot write {path}: {error.strerror or error}", host=key.host.name) from error
    return f"{path}:{number}"


def known_hosts_line(key: ScannedKey) -> bytes:
    """Return the line for ``key``; raises ConfigError when its name cannot stand in such a file."""
    if not _NAME.match(key.name) or not _TYPE.match(key.key_type):
        raise ConfigError(
            f"a key cannot be recorded for the name {key.name!r}",
            host=key.host.name,
            hint="see HostKeyAlias in ~/.ssh/config: letters, digits and . _ : % + - can be recorded",
        )
    date = time.strftime("%Y-%m-%d")
    return f"{key.name} {key.key_type} {base64.b64encode(key.blob).decode()} rdiag-trust-{date}\n".encode()


@contextmanager
def _locked(path: Path) -> Iterator[int]:
    """Open ``path`` for reading and appending, created private where it is missing, and hold its lock."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    _require_private(path.parent, path.parent.stat(), stat.S_ISDIR)
    deadline = time.monotonic() + LOCK_SECONDS
    while True:
        descriptor = _open(path)
        try:
            _require_private(path, os.fstat(descriptor), stat.S_ISREG)
            _lock(descriptor, path, deadline)
            # Another rdiag may have put a new file in its place while this one waited.
            if _is_still(path, descriptor):
                yield descriptor
                return
        finally:
            os.close(descriptor)


def _open(path: Path) -> int:
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        return os.open(path, flags, 0o600)
    except OSError as error:
        if path.is_symlink():
            raise LocalIOError(f"{path} is a symbolic link; keys are not recorded through one") from error
        raise


def _require_private(path: Path, status: os.stat_result, kind: Callable[[int], bool]) -> None:
    if not kind(status.st_mode):
        raise LocalIOError(f"{path} is not of the expected kind", hint="move it away")
    if status.st_uid != os.geteuid():
        raise LocalIOError(f"{path} belongs to another user (uid {status.st_uid}); keys are not recorded there")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise LocalIOError(f"others may write to {path}; keys are not recorded there", hint=f"chmod go-w {path}")


def _lock(descriptor: int, path: Path, deadline: float) -> None:
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                raise LocalIOError(f"{path} is locked by another process", hint="try again") from None
            time.sleep(0.02)
        else:
            return


def _is_still(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(path.lstat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _append(descriptor: int, path: Path, line: bytes) -> int:
    """Write ``line`` at the end in one piece, and return its number."""
    before = path.read_bytes()
    unfinished = bool(before) and not before.endswith(b"\n")
    data = b"\n" + line if unfinished else line
    if os.write(descriptor, data) != len(data):
        os.ftruncate(descriptor, len(before))
        raise OSError("no space left for the key")
    os.fsync(descriptor)
    return before.count(b"\n") + unfinished + 1


def _rewrite(path: Path, name: str, line: bytes) -> int:
    """Put a file in place of ``path`` that has ``line`` instead of the other keys of ``name``; return its number."""
    lines = path.read_bytes().rstrip(b"\n").split(b"\n")
    kept = [raw + b"\n" for raw in lines if not _is_key_of(raw, name, path)]
    descriptor, temporary = tempfile.mkstemp(prefix=".known_hosts.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.writelines([*kept, line])
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).replace(path)
    except BaseException:
        with suppress(OSError):
            Path(temporary).unlink()
        raise
    return len(kept) + 1


def _is_key_of(raw: bytes, name: str, path: Path) -> bool:
    try:
        line = parse_line(raw)
        if line is None or line.marker or not matches(line.hosts, name):
            return False
    except ValueError:
        return False
    if "," in line.hosts or not line.names_one_host:
        raise LocalIOError(
            f"{path}: the line for {line.hosts} stands for other hosts too", hint="remove it by hand, then try again"
        )
    return True
