"""What a private-key file says without its passphrase: whether it needs one, and which public key belongs to it."""

from __future__ import annotations

import base64
import binascii
import struct
from dataclasses import dataclass
from pathlib import Path

_MAX_FILE = 64 * 1024
_MAGIC = b"openssh-key-v1\0"


@dataclass(frozen=True)
class KeyFile:
    """A file named by IdentityFile."""

    path: Path
    encrypted: bool = False
    private: bool = True
    """False for a file that holds only the public key, whose private half an agent has."""
    public: bytes | None = None
    """The public key as it is sent over the wire, where the file (or the ``.pub`` beside it) tells."""
    problem: str | None = None
    """Why the file is of no use; None when it is of use."""


def read(path: Path) -> KeyFile:
    """Return what the file at ``path`` says; a file that cannot be used has a ``problem``."""
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_FILE + 1)
    except FileNotFoundError:
        public = _public_beside(path)
        if public is not None:
            return KeyFile(path, private=False, public=public)
        return KeyFile(path, problem="does not exist")
    except OSError as error:
        return KeyFile(path, problem=f"cannot be read: {error.strerror}")
    if len(data) > _MAX_FILE:
        return KeyFile(path, problem="is no key file: too large")
    if b"-----BEGIN OPENSSH PRIVATE KEY-----" in data:
        return _openssh(path, data)
    if b"PRIVATE KEY-----" in data:
        return KeyFile(path, encrypted=b"ENCRYPTED" in data, public=_public_beside(path))
    public = _public_line(data)
    if public is not None:
        return KeyFile(path, private=False, public=public)
    return KeyFile(path, problem="holds no private key that is understood here")


def _openssh(path: Path, data: bytes) -> KeyFile:
    """Read the unencrypted head of the format in OpenSSH's PROTOCOL.key."""
    try:
        body = data.split(b"-----BEGIN OPENSSH PRIVATE KEY-----", 1)[1].split(b"-----END", 1)[0]
        blob = base64.b64decode(body)
        cipher, rest = _string(blob.removeprefix(_MAGIC))
        _, rest = _string(rest)
        _, rest = _string(rest)
        public, _ = _string(rest[4:])
    except (ValueError, IndexError, struct.error, binascii.Error):
        return KeyFile(path, problem="is a damaged key file")
    return KeyFile(path, encrypted=cipher != b"none", public=public)


def _string(data: bytes) -> tuple[bytes, bytes]:
    (length,) = struct.unpack(">I", data[:4])
    if length > len(data) - 4:
        raise ValueError
    return data[4 : 4 + length], data[4 + length :]


def _public_beside(path: Path) -> bytes | None:
    try:
        with path.with_name(path.name + ".pub").open("rb") as file:
            return _public_line(file.read(_MAX_FILE))
    except OSError:
        return None


def _public_line(data: bytes) -> bytes | None:
    """Return the key of a line such as ``ssh-ed25519 AAAA... comment``."""
    words = data.split(b"\n", 1)[0].split()
    if len(words) < 2:
        return None
    try:
        blob = base64.b64decode(words[1], validate=True)
        name, _ = _string(blob)
    except (ValueError, struct.error, binascii.Error):
        return None
    return blob if name == words[0] else None
