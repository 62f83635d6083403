"""One command on an ssh host: bytes in both directions, bounded in size and time."""

from __future__ import annotations

import contextlib
import threading
import time
from typing import TYPE_CHECKING, Any

from ..errors import ConnectionLost

if TYPE_CHECKING:
    import paramiko

MAX_RECEIVED = 256 * 1024
"""Bytes of each stream that one ``receive`` returns at most."""
SEND_TIMEOUT = 30.0
"""Seconds that the host may take to accept any byte of its stdin before it counts as gone."""


class _Bell(threading.Event):
    """Rung by paramiko's buffers when bytes or the end of a stream arrive; only its owner silences it.

    paramiko clears the event as soon as *one* of the two buffers is empty, which would hide bytes in the other.
    """

    def clear(self) -> None:
        """Do nothing; see :meth:`silence`."""

    def silence(self) -> None:
        """Forget earlier rings."""
        super().clear()


class SshChannel:
    """A command over a paramiko channel; satisfies :class:`remote_diag.transport.base.Channel`."""

    def __init__(self, channel: paramiko.Channel, host: str) -> None:
        self._channel: Any = channel
        self._host = host
        self._bell = _Bell()
        self._closed = False
        channel.settimeout(SEND_TIMEOUT)
        self._channel.in_buffer.set_event(self._bell)
        self._channel.in_stderr_buffer.set_event(self._bell)

    def send(self, data: bytes) -> None:
        """Write all of ``data`` to the command's stdin; raise ConnectionLost when nobody reads it any more."""
        view = memoryview(data)
        while view:
            try:
                sent = self._channel.send(bytes(view[: 64 * 1024]))
            except TimeoutError:
                raise self._lost(f"the host did not read its input for {SEND_TIMEOUT:.0f} s") from None
            except (OSError, EOFError):
                sent = 0
            if sent == 0:
                raise self._lost("the command no longer reads its input")
            view = view[sent:]

    def send_eof(self) -> None:
        """Close the command's stdin; harmless when repeated or when the command has ended."""
        with contextlib.suppress(OSError, EOFError):
            self._channel.shutdown_write()

    def receive(self, timeout: float) -> tuple[bytes, bytes] | None:
        """Return what arrived on (stdout, stderr); see :meth:`remote_diag.transport.base.Channel.receive`."""
        deadline = time.monotonic() + timeout
        while True:
            self._bell.silence()
            # Read in this order: what is seen here was complete before the buffers are looked at.
            ended = self._channel.eof_received
            cut = self._channel.closed
            out = self._taken(self._channel.recv_ready, self._channel.recv)
            err = self._taken(self._channel.recv_stderr_ready, self._channel.recv_stderr)
            if out or err:
                return out, err
            if ended:
                return None
            if cut:
                # Closed, and never at its end: a server that says how the command ended has ended it properly.
                if self._channel.exit_status >= 0 and not self._closed:
                    return None
                raise self._lost(
                    "the channel is closed" if self._closed else "the connection ended before the command did"
                )
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                return b"", b""
            self._bell.wait(remaining)

    def exit_status(self, timeout: float) -> int | None:
        """Return the exit status, None when it is not known in time, after a signal, after a lost connection."""
        self._channel.status_event.wait(timeout)
        status: int = self._channel.exit_status
        return status if status >= 0 else None

    def close(self) -> None:
        """End the channel; idempotent, never raises."""
        self._closed = True
        with contextlib.suppress(Exception):
            self._channel.close()

    def _taken(self, ready: Any, take: Any) -> bytes:
        data: bytes = take(MAX_RECEIVED) if ready() else b""
        return data

    def _lost(self, cause: str) -> ConnectionLost:
        return ConnectionLost(cause, host=self._host, retryable=True)
