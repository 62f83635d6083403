"""Whether a host's key is the one that is known: known_hosts files, read tolerantly and believed strictly.

One unreadable line never hides the others: it is skipped with a note. Everything else is strict: an unknown, a
changed and a revoked key are refused, and so is every key when the check itself fails.

Follows sshd(8) "SSH_KNOWN_HOSTS FILE FORMAT": markers, comma lists, ``*`` and ``?``, ``!``, ``[host]:port``, hashed
names. Host certificates are not supported; lines with ``@cert-authority`` are noted, never believed.
"""

from __future__ import annotations

import base64
import binascii
import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from .errors import HostKeyError
from .host import Host
from .paths import own_known_hosts
from .ssh_config import SshSettings
from .text import safe

FILE_LIMIT = 64 * 1024 * 1024
"""Bytes of one known_hosts file; a larger one is not read."""
LINE_LIMIT = 64 * 1024
"""Bytes of one line; a longer one is skipped."""
NOTES_PER_FILE = 5
"""Skipped lines that are named one by one."""
PINNED = "hosts.yaml"
"""What :meth:`HostKeyVerifier.verify` returns for a key that hosts.yaml pins."""

_REVOKED = "@revoked"
_AUTHORITY = "@cert-authority"
_RANK = (
    "ssh-ed25519",
    "ecdsa-sha2-nistp256",
    "ecdsa-sha2-nistp384",
    "ecdsa-sha2-nistp521",
    "ssh-rsa",
)
# One RSA key serves several signature algorithms (RFC 8332); the one with SHA-1 is left out on purpose.
_ALGORITHMS = {"ssh-rsa": ("rsa-sha2-512", "rsa-sha2-256")}
_NEW_KEY_HINT = "whoever shows this key may not be the host: ask the host's administrator for its new key"
_KEY_FILES = {"ssh-ed25519": "ed25519", "ssh-rsa": "rsa"}


def fingerprint(blob: bytes) -> str:
    """Return ``SHA256:`` and the unpadded base64 digest of a public key, as ssh-keygen prints it."""
    import hashlib

    return "SHA256:" + base64.b64encode(hashlib.sha256(blob).digest()).decode().rstrip("=")


def blob_type(blob: bytes) -> str:
    """Return the key type that a public key in SSH wire format names; raises ValueError when it names none."""
    length = int.from_bytes(blob[:4], "big")
    name = blob[4 : 4 + length]
    if not 1 <= length <= 64 or len(blob) <= 4 + length or not name.isascii():
        raise ValueError("not a public key")
    text = name.decode()
    if not text.isprintable() or " " in text:
        raise ValueError("not a public key")
    return text


def lookup_name(settings: SshSettings) -> str:
    """Return what the host is called in known_hosts: its alias, its name, or ``[name]:port`` for ports but 22."""
    if settings.host_key_alias is not None:
        return settings.host_key_alias.lower()
    name = settings.hostname.lower()
    return name if settings.port == 22 else f"[{name}]:{settings.port}"


# --- Lines ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Line:
    """One line of a known_hosts file, taken apart; the key is not decoded yet."""

    marker: str
    """Empty, ``@revoked`` or ``@cert-authority``."""
    hosts: str
    key_type: str
    encoded: bytes

    @property
    def blob(self) -> bytes:
        """The key in SSH wire format; raises ValueError when it is damaged or of another type than the line says."""
        try:
            blob = base64.b64decode(self.encoded, validate=True)
        except binascii.Error:
            raise ValueError("the key is not base64") from None
        if blob_type(blob) != self.key_type:
            raise ValueError(f"the key is not of the type {self.key_type}")
        return blob

    @property
    def names_one_host(self) -> bool:
        """Whether the names are neither patterns nor several, so that ``ssh-keygen -R`` can remove the line."""
        return self.hosts.startswith("|") or not any(character in self.hosts for character in "*?!")


def parse_line(raw: bytes) -> Line | None:
    """Take one line apart; None for blank lines and comments; ValueError says what is wrong with others."""
    if len(raw) > LINE_LIMIT:
        raise ValueError(f"longer than {LINE_LIMIT // 1024} kB")
    fields = raw.split(None, 4)
    if not fields or fields[0].startswith(b"#"):
        return None
    marker = ""
    if fields[0].startswith(b"@"):
        marker = fields.pop(0).decode("latin-1")
        if marker not in {_REVOKED, _AUTHORITY}:
            raise ValueError(f"unknown marker {safe(marker, limit=40)}")
    if len(fields) < 3:
        raise ValueError("fewer than three fields")
    hosts, key_type, encoded = fields[:3]
    if key_type.isdigit():
        raise ValueError("a key of SSH protocol 1")
    return Line(marker, hosts.decode("latin-1"), key_type.decode("latin-1"), encoded)


