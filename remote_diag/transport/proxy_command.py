"""ProxyCommand of the user's own ssh_config: a process whose stdin and stdout are the connection."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import tempfile

from ..text import last_lines


class ProxyProcess:
    """The process, as a socket; see :class:`remote_diag.transport.sockets.RawSocket`.

    Its stdin and stdout are one end of a socket pair, so reading has a real end and real time limits, which
    paramiko's own wrapper around a pipe lacks.

    Args:
        command: the command line for ``/bin/sh``, tokens replaced; never anything but the user's own ssh_config.
    """

    def __init__(self, command: str) -> None:
        self._socket, theirs = socket.socketpair()
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        try:
            self._process = subprocess.Popen(
                ["/bin/sh", "-c", f"exec {command}"],
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                stderr=self._errors,
                # Ctrl-C is for rdiag, which still has to say goodbye through this process.
                start_new_session=True,
            )
        except BaseException:
            self._socket.close()
            self._errors.close()
            raise
        finally:
            theirs.close()

    @property
    def pid(self) -> int:
        """The process and its group."""
        return self._process.pid

    def send(self, data: bytes, /) -> int:
        """Write some of ``data``."""
        return self._socket.send(data)

    def recv(self, size: int, /) -> bytes:
        """Read at most ``size`` bytes; nothing means that the process has closed its output."""
        return self._socket.recv(size)

    def settimeout(self, seconds: float | None, /) -> None:
        """Bound every later ``send`` and ``recv``."""
        self._socket.settimeout(seconds)

    def last_words(self) -> tuple[str, ...]:
        """Return the last lines that the process wrote to stderr, escaped."""
        try:
            size = os.fstat(self._errors.fileno()).st_size
            tail = os.pread(self._errors.fileno(), 16 * 1024, max(0, size - 16 * 1024))
        except (OSError, ValueError):
            return ()
        return tuple(f"ProxyCommand: {line}" for line in last_lines(tail))

    def close(self) -> None:
        """End the process and its group, and reap it; idempotent."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        try:
            self._process.wait(0.2)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(0.5)
