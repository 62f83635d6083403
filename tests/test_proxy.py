"""The bad line that other tests and the benchmark use, itself tested."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from .support.proxy import Proxy


@pytest.fixture
def echo() -> Iterator[int]:
    """A server that sends back what it gets."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve(connection: socket.socket) -> None:
        with connection:
            try:
                while data := connection.recv(65536):
                    connection.sendall(data)
            except OSError:
                return

    def accept() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=serve, args=(connection,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    yield listener.getsockname()[1]
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()


def call(proxy: Proxy) -> socket.socket:
    return socket.create_connection(("127.0.0.1", proxy.port), 10.0)


def exactly(connection: socket.socket, size: int) -> bytes:
    received = b""
    while len(received) < size:
        data = connection.recv(65536)
        assert data, f"ended after {len(received)} of {size} bytes"
        received += data
    return received


def test_every_byte_both_ways(echo: int) -> None:
    data = os.urandom(3_000_000)
    with Proxy(echo) as proxy, call(proxy) as connection:
        threading.Thread(target=connection.sendall, args=(data,), daemon=True).start()
        assert exactly(connection, len(data)) == data
        assert proxy.from_server == proxy.from_client == len(data)
        connection.shutdown(socket.SHUT_WR)
        assert connection.recv(1) == b""


def test_delay_is_one_way_each_way(echo: int) -> None:
    with Proxy(echo, delay_ms=30) as proxy, call(proxy) as connection:
        first = time.monotonic()
        connection.sendall(b"x")
        exactly(connection, 1)
        # The handshake that a real line would have needed counts too.
        assert time.monotonic() - first >= 0.12
        second = time.monotonic()
        connection.sendall(b"y")
        exactly(connection, 1)
        assert 0.06 <= time.monotonic() - second < 5.0


def test_delay_does_not_limit_the_rate(echo: int) -> None:
    with Proxy(echo, delay_ms=20) as proxy, call(proxy) as connection:
        started = time.monotonic()
        data = bytes(2_000_000)
        threading.Thread(target=connection.sendall, args=(data,), daemon=True).start()
        exactly(connection, len(data))
        assert time.monotonic() - started < 5.0


@pytest.mark.parametrize("how", ["rst", "fin"])
def test_cut(echo: int, how: str) -> None:
    with Proxy(echo, cut_after=1000, cut_how=how) as proxy, call(proxy) as connection:  # type: ignore[arg-type]
        connection.sendall(b"a" * 600)
        exactly(connection, 600)
        connection.sendall(b"b" * 600)
        if how == "fin":
            exactly(connection, 400)
            assert connection.recv(1) == b""
        else:
            with pytest.raises(ConnectionResetError):
                exactly(connection, 401)


def test_cut_now(echo: int) -> None:
    with Proxy(echo) as proxy, call(proxy) as connection:
        connection.sendall(b"a")
        exactly(connection, 1)
        proxy.cut()
        with pytest.raises(ConnectionResetError):
            connection.recv(1)


def test_flip(echo: int) -> None:
    with Proxy(echo, flip_at=3) as proxy, call(proxy) as connection:
        connection.sendall(b"aa")
        exactly(connection, 2)
        connection.sendall(b"aaaa")
        assert exactly(connection, 4) == b"a`aa"


def test_freeze_and_thaw(echo: int) -> None:
    with Proxy(echo) as proxy, call(proxy) as connection:
        connection.sendall(b"a")
        exactly(connection, 1)
        proxy.freeze()
        connection.sendall(b"b")
        connection.settimeout(0.2)
        with pytest.raises(TimeoutError):
            connection.recv(1)
        connection.settimeout(10.0)
        proxy.thaw()
        assert exactly(connection, 1) == b"b"


def test_nobody_behind_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    with Proxy(port) as proxy, pytest.raises(ConnectionResetError):
        # The reset may even overtake the end of connect().
        call(proxy).recv(1)