def matches(hosts: str, name: str) -> bool:
    """Tell whether the first field of a line, plain or hashed, stands for ``name`` (lower case).

    Raises ValueError for a hash that is damaged or of a kind that is not known.
    """
    if hosts.startswith("|"):
        return _hash_matches(hosts, name)
    found = False
    for pattern in hosts.lower().split(","):
        negated = pattern.startswith("!")
        if _glob(pattern[negated:], name):
            if negated:
                return False
            found = True
    return found


def _hash_matches(hosts: str, name: str) -> bool:
    import hmac

    parts = hosts.split("|")
    if len(parts) != 4 or parts[1] != "1":
        raise ValueError("unknown kind of hashed name")
    try:
        salt, expected = (base64.b64decode(part, validate=True) for part in parts[2:])
    except (binascii.Error, ValueError):
        raise ValueError("damaged hashed name") from None
    if len(salt) != 20 or len(expected) != 20:
        raise ValueError("damaged hashed name")
    return hmac.compare_digest(hmac.digest(salt, name.encode(), "sha1"), expected)


def _glob(pattern: str, text: str) -> bool:
    """Match ``*`` and ``?`` in time proportional to both lengths; brackets are ordinary characters here."""
    at = in_pattern = 0
    star = mark = -1
    while at < len(text):
        if in_pattern < len(pattern) and pattern[in_pattern] == "*":
            star, mark = in_pattern, at
            in_pattern += 1
        elif in_pattern < len(pattern) and pattern[in_pattern] in {"?", text[at]}:
            at += 1
            in_pattern += 1
        elif star >= 0:
            mark += 1
            at, in_pattern = mark, star + 1
        else:
            return False
    return not pattern[in_pattern:].strip("*")


# --- Files ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Entry:
    """A line that stands for the host that is looked for."""

    path: Path
    number: int
    """Line number, from 1."""
    line: Line
    blob: bytes
    name: str
    """Which of the names that were looked for it matched."""

    @property
    def where(self) -> str:
        """``file:line``."""
        return f"{self.path}:{self.number}"

    @property
    def described(self) -> str:
        """Type, fingerprint and place, for messages."""
        return f"{self.line.key_type} {fingerprint(self.blob)} ({self.where})"


@dataclass(frozen=True)
class Lookup:
    """What known_hosts files say about a host."""

    entries: tuple[Entry, ...]
    notes: tuple[str, ...]
    """Lines that were skipped and files that were not read, each with its place."""


def look_up(files: Sequence[Path], names: Sequence[str]) -> Lookup:
    """Return every usable line of ``files`` that stands for one of ``names`` (lower case, most exact first)."""
    entries: list[Entry] = []
    notes: list[str] = []
    for path in dict.fromkeys(files):
        skipped: list[str] = []
        for number, raw in _lines(path, notes):
            try:
                line = parse_line(raw)
                name = None if line is None else next((name for name in names if matches(line.hosts, name)), None)
                if line is not None and name is not None:
                    entries.append(Entry(path, number, line, line.blob, name))
            except ValueError as error:
                skipped.append(f"{path}:{number}: line skipped: {error}")
        notes += skipped[:NOTES_PER_FILE]
        if len(skipped) > NOTES_PER_FILE:
            notes.append(f"{path}: {len(skipped) - NOTES_PER_FILE} more lines skipped")
    return Lookup(tuple(entries), tuple(notes))


def _lines(path: Path, notes: list[str]) -> Iterator[tuple[int, bytes]]:
    try:
        data = _read(path)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        notes.append(f"{path}: not read: {reason}")
        return
    yield from enumerate(data.split(b"\n"), start=1)


def _read(path: Path) -> bytes:
    try:
        # Non-blocking: opening a named pipe must not wait for a writer.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return b""
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if stat.S_ISCHR(status.st_mode) and status.st_rdev == os.stat(os.devnull).st_rdev:  # noqa: PTH116
            return b""
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("not a regular file")
        data = file.read(FILE_LIMIT + 1)
    if len(data) > FILE_LIMIT:
        raise ValueError(f"larger than {FILE_LIMIT // 1024**2} MB")
    return data


