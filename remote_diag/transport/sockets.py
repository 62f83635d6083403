"""Our own way onto the network: a socket that is quick, notices a dead peer, and never waits without a limit.

paramiko is given a :class:`Wire`, so nothing it does happens on a socket it made itself. The identification lines
(RFC 4253, section 4.2) are exchanged here, before paramiko is even imported: what answers is then known to be an
SSH server, whatever it sent was bounded, and the server's key exchange is under way early.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import time
from typing import Protocol

from .. import __version__
from ..errors import UnreachableError
from ..text import safe

IDENTIFICATION = f"SSH-2.0-rdiag_{__version__.replace('-', '_')}"
"""How rdiag introduces itself to a server."""

STAGGER = 0.25
"""Seconds that one address of a host is tried before the next one is tried beside it (RFC 8305)."""
_DEAD_AFTER_MS = 15_000
_MAX_LINE = 8192
_MAX_PREAMBLE = 64 * 1024


class RawSocket(Protocol):
    """The part of a socket that both real sockets and paramiko's channels have."""

    def send(self, data: bytes, /) -> int:
        """Write some of ``data``."""
        ...

    def recv(self, size: int, /) -> bytes:
        """Read at most ``size`` bytes; nothing means the end."""
        ...

    def settimeout(self, seconds: float | None, /) -> None:
        """Bound every later ``send`` and ``recv``."""
        ...

    def close(self) -> None:
        """End it."""
        ...


