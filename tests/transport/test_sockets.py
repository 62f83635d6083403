"""Names, addresses, identification lines."""

from __future__ import annotations

import errno
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from remote_diag.errors import UnreachableError
from remote_diag.transport import sockets
from remote_diag.transport.sockets import IDENTIFICATION, Deadline, NotAnSshServer, Wire
from tests.support.sshd import free_port

V4 = socket.AF_INET
GREETING = f"{IDENTIFICATION}\r\n".encode()


@pytest.fixture
def pair() -> Iterator[tuple[Wire, socket.socket]]:
    ours, theirs = socket.socketpair()
    theirs.settimeout(5.0)
    with theirs:
        wire = Wire(ours)
        yield wire, theirs
        wire.close()


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


def test_identification_is_valid() -> None:
    # RFC 4253, 4.2: no blank or minus in the software version, 255 characters with the line end.
    assert IDENTIFICATION.startswith("SSH-2.0-")
    assert IDENTIFICATION.isascii()
    assert not set("- ") & set(IDENTIFICATION.removeprefix("SSH-2.0-"))
    assert len(GREETING) <= 255


def test_what_came_after_the_identification_stays_readable(pair: tuple[Wire, socket.socket]) -> None:
    wire, theirs = pair
    theirs.sendall(b"welcome\r\nto this host\nSSH-2.0-Server_1 comment\r\n\0\0\1\xff")
    wire.exchange_identification(Deadline(5.0))
    assert wire.server_identification == "SSH-2.0-Server_1 comment"
    assert theirs.recv(1000) == GREETING
    received = b""
    while len(received) < 30:
        received += wire.recv(7)
    assert received == b"SSH-2.0-Server_1 comment\r\n\0\0\1\xff"


def test_our_identification_is_sent_once(pair: tuple[Wire, socket.socket]) -> None:
    wire, theirs = pair
    theirs.sendall(b"SSH-2.0-x\n")
    wire.exchange_identification(Deadline(5.0))
    assert wire.send(GREETING) == len(GREETING)
    wire.send(b"next")
    wire.send(GREETING)
    expected = GREETING + b"next" + GREETING
    received = b""
    while len(received) < len(expected):
        received += theirs.recv(1000)
    assert received == expected


def test_anything_else_is_sent_as_it_is(pair: tuple[Wire, socket.socket]) -> None:
    wire, theirs = pair
    theirs.sendall(b"SSH-2.0-x\n")
    wire.exchange_identification(Deadline(5.0))
    theirs.recv(1000)
    wire.send(b"SSH-2.0-another\r\n")
    assert theirs.recv(1000) == b"SSH-2.0-another\r\n"


@pytest.mark.parametrize("split", range(1, 12))
def test_identification_in_pieces(pair: tuple[Wire, socket.socket], split: int) -> None:
    wire, theirs = pair
    line = b"hello\nSSH-2.0-x\r\n"

    def dribble() -> None:
        theirs.sendall(line[:split])
        time.sleep(0.01)
        theirs.sendall(line[split:])

    sender = threading.Thread(target=dribble)
    sender.start()
    wire.exchange_identification(Deadline(5.0))
    sender.join()
    assert wire.server_identification == "SSH-2.0-x"


@pytest.mark.parametrize(
    "data", [b"HTTP/1.0 400 Bad\r\n\r\n", b"220 mail ESMTP\r\n", b"\x16\x03\x01" + bytes(9000), b"a\n" * 40_000, b"x" * 9000]
)
def test_no_ssh_server(pair: tuple[Wire, socket.socket], data: bytes) -> None:
    wire, theirs = pair
    sender = threading.Thread(target=theirs.sendall, args=(data,))
    sender.start()
    with pytest.raises(NotAnSshServer) as caught:
        wire.exchange_identification(Deadline(5.0))
    assert len(str(caught.value)) < 450
    assert str(caught.value).isprintable()
    wire.close()
    sender.join(5.0)


def test_end_before_the_identification(pair: tuple[Wire, socket.socket]) -> None:
    wire, theirs = pair
    theirs.sendall(b"too busy\n")
    theirs.shutdown(socket.SHUT_WR)
    with pytest.raises(EOFError, match="too busy"):
        wire.exchange_identification(Deadline(5.0))


def test_close_wakes_a_reader(pair: tuple[Wire, socket.socket]) -> None:
    wire, _ = pair
    wire.settimeout(30.0)
    read: list[bytes] = []
    reader = threading.Thread(target=lambda: read.append(wire.recv(1)))
    reader.start()
    time.sleep(0.05)
    wire.close()
    reader.join(5.0)
    assert read == [b""]
    wire.close()


# --- Connecting -----------------------------------------------------------------------------------------------------


def test_lookup_of_an_address_and_a_name() -> None:
    assert sockets.lookup("127.0.0.1", 22) == [(V4, ("127.0.0.1", 22))]
    found = sockets.lookup("localhost", 2222)
    assert found
    assert len(found) == len(set(found))


@pytest.mark.parametrize("name", ["a..b", "x" * 64 + ".example", "\x00"])
def test_lookup_of_what_is_no_name(name: str) -> None:
    with pytest.raises((UnreachableError, ValueError)) as caught:
        sockets.lookup(name, 22, host="h")
    if isinstance(caught.value, UnreachableError):
        assert caught.value.phase == "resolve"


def test_the_second_address_is_tried_when_the_first_refuses(listener: socket.socket) -> None:
    addresses = [(V4, ("127.0.0.1", free_port())), (V4, listener.getsockname())]
    with sockets.connect(addresses, Deadline(5.0)) as made:
        assert made.getpeername() == listener.getsockname()
        assert made.gettimeout() is None


def test_the_second_address_is_tried_beside_a_silent_first(listener: socket.socket) -> None:
    with socket.socket() as hole:
        hole.bind(("127.0.0.1", 0))
        hole.listen(0)
        fillers = [socket.socket() for _ in range(4)]
        for filler in fillers:
            filler.settimeout(0)
            filler.connect_ex(hole.getsockname())
        started = time.monotonic()
        with sockets.connect([(V4, hole.getsockname()), (V4, listener.getsockname())], Deadline(20.0)) as made:
            assert made.getpeername() == listener.getsockname()
        assert time.monotonic() - started < 10.0
        for filler in fillers:
            filler.close()


def test_the_last_failure_is_told() -> None:
    with pytest.raises(ConnectionRefusedError) as caught:
        sockets.connect([(V4, ("127.0.0.1", free_port())), (V4, ("127.0.0.1", free_port()))], Deadline(5.0))
    assert caught.value.errno == errno.ECONNREFUSED


def test_an_impossible_address_is_an_error() -> None:
    with pytest.raises(OSError, match=r".+"):
        sockets.connect([(V4, ("255.255.255.255", 1))], Deadline(2.0))
