"""One conversation with one agent: the entry line, the frames in both directions, and the liveness of both ends."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator

from .agent.frames import Decoder, Encoder, Frame, FrameError
from .agent.protocol import CHECK_AGENT, CHECK_WHOLE
from .errors import ConnectionLost
from .text import safe
from .transport.base import Channel

BEAT_EVERY = 5.0
"""Seconds between two beats; the agent answers each."""
SILENCE_LIMIT = 15.0
"""Seconds without any frame from the agent after which the connection counts as lost."""
_STDERR_KEPT = 16 * 1024


class EntryFailed(Exception):
    """The command ended before an agent said hello."""

    def __init__(self, exit_status: int | None, stderr: bytes, noise: bytes) -> None:
        super().__init__("no agent answered")
        self.exit_status = exit_status
        self.stderr = stderr
        self.noise = noise


class AgentLink:
    """Frames over a channel.

    Args:
        channel: where ``enter`` was started.
        host: inventory name, for errors.
    """

    def __init__(self, channel: Channel, host: str) -> None:
        self._channel = channel
        self._host = host
        self._entry_nonce = os.urandom(16).hex()
        self._run_nonce = os.urandom(16).hex()
        self._decoder = Decoder(self._entry_nonce, self._run_nonce)
        self._encoder = Encoder(self._run_nonce)
        self._pending: list[Frame] = []
        self._ended = False
        self._last_heard = time.monotonic()
        self._last_beat = time.monotonic()
        self.stderr = bytearray()

    def greet(self) -> None:
        """Send the entry line; what is written to a command that already ended is lost, which is fine."""
        try:
            self._channel.send(f"{self._entry_nonce}\n".encode())
        except ConnectionLost:
            # The reading side tells more about why nobody listens.
            return

    def require(self, *, library: bool) -> None:
        """Say what must be undamaged before the agent says hello: its own files, and the shared probe code or not."""
        with contextlib.suppress(ConnectionLost):
            self._channel.send(f"{CHECK_WHOLE if library else CHECK_AGENT}\n".encode())

    def begin(self) -> None:
        """Tell the agent the nonce of the run; frames may be sent from here on."""
        self._channel.send(f"{self._run_nonce}\n".encode())
        self._last_heard = self._last_beat = time.monotonic()

    def send(self, kind: str, payload: bytes = b"") -> None:
        """Send one frame."""
        self._channel.send(self._encoder.encode(kind, payload))

    @property
    def noise(self) -> bytes:
        """The first bytes that others wrote between the frames: login scripts, mostly."""
        return bytes(self._decoder.noise)

    @property
    def noise_bytes(self) -> int:
        """How many bytes others wrote between the frames."""
        return self._decoder.noise_bytes

    def first(self, deadline: float) -> Frame:
        """Return the first frame; raise EntryFailed when the command ends without one, ConnectionLost at ``deadline``."""
        while True:
            frames = self._receive(deadline)
            if frames:
                # A request that went ahead may be answered right behind the first frame.
                self._pending = frames[1:]
                return frames[0]
            if self._ended:
                # The end of what it said may be held back still, as the possible beginning of a frame.
                others = self.noise + self._decoder.rest()
                raise EntryFailed(self._channel.exit_status(2.0), bytes(self.stderr), others)
            if time.monotonic() >= deadline:
                others = self.noise + self._decoder.rest()
                said = "nothing"
                if others:
                    count = self.noise_bytes + len(self._decoder.rest())
                    said = f"nothing but {count} bytes from others, which begin '{safe(others[:60])}'"
                raise ConnectionLost(
                    f"the host accepted the command and then said {said}",
                    host=self._host,
                    phase="start",
                    hint="a login script may be waiting for input, or the host is overloaded; see rdiag check "
                    + self._host,
                    retryable=True,
                )

    def frames(self, deadline: float) -> Iterator[Frame]:
        """Yield frames until the streams end; keep both ends informed that the other is there.

        Raises ConnectionLost when nothing was heard for :data:`SILENCE_LIMIT` seconds, when a frame is damaged,
        and when ``deadline`` passes.
        """
        while True:
            yield from self._receive(deadline)
            if self._ended:
                return
            now = time.monotonic()
            if now - self._last_beat >= BEAT_EVERY:
                self._last_beat = now
                self.send("beat")
            if now - self._last_heard > SILENCE_LIMIT:
                raise self._lost(f"nothing was heard from the host for {SILENCE_LIMIT:.0f} s")
            if now >= deadline:
                raise self._lost("the agent did not end in time")

    def close(self) -> None:
        """End the channel; the agent takes that as the order to end everything of this run."""
        self._channel.close()

    def _lost(self, cause: str) -> ConnectionLost:
        return ConnectionLost(
            cause,
            host=self._host,
            hint="whether the probe finished is not known; the agent ends what it started within its lease",
            retryable=True,
        )

    def _receive(self, deadline: float) -> list[Frame]:
        if self._pending:
            pending, self._pending = self._pending, []
            return pending
        wait = max(0.0, min(1.0, deadline - time.monotonic()))
        received = self._channel.receive(wait)
        if received is None:
            self._ended = True
            if self._decoder.inside_frame:
                raise self._lost("the connection ended in the middle of a frame")
            return []
        stdout, stderr = received
        if stderr and len(self.stderr) < _STDERR_KEPT:
            self.stderr += stderr[: _STDERR_KEPT - len(self.stderr)]
        if not stdout:
            return []
        try:
            frames = list(self._decoder.feed(stdout))
        except FrameError as error:
            raise self._lost(f"the answer is damaged: {error}") from error
        if frames or self._decoder.inside_frame:
            # A large frame may take long on a slow line; its bytes are a sign of life as well.
            self._last_heard = time.monotonic()
        return frames
