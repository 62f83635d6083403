"""One file to a host over SFTP: private from the start, complete or not there at all."""

from __future__ import annotations

import contextlib
import errno
import secrets
from typing import Any

from ..errors import EnvironmentUnfit
from ..host import Host
from . import failures
from .base import SafePath, UploadUnavailable
from .libraries import paramiko
from .requests import REPLY_TIMEOUT, open_session
from .watchdog import Watchdog

_CHUNK = 32 * 1024
"""Bytes of one write request; the most that every server takes."""


def upload(transport: Any, data: bytes, path: SafePath, host: Host) -> None:
    """Create ``path`` holding ``data``; see :meth:`remote_diag.transport.base.Transport.upload`."""
    client = _open(transport, host)
    temporary = f"{path}.{secrets.token_hex(8)}.part"
    try:
        _create(client, temporary, data)
        _rename(client, temporary, path)
    except TimeoutError as error:
        raise failures.no_reply(host, "uploading", REPLY_TIMEOUT) from error
    except (OSError, EOFError, paramiko().SSHException, paramiko().SFTPError) as error:
        if not transport.is_active():
            raise failures.request_failure(error, host, "uploading") from error
        if not isinstance(error, OSError) or str(error) == "Socket is closed":
            raise UploadUnavailable(f"the SFTP server ended: {failures.described(error)}") from error
        with contextlib.suppress(Exception):
            client.remove(temporary)
        raise _unfit(error, path, host) from error
    finally:
        # Kept open, it would hold a session that the server may not allow beside the next command.
        client.close()


def _open(transport: Any, host: Host) -> Any:
    """Return an SFTP client; UploadUnavailable when there is none to be had."""
    channel = open_session(transport, host)
    channel.settimeout(REPLY_TIMEOUT)
    with Watchdog(REPLY_TIMEOUT, channel.close):
        try:
            channel.invoke_subsystem("sftp")
            return paramiko().SFTPClient(channel)
        except (OSError, EOFError, paramiko().SSHException, paramiko().SFTPError, IndexError) as error:
            channel.close()
            if not transport.is_active():
                raise failures.request_failure(error, host, "opening SFTP") from error
            raise UploadUnavailable(f"SFTP does not work: {failures.described(error)}") from error


def _create(client: Any, temporary: str, data: bytes) -> None:
    """Write a new file, readable by nobody else before the first byte is in it."""
    try:
        file = client.open(temporary, "wx", bufsize=0)
    except FileNotFoundError:
        _make_directories(client, temporary.rpartition("/")[0])
        file = client.open(temporary, "wx", bufsize=0)
    try:
        file.chmod(0o600)
        # All requests at once, their answers with the last one: paramiko reports an error of an earlier write only
        # when a later one is not pipelined.
        last = max(0, (len(data) - 1) // _CHUNK * _CHUNK)
        file.set_pipelined(True)
        for start in range(0, last, _CHUNK):
            file.write(data[start : start + _CHUNK])
        file.set_pipelined(False)
        file.write(data[last:])
        if file.stat().st_size != len(data):
            raise OSError(errno.EIO, "the file is incomplete")
    finally:
        file.close()


def _make_directories(client: Any, directory: str) -> None:
    """Make ``directory`` and those above it that are missing, 0700."""
    missing = []
    while directory:
        try:
            client.mkdir(directory, 0o700)
            break
        except FileNotFoundError:
            missing.append(directory)
            directory = directory.rpartition("/")[0]
    for one in reversed(missing):
        # Another session may have made it meanwhile; the caller sees whether it is there.
        with contextlib.suppress(OSError):
            client.mkdir(one, 0o700)


def _rename(client: Any, temporary: str, path: SafePath) -> None:
    try:
        client.posix_rename(temporary, str(path))
    except OSError as error:
        if "unsupported" not in str(error).lower():
            raise
        # Servers other than OpenSSH may not have that extension, and SFTP's own rename does not replace.
        with contextlib.suppress(OSError):
            client.remove(str(path))
        client.rename(temporary, str(path))


def _unfit(error: Exception, path: SafePath, host: Host) -> EnvironmentUnfit:
    # SFTP has one code for a full disk, a quota and all else: "Failure".
    number = error.errno if isinstance(error, OSError) else None
    causes = {errno.EACCES: "permission denied", errno.ENOENT: "a directory on the way does not exist"}
    cause = causes.get(number or 0) or f"the server says '{failures.described(error)}'; no space, inode or quota left?"
    return EnvironmentUnfit(
        f"{path} cannot be written: {cause}",
        host=host.name,
        phase="upload",
        hint="free space or fix permissions there, or set cache_dir in hosts.yaml to a directory that can be written",
    )