# --- The check ------------------------------------------------------------------------------------------------------


class UnknownHostKey(HostKeyError):
    """No usable line stands for the host."""

    elsewhere: tuple[Entry, ...] = ()
    """Lines that hold this very key, under the host's name without its port."""


class ChangedHostKey(HostKeyError):
    """Lines stand for the host, and all of them hold other keys."""

    known: tuple[Entry, ...] = ()
    """These lines."""


class HostKeyVerifier:
    """Decides about the key that a host shows.

    Files are read when the first method is called: those of the settings, then rdiag's own. A key pinned in
    hosts.yaml takes their place.

    Args:
        host: for its name and its pinned key.
        settings: which files, and under which name to look.
    """

    def __init__(self, host: Host, settings: SshSettings) -> None:
        self._host = host
        self._settings = settings
        self._name = lookup_name(settings)
        self._own = own_known_hosts()

    @property
    def name(self) -> str:
        """What the host is called in known_hosts."""
        return self._name

    @property
    def known(self) -> tuple[Entry, ...]:
        """The keys known for the host by files, revoked ones and authorities not among them."""
        return tuple(entry for entry in self._lookup.entries if entry.name == self._name and not entry.line.marker)

    @property
    def notes(self) -> tuple[str, ...]:
        """What a person should know of the files: lines that were skipped, authorities that were not asked."""
        if self._host.host_key is not None:
            return ()
        authorities = [f"{entry.where}: {_AUTHORITY} is not supported and was not used" for entry in self._authorities]
        return (*self._lookup.notes, *authorities)

    def preferred_key_types(self) -> tuple[str, ...]:
        """Return the signature algorithms of the known keys, to be negotiated before all others; maybe none.

        Never raises: what is wrong with the files is said by :meth:`verify`.
        """
        try:
            types = self._known_types()
        except Exception:  # noqa: BLE001 - verify() meets the same error, and refuses
            return ()
        ranked = sorted(types, key=lambda kind: (_RANK.index(kind) if kind in _RANK else len(_RANK), kind))
        return tuple(algorithm for kind in ranked for algorithm in _ALGORITHMS.get(kind, (kind,)))

    def verify(self, key_type: str, key_blob: bytes) -> str:
        """Return where the key that the host shows is known from: ``file:line`` or ``hosts.yaml``.

        Args:
            key_type: as negotiated, a key type or one of its signature algorithms.
            key_blob: the public key in SSH wire format.

        Raises:
            UnknownHostKey: no line stands for the host, or only an authority does.
            ChangedHostKey: other keys are known for it.
            HostKeyError: it is revoked, a certificate, not the pinned one, or the check failed.
        """
        try:
            return self._verify(key_type, key_blob)
        except HostKeyError:
            raise
        except Exception as error:
            raise self._refusal(
                f"the host key of {self._place} could not be checked: {type(error).__name__}: {error}",
                hint="nothing was sent to the host",
            ) from error

    @cached_property
    def _lookup(self) -> Lookup:
        settings = self._settings
        files = (*settings.user_known_hosts, *settings.global_known_hosts, self._own)
        # The other names only tell of revoked keys, and that the key is known by them.
        return look_up(files, tuple(dict.fromkeys((self._name, settings.hostname.lower()))))

    @property
    def _authorities(self) -> list[Entry]:
        return [
            entry for entry in self._lookup.entries if entry.name == self._name and entry.line.marker == _AUTHORITY
        ]

    @property
    def _place(self) -> str:
        settings = self._settings
        alias = f", looked up as {self._name}" if settings.host_key_alias is not None else ""
        return f"{settings.hostname} port {settings.port}{alias}"

    def _known_types(self) -> set[str]:
        pinned = self._host.host_key
        if pinned is None:
            return {entry.line.key_type for entry in self.known}
        kind, _, encoded = pinned.partition(" ")
        return {kind} if encoded else set()

    def _verify(self, key_type: str, blob: bytes) -> str:
        actual = blob_type(blob)
        if key_type not in {actual, *_ALGORITHMS.get(actual, ())}:
            raise ValueError(f"the host announced a key of type {key_type} and shows one of type {actual}")
        if "-cert-v0" in actual:
            raise self._refusal(
                f"{self._place} shows a host certificate, which is not supported yet",
                hint=f"let the host offer a plain key too, then: rdiag trust {self._host.name}",
            )
        if self._host.host_key is not None:
            return self._verify_pinned(self._host.host_key, actual, blob)
        self._refuse_revoked(actual, blob)
        for entry in self.known:
            if entry.blob == blob:
                return entry.where
        if self.known:
            raise self._changed(actual, blob)
        raise self._unknown(actual, blob)

    def _verify_pinned(self, pinned: str, kind: str, blob: bytes) -> str:
        shown = fingerprint(blob)
        _, _, encoded = pinned.partition(" ")
        expected = fingerprint(base64.b64decode(encoded, validate=True)) if encoded else pinned
        if expected == shown:
            return PINNED
        hint = f"compare with `{on_the_host(kind)}`, run on the host; then correct host_key ({self._host.source})"
        if not encoded:
            hint += "\nif the pinned key is of another type, pin it as `type base64`, so that this type is asked for"
        raise self._refusal(
            f"{self._place} shows the key {kind} {shown}, but hosts.yaml pins {expected} ({self._host.source})",
            hint=hint,
        )

    def _refuse_revoked(self, kind: str, blob: bytes) -> None:
        for entry in self._lookup.entries:
            if entry.line.marker == _REVOKED and entry.blob == blob:
                raise self._refusal(
                    f"the key of {self._place} is revoked: {entry.described}",
                    hint=_NEW_KEY_HINT,
                )
        file = self._settings.revoked_host_keys
        if file is None:
            return
        from .revocation import is_revoked

        if is_revoked(file, kind, blob):
            raise self._refusal(
                f"the key of {self._place} is revoked: {kind} {fingerprint(blob)} is in {file}",
                hint=f"RevokedHostKeys in the ssh configuration names this file; {_NEW_KEY_HINT}",
            )

    def _changed(self, kind: str, blob: bytes) -> ChangedHostKey:
        first, *others = self.known
        steps = [
            "somebody may be answering in place of the host, or it was installed anew: ask its administrator",
            f"and compare with `{on_the_host(kind)}`, run on the host; only then:",
            *_removals(self.known, self._own, self._name, self._host.name),
        ]
        error = ChangedHostKey(
            f"the key of {self._place} has changed: it shows {kind} {fingerprint(blob)}, known is {first.described}",
            host=self._host.name,
            hint="\n".join(steps),
            details=tuple(f"known too: {entry.described}" for entry in others),
        )
        error.known = self.known
        return error

    def _unknown(self, kind: str, blob: bytes) -> UnknownHostKey:
        name = self._host.name
        shown = f"{kind} {fingerprint(blob)}"
        compare = f"compare it with `{on_the_host(kind)}`, run on the host"
        if self._authorities:
            return UnknownHostKey(
                f"the key of {self._place}, {shown}, is known by an authority only ({self._authorities[0].where}), "
                "and certificates of hosts are not supported yet",
                host=name,
                hint=f"`rdiag trust {name}` records the key itself; {compare}",
            )
        elsewhere = tuple(entry for entry in self._lookup.entries if entry.blob == blob and not entry.line.marker)
        also = f"; the same key is known as {elsewhere[0].name} ({elsewhere[0].where})" if elsewhere else ""
        error = UnknownHostKey(
            f"the key of {self._place} is not known: {shown}{also}",
            host=name,
            hint=f"`rdiag trust {name}` shows and records it; {compare}",
        )
        error.elsewhere = elsewhere
        return error

    def _refusal(self, message: str, *, hint: str) -> HostKeyError:
        return HostKeyError(message, host=self._host.name, hint=hint)


def on_the_host(kind: str) -> str:
    """Return the command that shows, on the host itself, the fingerprint of its key of type ``kind``."""
    name = _KEY_FILES.get(kind, "ecdsa" if kind.startswith("ecdsa-") else "*")
    return f"ssh-keygen -lf /etc/ssh/ssh_host_{name}_key.pub"


def _removals(entries: Sequence[Entry], own: Path, name: str, host: str) -> Iterator[str]:
    """Yield what to do about each file that holds another key; never done by rdiag, except for its own file."""
    import shlex

    for path in dict.fromkeys(entry.path for entry in entries):
        here = [entry for entry in entries if entry.path == path]
        if path == own:
            yield f"rdiag trust {host} --replace"
        elif all(entry.line.names_one_host for entry in here):
            yield f"ssh-keygen -R '{name}' -f {shlex.quote(str(path))}"
        else:
            yield f"edit {', '.join(entry.where for entry in here)}"
    if any(entry.path != own for entry in entries):
        yield f"rdiag trust {host}"
