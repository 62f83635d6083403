"""Reading files that a person named, without being held up by what is no file."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from .errors import ConfigError

MAX_BYTES = 1024 * 1024
"""Largest file that is read unless the caller says otherwise."""


def read_file(path: Path, *, limit: int = MAX_BYTES) -> bytes:
    """Return the bytes of a regular file; never blocks on a FIFO or a device.

    Raises:
        ConfigError: ``path`` is missing, unreadable, no regular file, or larger than ``limit`` bytes.
    """
    try:
        # Looked at before it is opened: opening a FIFO would release whoever waits to write into it.
        _require_regular(path, os.stat(path))  # noqa: PTH116 - the same call as fstat below, on a path
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as stream:
            _require_regular(path, os.fstat(descriptor))
            data = stream.read(limit + 1)
    except FileNotFoundError:
        raise ConfigError(f"{path}: there is no such file", hint="check the path") from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigError(f"{path}: cannot be read: {reason}", hint="check the path and its permissions") from None
    if len(data) > limit:
        raise ConfigError(
            f"{path}: larger than {limit} bytes", hint="this is not a file that a person wrote; check the path"
        )
    return data


def _require_regular(path: Path, status: os.stat_result) -> None:
    if stat.S_ISREG(status.st_mode):
        return
    kind = "a folder" if stat.S_ISDIR(status.st_mode) else "a pipe, a socket or a device"
    raise ConfigError(f"{path}: is {kind}, not a file", hint="name a regular file")
