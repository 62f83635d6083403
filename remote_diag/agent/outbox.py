"""What the agent still has to tell the client, bounded, written without ever blocking."""

from __future__ import annotations

import errno
import os

from .frames import Encoder

_HIGH_WATER = 1 << 20
_CHUNK = 1 << 16


class Outbox:
    """Frames on their way to a descriptor that may be slow, stuck or gone."""

    def __init__(self, descriptor: int, nonce: str) -> None:
        self._descriptor = descriptor
        self._encoder = Encoder(nonce)
        self._pending = bytearray()
        self.gone = False
        """Whether the reader has closed its end."""

    def put(self, kind: str, payload: bytes = b"") -> None:
        """Queue one frame."""
        if not self.gone:
            self._pending += self._encoder.encode(kind, payload)

    @property
    def empty(self) -> bool:
        """Whether everything was written."""
        return not self._pending

    @property
    def full(self) -> bool:
        """Whether the sources of further frames should wait."""
        return len(self._pending) >= _HIGH_WATER

    def flush(self) -> None:
        """Write what the descriptor takes now."""
        while self._pending:
            try:
                written = os.write(self._descriptor, self._pending[:_CHUNK])
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno == errno.EINTR:
                    continue
                self.abandon()
                return
            del self._pending[:written]

    def abandon(self) -> None:
        """Forget everything: nobody reads it any more."""
        self.gone = True
        self._pending.clear()