class Deadline:
    """A point in monotonic time."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._at = time.monotonic() + seconds

    def remaining(self) -> float:
        """Return the seconds left, never negative."""
        return max(0.0, self._at - time.monotonic())

    @property
    def passed(self) -> bool:
        """Whether no time is left."""
        return self.remaining() == 0.0


class NotAnSshServer(Exception):
    """Something answered, and it does not speak SSH."""


class Wire:
    """A connected stream as paramiko wants it: recv, send, settimeout, close.

    Real TCP sockets get TCP_QUICKACK again after each read and write (the kernel forgets it), because sshd leaves
    Nagle's algorithm on until a command starts: it then waits for acknowledgements that a client delays by 40 ms.
    """

    def __init__(self, raw: RawSocket) -> None:
        self._raw = raw
        self._quick = raw if isinstance(raw, socket.socket) and raw.family != socket.AF_UNIX else None
        self._pending = b""
        self._introduced = False
        self._closed = False  # paramiko reads this name
        self.server_identification = ""

    def send(self, data: bytes) -> int:
        """Write some of ``data``; our identification is not sent twice."""
        if self._introduced:
            self._introduced = False
            if bytes(data) == _greeting():
                return len(data)
        sent = self._raw.send(data)
        self._acknowledge()
        return sent

    def recv(self, size: int) -> bytes:
        """Read at most ``size`` bytes; what was read ahead comes first."""
        if self._pending:
            data, self._pending = self._pending[:size], self._pending[size:]
            return data
        try:
            data = self._raw.recv(size)
        except TimeoutError:
            raise
        except OSError:
            if self._closed:
                return b""
            raise
        self._acknowledge()
        return data

    def settimeout(self, seconds: float | None) -> None:
        """Bound every later ``send`` and ``recv``."""
        self._raw.settimeout(seconds)

    def close(self) -> None:
        """End the stream, and wake whoever waits on it in another thread."""
        self._closed = True
        if isinstance(self._raw, socket.socket):
            # close() alone leaves a thread that polls the socket asleep until its poll ends.
            with contextlib.suppress(OSError):
                self._raw.shutdown(socket.SHUT_RDWR)
        with contextlib.suppress(Exception):
            self._raw.close()

    def exchange_identification(self, deadline: Deadline) -> None:
        """Introduce ourselves and read the server's identification line; it stays readable for paramiko.

        Raises:
            NotAnSshServer: something else answered, or too much came before the line.
            EOFError: the connection ended before the line did.
            TimeoutError: ``deadline`` passed.
            OSError: the connection broke.
        """
        greeting = _greeting()
        self.settimeout(deadline.remaining() or 0.001)
        while greeting:
            greeting = greeting[self._raw.send(greeting) :]
        self._introduced = True
        received = bytearray()
        start = 0
        while True:
            end = received.find(b"\n", start)
            if end < 0:
                if len(received) - start > _MAX_LINE or len(received) > _MAX_PREAMBLE:
                    raise NotAnSshServer(_described(received))
                self._read_more(received, deadline)
                continue
            line = bytes(received[start:end]).rstrip(b"\r")
            if line.startswith(b"SSH-"):
                break
            if line.startswith((b"HTTP/", b"220 ", b"* OK", b"+OK")):
                raise NotAnSshServer(_described(received))
            start = end + 1
        self.server_identification = line.decode("utf-8", "backslashreplace")
        self._pending = bytes(received[start:])

    def _read_more(self, received: bytearray, deadline: Deadline) -> None:
        if deadline.passed:
            raise TimeoutError
        self._raw.settimeout(deadline.remaining() or 0.001)
        data = self._raw.recv(4096)
        self._acknowledge()
        if not data:
            raise EOFError(_described(received) if received else "")
        received += data

    def _acknowledge(self) -> None:
        if self._quick is not None and not self._closed:
            with contextlib.suppress(OSError):
                self._quick.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)


def _greeting() -> bytes:
    return IDENTIFICATION.encode("ascii") + b"\r\n"


def _described(received: bytes | bytearray) -> str:
    first = bytes(received[:512]).split(b"\n", 1)[0].rstrip(b"\r")
    return safe(first, limit=100)


def lookup(name: str, port: int, *, host: str | None = None) -> list[tuple[socket.AddressFamily, tuple[object, ...]]]:
    """Return (family, address) of ``name``, in the order to try them.

    Raises:
        UnreachableError: the name has no address; phase ``resolve``.
    """
    try:
        found = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)
    except (socket.gaierror, UnicodeError) as error:
        temporary = isinstance(error, socket.gaierror) and error.errno == socket.EAI_AGAIN
        cause = error.strerror if isinstance(error, socket.gaierror) and error.strerror else "not a valid host name"
        raise UnreachableError(
            f"the name {name} has no address (DNS: {cause})",
            host=host,
            phase="resolve",
            hint="check address (or HostName in ~/.ssh/config), and the network of this machine",
            retryable=temporary,
        ) from None
    addresses: list[tuple[socket.AddressFamily, tuple[object, ...]]] = []
    for family, _, _, _, address in found:
        if (family, address) not in addresses:
            addresses.append((family, address))
    return addresses


def connect(
    addresses: list[tuple[socket.AddressFamily, tuple[object, ...]]], deadline: Deadline
) -> socket.socket:
    """Return a socket connected to the first of ``addresses`` that answers.

    The next address is tried beside the current one after :data:`STAGGER` seconds, at once when it failed.

    Raises:
        OSError: what the last attempt ran into; TimeoutError at ``deadline``.
    """
    waiting = list(addresses)
    failure: OSError = TimeoutError()
    with selectors.DefaultSelector() as selector:
        try:
            while waiting or selector.get_map():
                if waiting:
                    try:
                        selector.register(_begin(*waiting.pop(0)), selectors.EVENT_WRITE)
                    except OSError as error:
                        failure = error
                        continue
                for key, _ in selector.select(min(STAGGER, deadline.remaining()) if waiting else deadline.remaining()):
                    candidate = key.fileobj
                    assert isinstance(candidate, socket.socket)  # noqa: S101 - only sockets are registered
                    selector.unregister(candidate)
                    code = candidate.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                    if code == 0:
                        return tuned(candidate)
                    failure = _os_error(code)
                    candidate.close()
                if deadline.passed:
                    raise TimeoutError
            raise failure
        finally:
            for key in list((selector.get_map() or {}).values()):
                if isinstance(key.fileobj, socket.socket):
                    key.fileobj.close()


def _os_error(code: int) -> OSError:
    import os

    return OSError(code, os.strerror(code))


def _begin(family: socket.AddressFamily, address: tuple[object, ...]) -> socket.socket:
    candidate = socket.socket(family, socket.SOCK_STREAM)
    candidate.settimeout(0)
    try:
        candidate.connect(address)
    except BlockingIOError:
        pass
    except BaseException:
        candidate.close()
        raise
    return candidate


def tuned(connected: socket.socket) -> socket.socket:
    """Set the options that make a TCP socket quick and make the kernel notice a peer that is gone; return it.

    An idle connection is probed after 5 s and given up after 5 + 3 * 3 s; unacknowledged data is given up after 15 s.
    """
    connected.settimeout(None)
    options = (
        (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
        (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
        (socket.IPPROTO_TCP, getattr(socket, "TCP_KEEPIDLE", None), 5),
        (socket.IPPROTO_TCP, getattr(socket, "TCP_KEEPINTVL", None), 3),
        (socket.IPPROTO_TCP, getattr(socket, "TCP_KEEPCNT", None), 3),
        (socket.IPPROTO_TCP, getattr(socket, "TCP_USER_TIMEOUT", None), _DEAD_AFTER_MS),
    )
    for level, option, value in options:
        if option is not None:
            with contextlib.suppress(OSError):
                connected.setsockopt(level, option, value)
    return connected
