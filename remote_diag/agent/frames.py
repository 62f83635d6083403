r"""Frames: how the client and the agent talk over a stream that others may write to.

A frame is one header line, the payload, and a newline::

    RDIAG1 <nonce> <sequence> <kind> <payload bytes> <crc32 of the payload, 8 hex digits>\n<payload>\n

The nonce (32 hex digits) is chosen by the client for one run, so whatever a login script prints, or a forged
line, is no frame. The sequence counts from 0 in each direction; a gap means that something was lost.
"""

from __future__ import annotations

import zlib

TYPE_CHECKING = False
if TYPE_CHECKING:  # ``typing`` alone would cost the agent 2 ms of its start.
    from typing import Iterator

MAGIC = b"RDIAG1"
MAX_PAYLOAD = 8 * 1024 * 1024
"""Largest payload of one frame, bytes; a result must fit into one frame."""
MAX_NOISE = 64 * 1024
"""How many bytes that are no frames are kept for diagnosis."""
_MAX_HEADER = 128
_KIND_CHARACTERS = frozenset(b"abcdefghijklmnopqrstuvwxyz-")


class Frame:
    """One decoded frame.

    Args:
        sequence: its number in its direction, from 0.
        kind: what it says, such as ``end``.
        payload: the bytes it carries.
    """

    __slots__ = ("kind", "payload", "sequence")

    def __init__(self, sequence: int, kind: str, payload: bytes) -> None:
        self.sequence = sequence
        self.kind = kind
        self.payload = payload

    def __eq__(self, other: object) -> bool:
        """Whether ``other`` is a frame of the same content."""
        return isinstance(other, Frame) and self._key() == other._key()

    def __hash__(self) -> int:
        """Hash over the content."""
        return hash(self._key())

    def __repr__(self) -> str:
        """Show the frame, its payload cut short."""
        return "Frame(%d, %r, %r)" % (self.sequence, self.kind, self.payload[:100])

    def _key(self) -> tuple[int, str, bytes]:
        return self.sequence, self.kind, self.payload


class FrameError(ValueError):
    """The stream carries our nonce but is damaged: nothing after this point can be trusted."""


def encode(nonce: str, sequence: int, kind: str, payload: bytes = b"") -> bytes:
    """Return one frame as bytes; raise ValueError when ``payload`` exceeds :data:`MAX_PAYLOAD`."""
    if len(payload) > MAX_PAYLOAD:
        raise ValueError("a frame of %d bytes exceeds %d" % (len(payload), MAX_PAYLOAD))
    header = b"%s %s %d %s %d %08x\n" % (
        MAGIC,
        nonce.encode("ascii"),
        sequence,
        kind.encode("ascii"),
        len(payload),
        zlib.crc32(payload) & 0xFFFFFFFF,
    )
    return header + payload + b"\n"


class Decoder:
    """Takes bytes in pieces of any size and gives frames.

    Bytes outside frames are counted in ``noise_bytes``, and the first :data:`MAX_NOISE` of them kept in ``noise``.
    Memory stays under ``max_payload`` plus a piece.

    Args:
        nonces: the nonces accepted, 32 hex digits each; sequences are checked for each one by itself.
        max_payload: refuse frames that announce more bytes than this.
    """

    def __init__(self, *nonces: str, max_payload: int = MAX_PAYLOAD) -> None:
        self._expected = {}
        for nonce in nonces:
            self._expected[nonce.encode("ascii")] = 0
        self._max_payload = max_payload
        self._buffer = bytearray()
        self._header = None  # type: tuple[bytes, int, str, int, int] | None
        self.noise = bytearray()
        self.noise_bytes = 0

    @property
    def inside_frame(self) -> bool:
        """Whether a header was read whose payload has not arrived in full."""
        return self._header is not None

    def feed(self, data: bytes) -> Iterator[Frame]:
        """Add ``data`` and yield the frames it completes; raise FrameError when one of ours is damaged."""
        self._buffer += data
        while True:
            if self._header is None and not self._find_header():
                return
            frame = self._take_payload()
            if frame is None:
                return
            yield frame

    def rest(self) -> bytes:
        """Return what was fed and is neither frame nor counted noise yet: the tail of the stream at its end."""
        return bytes(self._buffer)

    def _drop_noise(self, count: int) -> None:
        self.noise_bytes += count
        room = MAX_NOISE - len(self.noise)
        if room > 0:
            self.noise += self._buffer[: min(count, room)]
        del self._buffer[:count]

    def _find_header(self) -> bool:
        start = 0
        while True:
            start = self._buffer.find(MAGIC + b" ", start)
            if start < 0:
                # The tail may be the beginning of a magic word cut in two.
                self._drop_noise(max(0, len(self._buffer) - len(MAGIC)))
                return False
            end = self._buffer.find(b"\n", start, start + _MAX_HEADER)
            if end < 0 and len(self._buffer) - start < _MAX_HEADER:
                self._drop_noise(start)
                return False
            if end >= 0:
                header = self._parse(bytes(self._buffer[start:end]))
                if header is not None:
                    self._drop_noise(start)
                    del self._buffer[: end - start + 1]
                    self._header = header
                    return True
            start += len(MAGIC)

    def _parse(self, line: bytes) -> "tuple[bytes, int, str, int, int] | None":
        parts = line.split(b" ")
        if len(parts) < 2 or parts[1] not in self._expected:
            return None
        if len(parts) != 6:
            raise FrameError("a frame header has %d fields instead of 6" % len(parts))
        _, nonce, sequence, kind, length, crc = parts
        if not (sequence.isdigit() and length.isdigit() and len(sequence) <= 10 and len(length) <= 10):
            raise FrameError("a frame header holds a number that is none")
        if len(crc) != 8 or not kind or not set(kind) <= _KIND_CHARACTERS:
            raise FrameError("a frame header is damaged")
        try:
            checksum = int(crc, 16)
        except ValueError:
            raise FrameError("a frame header holds a checksum that is none") from None
        if int(sequence) != self._expected[nonce]:
            raise FrameError("frame %d arrived where %d was due" % (int(sequence), self._expected[nonce]))
        if int(length) > self._max_payload:
            raise FrameError("a frame announces %d bytes; %d are allowed" % (int(length), self._max_payload))
        self._expected[nonce] += 1
        return nonce, int(sequence), kind.decode("ascii"), int(length), checksum

    def _take_payload(self) -> "Frame | None":
        assert self._header is not None  # noqa: S101 - only called with a header read
        _, sequence, kind, length, checksum = self._header
        if len(self._buffer) < length + 1:
            return None
        with memoryview(self._buffer) as whole, whole[:length] as part:
            payload = bytes(part)
        if self._buffer[length] != 0x0A or zlib.crc32(payload) & 0xFFFFFFFF != checksum:
            raise FrameError("frame %d (%s) is damaged" % (sequence, kind))
        del self._buffer[: length + 1]
        self._header = None
        return Frame(sequence, kind, payload)


class Encoder:
    """Numbers the frames of one direction."""

    def __init__(self, nonce: str) -> None:
        self._nonce = nonce
        self._sequence = 0

    def encode(self, kind: str, payload: bytes = b"") -> bytes:
        """Return the next frame."""
        data = encode(self._nonce, self._sequence, kind, payload)
        self._sequence += 1
        return data
