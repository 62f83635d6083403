"""RevokedHostKeys of ssh_config: keys that no host may use any more, as a list of keys or as a binary revocation list."""

from __future__ import annotations

import base64
import binascii
import os
import stat
import subprocess
import tempfile
from pathlib import Path

from .ssh_config import abandon

FILE_LIMIT = 64 * 1024 * 1024
"""Bytes of a revocation file."""
TIME_LIMIT = 5.0
"""Seconds that ssh-keygen may take to look into a binary list."""
_BINARY = b"SSHKRL\n\0"


def is_revoked(file: Path, key_type: str, blob: bytes) -> bool:
    """Tell whether ``file`` holds a key.

    Args:
        file: one public key a line, or OpenSSH's binary format (PROTOCOL.krl), which ssh-keygen reads.
        key_type: type of the key.
        blob: the public key in SSH wire format.

    Raises:
        OSError, ValueError: nobody can tell, because the file is missing or not readable. ssh then refuses every
            host, and so must the caller.
    """
    descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as stream:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ValueError(f"{file} is not a regular file")
        data = stream.read(FILE_LIMIT + 1)
    if len(data) > FILE_LIMIT:
        raise ValueError(f"{file} is larger than {FILE_LIMIT // 1024**2} MB")
    if data.startswith(_BINARY):
        return _in_binary_list(file, key_type, blob)
    return any(_key(line) == blob for line in data.split(b"\n"))


def _key(line: bytes) -> bytes | None:
    fields = line.split(None, 2)
    if len(fields) < 2 or fields[0].startswith(b"#"):
        return None
    try:
        return base64.b64decode(fields[1])
    except binascii.Error:
        return None


def _in_binary_list(file: Path, key_type: str, blob: bytes) -> bool:
    with tempfile.NamedTemporaryFile(prefix="rdiag-", suffix=".pub") as key:
        key.write(f"{key_type} {base64.b64encode(blob).decode()}\n".encode())
        key.flush()
        process = subprocess.Popen(
            ["ssh-keygen", "-Q", "-f", os.fspath(file), key.name],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            return process.wait(TIME_LIMIT) != 0
        except subprocess.TimeoutExpired:
            raise ValueError(f"ssh-keygen did not look into {file} within {TIME_LIMIT:g} s") from None
        finally:
            abandon(process)
