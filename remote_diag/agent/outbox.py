"""What the agent still has to tell the client, bounded, written without ever blocking."""

from __future__ import annotations

import errno
import os

from .frames import Encoder

_HIGH_WATER = 1 << 20
_AT_ONCE = 64


class Outbox:
    """Frames on their way to a descriptor that may be slow, stuck or gone."""

    def __init__(self, descriptor: int, nonce: str) -> None:
        self._descriptor = descriptor
        self._encoder = Encoder(nonce)
        self._pending: list[memoryview] = []
        self._size = 0
        self.gone = False
        """Whether the reader has closed its end."""

    def put(self, kind: str, payload: bytes = b"") -> None:
        """Queue one frame."""
        if not self.gone:
            frame = self._encoder.encode(kind, payload)
            self._pending.append(memoryview(frame))
            self._size += len(frame)

    @property
    def empty(self) -> bool:
        """Whether everything was written."""
        return not self._pending

    @property
    def full(self) -> bool:
        """Whether the sources of further frames should wait."""
        return self._size >= _HIGH_WATER

    def flush(self) -> None:
        """Write what the descriptor takes now."""
        while self._pending:
            try:
                written = os.writev(self._descriptor, self._pending[:_AT_ONCE])
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno == errno.EINTR:
                    continue
                self.abandon()
                return
            self._drop(written)

    def _drop(self, count: int) -> None:
        """Forget the first ``count`` bytes."""
        self._size -= count
        whole = 0
        while whole < len(self._pending) and count >= len(self._pending[whole]):
            count -= len(self._pending[whole])
            whole += 1
        del self._pending[:whole]
        if count:
            self._pending[0] = self._pending[0][count:]

    def abandon(self) -> None:
        """Forget everything: nobody reads it any more."""
        self.gone = True
        self._pending.clear()
        self._size = 0
