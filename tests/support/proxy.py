"""A TCP proxy on loopback that makes a network worse: distance, cuts, silence, damage. Standard library only.

Distance is modelled above TCP: bytes arrive later, and a new connection reaches the server one and a half round trips
after it was accepted here, as a handshake over a real line would take. Acknowledgements are not delayed, so what
Nagle's algorithm costs on a real line is not part of it.
"""

from __future__ import annotations

import contextlib
import heapq
import selectors
import socket
import struct
import threading
import time
from collections import deque
from types import TracebackType
from typing import Literal

_QUEUED = 4 * 1024 * 1024


class Proxy:
    """Carries connections to ``127.0.0.1:port``; a context manager. Listens on :attr:`port`.

    Args:
        target_port: where connections go.
        delay_ms: milliseconds that every byte takes one way; the round trip is twice that.
        cut_after: end each connection as soon as the server has sent this many bytes; the last of them still arrive.
        cut_asked_after: end each connection as soon as the client has sent this many bytes; only those arrive.
        cut_how: with a TCP reset, or with an orderly end.
        flip_at: invert one bit of this byte (counted from 0) of what the server sends.
        bytes_per_s: how much of what the server sends is carried in a second, on each connection; None for no limit.
    """

    def __init__(
        self,
        target_port: int,
        *,
        delay_ms: float = 0.0,
        cut_after: int | None = None,
        cut_asked_after: int | None = None,
        cut_how: Literal["rst", "fin"] = "rst",
        flip_at: int | None = None,
        bytes_per_s: float | None = None,
    ) -> None:
        self.from_server = 0
        """Bytes the server has sent so far, over all connections."""
        self.from_client = 0
        """Bytes the client has sent so far, over all connections."""
        self.connections = 0
        self._target = ("127.0.0.1", target_port)
        self._delay = delay_ms / 1000
        self._cut_after = cut_after
        self._cut_asked_after = cut_asked_after
        self._cut_how = cut_how
        self._flip_at = flip_at
        self._rate = bytes_per_s
        # A slow line does not hold much that is under way.
        self._queued = _QUEUED if bytes_per_s is None else int(min(_QUEUED, max(8192.0, bytes_per_s / 4)))
        self._frozen = threading.Event()
        self._stopping = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self._listener.settimeout(0)
        self.port: int = self._listener.getsockname()[1]
        self._selector = selectors.DefaultSelector()
        self._wake_read, self._wake_write = socket.socketpair()
        self._pairs: set[_Pair] = set()
        self._starting: list[tuple[float, int, socket.socket]] = []
        self._cutting = False
        self._thread = threading.Thread(target=self._run, name=f"proxy {self.port}", daemon=True)

    def __enter__(self) -> Proxy:
        """Start."""
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._wake_read, selectors.EVENT_READ)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Reset every connection and stop."""
        self._stopping.set()
        self._wake()
        self._thread.join(5.0)
        for pair in list(self._pairs):
            self._drop(pair)
        for _, _, client in self._starting:
            client.close()
        for one in (self._listener, self._wake_read, self._wake_write):
            one.close()
        self._selector.close()

    def freeze(self) -> None:
        """Carry nothing from now on, in either direction; both sides believe that the line is up."""
        self._frozen.set()
        self._wake()

    def thaw(self) -> None:
        """Carry again, what was held back first."""
        self._frozen.clear()
        self._wake()

    def cut(self) -> None:
        """Reset every connection now."""
        self._cutting = True
        self._wake()

    def _wake(self) -> None:
        with contextlib.suppress(OSError):
            self._wake_write.send(b".")

    def _run(self) -> None:
        while not self._stopping.is_set():
            for key, _ in self._selector.select(self._timeout()):
                if key.fileobj is self._listener:
                    self._accept()
                elif key.fileobj is self._wake_read:
                    self._wake_read.recv(4096)
                elif key.data.pair in self._pairs:
                    self._read(key.data)
            if self._cutting:
                self._cutting = False
                for pair in list(self._pairs):
                    self._end(pair, "rst")
            self._open_due()
            if not self._frozen.is_set():
                for pair in list(self._pairs):
                    self._deliver(pair)

    def _timeout(self) -> float:
        if self._frozen.is_set():
            return 1.0
        due = [flow.queue[0][0] for pair in self._pairs for flow in pair.flows if flow.queue]
        due += [when for when, _, _ in self._starting]
        if not due:
            return 1.0
        # A full socket buffer is looked at again after a millisecond.
        return max(0.001, min(1.0, min(due) - time.monotonic()))

    def _accept(self) -> None:
        with contextlib.suppress(BlockingIOError):
            client, _ = self._listener.accept()
            self.connections += 1
            heapq.heappush(self._starting, (time.monotonic() + 3 * self._delay, self.connections, client))

    def _open_due(self) -> None:
        while self._starting and self._starting[0][0] <= time.monotonic() and not self._frozen.is_set():
            _, _, client = heapq.heappop(self._starting)
            try:
                server = socket.create_connection(self._target, 5.0)
            except OSError:
                _reset(client)
                continue
            pair = _Pair(client, server)
            self._pairs.add(pair)
            for flow in pair.flows:
                flow.source.settimeout(0)
                flow.source.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._selector.register(flow.source, selectors.EVENT_READ, flow)
            # What the client sent while its handshake was "under way" has had its delay already.
            self._read(pair.flows[0], delay=0.0)

    def _read(self, flow: _Flow, delay: float | None = None) -> None:
        if flow.ended or flow.size > self._queued or self._frozen.is_set():
            time.sleep(0.0005)
            return
        try:
            data = flow.source.recv(min(65536, self._queued))
        except BlockingIOError:
            return
        except OSError:
            self._end(flow.pair, "rst")
            return
        with contextlib.suppress(OSError):
            flow.source.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)
        if not data:
            flow.ended = True
            self._selector.unregister(flow.source)
        due = time.monotonic() + (self._delay if delay is None else delay)
        if self._rate is not None and not flow.upstream:
            due = max(due, flow.busy_until) + len(data) / self._rate
            flow.busy_until = due
        flow.put(due, self._altered(flow, data))

    def _altered(self, flow: _Flow, data: bytes) -> bytes:
        if flow.upstream:
            self.from_client += len(data)
            start, flow.pair.asked = flow.pair.asked, flow.pair.asked + len(data)
            if self._cut_asked_after is not None and flow.pair.asked >= self._cut_asked_after:
                flow.pair.doomed = True
                return data[: max(0, self._cut_asked_after - start)]
            return data
        start, flow.pair.served = flow.pair.served, flow.pair.served + len(data)
        self.from_server += len(data)
        if self._flip_at is not None and start <= self._flip_at < start + len(data):
            index = self._flip_at - start
            data = data[:index] + bytes([data[index] ^ 1]) + data[index + 1 :]
        if self._cut_after is not None and flow.pair.served >= self._cut_after:
            flow.pair.doomed = True
            data = data[: max(0, self._cut_after - start)]
        return data

    def _deliver(self, pair: _Pair) -> None:
        now = time.monotonic()
        for flow in pair.flows:
            while flow.queue and flow.queue[0][0] <= now:
                when, data = flow.queue[0]
                if not data:
                    flow.queue.popleft()
                    with contextlib.suppress(OSError):
                        if not pair.doomed:
                            flow.target.shutdown(socket.SHUT_WR)
                    continue
                try:
                    sent = flow.target.send(data)
                except BlockingIOError:
                    break
                except OSError:
                    self._end(pair, "rst")
                    return
                flow.size -= sent
                if sent < len(data):
                    flow.queue[0] = (when, data[sent:])
                    break
                flow.queue.popleft()
        if pair.doomed and not any(flow.queue for flow in pair.flows):
            self._end(pair, self._cut_how)
        elif all(flow.ended and not flow.queue for flow in pair.flows):
            self._drop(pair)

    def _end(self, pair: _Pair, how: Literal["rst", "fin"]) -> None:
        if how == "rst":
            for one in (pair.client, pair.server):
                with contextlib.suppress(OSError):
                    one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._drop(pair)

    def _drop(self, pair: _Pair) -> None:
        self._pairs.discard(pair)
        for flow in pair.flows:
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(flow.source)
        pair.client.close()
        pair.server.close()


class _Flow:
    """One direction of a connection."""

    def __init__(self, pair: _Pair, source: socket.socket, target: socket.socket, *, upstream: bool) -> None:
        self.pair = pair
        self.source = source
        self.target = target
        self.upstream = upstream
        self.queue: deque[tuple[float, bytes]] = deque()
        self.size = 0
        self.busy_until = 0.0
        self.ended = False

    def put(self, due: float, data: bytes) -> None:
        """Queue ``data``; nothing means the end."""
        self.queue.append((due, data))
        self.size += len(data)


class _Pair:
    """One connection: the client's socket, the server's, and both directions."""

    def __init__(self, client: socket.socket, server: socket.socket) -> None:
        self.client = client
        self.server = server
        self.served = 0
        self.asked = 0
        self.doomed = False
        self.flows = (
            _Flow(self, client, server, upstream=True),
            _Flow(self, server, client, upstream=False),
        )


def _reset(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()
