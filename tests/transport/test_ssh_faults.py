"""A host that cannot be reached, or is lost: a clear error of the right class, in bounded time and memory."""

from __future__ import annotations

import os
import resource
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from remote_diag.errors import ConnectionLost, RdiagError, UnreachableError
from remote_diag.host import Host
from remote_diag.transport.base import Channel, SafeCommand, SafePath
from remote_diag.transport.ssh import SshTransport
from tests.support import sshd
from tests.support.proxy import Proxy

pytestmark = pytest.mark.ssh


@contextmanager
def answering(behaviour: Callable[[socket.socket], None]) -> Iterator[int]:
    """Listen on a port, and give every connection to ``behaviour`` in a thread."""
    listener = socket.create_server(("127.0.0.1", 0))
    connections: list[socket.socket] = []

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            connections.append(connection)
            threading.Thread(target=tolerant, args=(connection,), daemon=True).start()

    def tolerant(connection: socket.socket) -> None:
        try:
            behaviour(connection)
        except OSError:
            return

    threading.Thread(target=serve, daemon=True).start()
    try:
        yield listener.getsockname()[1]
    finally:
        # A blocked accept() only notices a shutdown.
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        for connection in connections:
            connection.close()


def at(port: int, server: sshd.TestSshd | None = None, **overrides: object) -> Host:
    """Return a host on a loopback port; with ``server``, one that knows its key under that port too."""
    if server is None:
        return Host(name="h", address="127.0.0.1", user="nobody", port=port, connect_timeout=3.0)
    kind, key = server.host_key()
    return server.host(name="h", port=port, known_hosts=None, host_key=f"{kind} {key}", **overrides)


def failure(host: Host, *, within: float = 5.0) -> RdiagError:
    """Return the error that connecting ends in, in time and with nothing left behind."""
    threads = threading.active_count()
    transport = SshTransport(host)
    started = time.monotonic()
    with pytest.raises(RdiagError) as caught:
        transport.connect()
    assert time.monotonic() - started < within
    transport.close()
    assert caught.value.host == "h"
    assert caught.value.message
    assert sshd.wait_until(lambda: threading.active_count() <= threads + 1, 5.0), "a thread was left behind"
    return caught.value


# --- Nothing there --------------------------------------------------------------------------------------------------


def test_refused() -> None:
    error = failure(at(sshd.free_port()), within=2.0)
    assert type(error) is UnreachableError
    assert error.phase == "connect"
    assert "refuses connections" in error.message
    assert "127.0.0.1:" in error.message


def test_name_without_address() -> None:
    error = failure(Host(name="h", address="no-such-host.invalid", user="u", connect_timeout=8.0), within=9.0)
    assert type(error) is UnreachableError
    assert error.phase == "resolve"
    assert "DNS" in error.message
    assert "no-such-host.invalid" in error.message


def test_slow_name_server(monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()

    def slow(*_: object, **__: object) -> list[object]:
        release.wait(20.0)
        return []

    monkeypatch.setattr(socket, "getaddrinfo", slow)
    try:
        transport = SshTransport(Host(name="h", address="slow.example", user="u", connect_timeout=0.5))
        with pytest.raises(UnreachableError, match=r"timed out after 0.5 s looking up slow.example"):
            transport.connect()
    finally:
        release.set()


def test_black_hole() -> None:
    # A full backlog: the kernel drops every further SYN, as a firewall does.
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen(0)
    fillers = []
    try:
        for _ in range(4):
            filler = socket.socket()
            filler.settimeout(0)
            filler.connect_ex(listener.getsockname())
            fillers.append(filler)
        error = failure(Host(name="h", address="127.0.0.1", user="u", port=listener.getsockname()[1], connect_timeout=0.7))
    finally:
        for one in (*fillers, listener):
            one.close()
    assert type(error) is UnreachableError
    assert error.phase == "connect"
    assert "timed out after 0.7 s connecting" in error.message
    assert "connect_timeout" in str(error.hint)


# --- Something else there -------------------------------------------------------------------------------------------


def test_silent_server() -> None:
    with answering(lambda _: time.sleep(30)) as port:
        error = failure(Host(name="h", address="127.0.0.1", user="u", port=port, connect_timeout=0.7))
    assert type(error) is UnreachableError
    assert "waiting for the SSH identification" in error.message


def test_http_server() -> None:
    def web(connection: socket.socket) -> None:
        connection.recv(1024)
        connection.sendall(b"HTTP/1.1 400 Bad Request\r\nServer: \x1b[2Jx\r\n\r\n<html>")

    with answering(web) as port:
        error = failure(at(port), within=2.0)
    assert type(error) is UnreachableError
    assert "not an SSH server" in error.message
    assert "HTTP/1.1 400 Bad Request" in error.message


@pytest.mark.parametrize("line", [b"x" * 4096, b"not yet\r\n" * 400], ids=["one-line", "many-lines"])
def test_endless_preamble(line: bytes) -> None:
    def flood(connection: socket.socket) -> None:
        while True:
            connection.sendall(line)

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with answering(flood) as port:
        error = failure(at(port), within=2.0)
    assert "not an SSH server" in error.message
    assert len(error.message) < 300
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 20_000, "kB"


def test_preamble_one_byte_at_a_time_ends_at_the_deadline() -> None:
    def drip(connection: socket.socket) -> None:
        while True:
            connection.sendall(b"x")
            time.sleep(0.02)

    with answering(drip) as port:
        error = failure(Host(name="h", address="127.0.0.1", user="u", port=port, connect_timeout=0.7))
    assert "timed out after 0.7 s" in error.message


@pytest.fixture
def brisk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let other tries at a busy server follow at once."""
    monkeypatch.setattr("remote_diag.transport.opening._PAUSES", (0.01, 0.01, 0.01))


@pytest.mark.usefixtures("brisk")
def test_closed_before_the_identification() -> None:
    tries = []

    def busy(connection: socket.socket) -> None:
        tries.append(connection)
        connection.sendall(b"Exceeded MaxStartups\r\n")
        connection.shutdown(socket.SHUT_WR)
        connection.recv(100)

    with answering(busy) as port:
        error = failure(at(port), within=2.0)
    assert "Exceeded MaxStartups" in error.message
    assert "MaxStartups" in str(error.hint)
    assert error.retryable
    assert len(tries) == 4


def test_a_server_that_is_busy_for_a_moment(start_sshd: Callable[..., sshd.TestSshd]) -> None:
    with start_sshd(extra_config="MaxStartups 1:100:1") as server:
        held = pending_login(server.port)
        held.__enter__()
        threading.Timer(0.4, held.__exit__, (None, None, None)).start()
        transport = SshTransport(server.host(name="h"))
        transport.connect()
        transport.close()


def test_no_other_try_after_the_deadline_or_after_the_identification() -> None:
    tries = []

    def busy(connection: socket.socket) -> None:
        tries.append(connection)
        connection.close()

    def fickle(connection: socket.socket) -> None:
        connection.sendall(b"SSH-2.0-Fake_1.0\r\n")
        busy(connection)

    with answering(busy) as port:
        failure(Host(name="h", address="127.0.0.1", user="u", port=port, connect_timeout=0.1), within=1.0)
    assert len(tries) == 1
    with answering(fickle) as port:
        failure(at(port))
    assert len(tries) == 2


@pytest.mark.parametrize("end", ["rst", "fin", "garbage", "silence", "endless"])
def test_end_after_the_identification(end: str) -> None:
    def act(connection: socket.socket) -> None:
        connection.sendall(b"SSH-2.0-Fake_1.0\r\n")
        connection.recv(64)
        if end == "rst":
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        elif end == "garbage":
            connection.sendall(b"\xff" * 512)
        elif end == "endless":
            # A packet that claims 2 GB.
            connection.sendall(b"\x7f\xff\xff\xff")
            while True:
                connection.sendall(bytes(4096))
        elif end == "silence":
            time.sleep(30)
        connection.close()

    with answering(act) as port:
        error = failure(Host(name="h", address="127.0.0.1", user="u", port=port, connect_timeout=1.0))
    assert isinstance(error, UnreachableError)
    assert error.phase in {"connect", "host-key"}
    if end == "silence":
        assert "timed out after 1 s" in error.message


def test_old_protocol_version() -> None:
    with answering(lambda connection: connection.sendall(b"SSH-1.5-OldServer\n")) as port:
        error = failure(at(port), within=3.0)
    assert type(error) is UnreachableError


# --- A real server, and a bad line ----------------------------------------------------------------------------------


@pytest.mark.usefixtures("brisk")
@pytest.mark.parametrize("how", ["rst", "fin"])
@pytest.mark.parametrize("after", [1, 20, 41, 100, 500, 1100, 1300, 1500])
def test_cut_during_the_handshake(zsh_server: sshd.TestSshd, after: int, how: str) -> None:
    with Proxy(zsh_server.port, cut_after=after, cut_how=how) as proxy:  # type: ignore[arg-type]
        error = failure(at(proxy.port, zsh_server))
    assert isinstance(error, UnreachableError), error
    assert error.retryable


# Byte 45 is missing on purpose: it holds the length of the first packet's padding, which means nothing.
@pytest.mark.parametrize("position", [2, 41, 60, 200, 700, 1080, 1150, 1250, 1400, 1500])
def test_a_flipped_bit_is_never_accepted(zsh_server: sshd.TestSshd, position: int) -> None:
    before = len(zsh_server.commands())
    with Proxy(zsh_server.port, flip_at=position) as proxy:
        transport = SshTransport(at(proxy.port, zsh_server, connect_timeout=1.0))
        with pytest.raises(RdiagError):
            transport.connect()
        transport.close()
    assert len(zsh_server.commands()) == before


def connected(zsh_server: sshd.TestSshd, proxy: Proxy) -> SshTransport:
    transport = SshTransport(at(proxy.port, zsh_server))
    transport.connect()
    return transport


def drain(transport: SshTransport, command: str) -> None:
    read_to_the_end(transport.execute(SafeCommand(command)))


def read_to_the_end(channel: Channel) -> None:
    while channel.receive(5.0) is not None:
        pass


@pytest.mark.parametrize("how", ["rst", "fin"])
def test_cut_while_a_command_runs_is_a_lost_connection(zsh_server: sshd.TestSshd, how: str) -> None:
    with Proxy(zsh_server.port, cut_after=200_000, cut_how=how) as proxy:  # type: ignore[arg-type]
        transport = connected(zsh_server, proxy)
        with pytest.raises(ConnectionLost):
            drain(transport, "cat /dev/zero")
        with pytest.raises(ConnectionLost):
            transport.ping(1.0)
        with pytest.raises(ConnectionLost):
            transport.execute(SafeCommand("true"))
        transport.close()


def upload_often(transport: SshTransport, data: bytes) -> None:
    for _ in range(1000):
        transport.upload(data, SafePath("cut-upload"))


def test_cut_in_the_upload_leaves_no_target(zsh_server: sshd.TestSshd) -> None:
    with Proxy(zsh_server.port) as proxy:
        transport = connected(zsh_server, proxy)
        cutter = threading.Timer(0.05, proxy.cut)
        cutter.start()
        with pytest.raises(ConnectionLost):
            upload_often(transport, bytes(3_000_000))
        cutter.join()
        transport.close()
    for left in zsh_server.home.glob("cut-upload*"):
        if left.name == "cut-upload":
            assert left.stat().st_size == 3_000_000, "only ever whole"
        left.unlink()


def test_server_killed_while_a_command_runs(start_sshd: Callable[..., sshd.TestSshd]) -> None:
    with start_sshd() as server:
        transport = SshTransport(server.host())
        transport.connect()
        channel = transport.execute(SafeCommand("cat"))
        channel.send(b"x")
        assert channel.receive(5.0) == (b"x", b"")
        for pid in server.session_pids():
            os.kill(pid, signal.SIGKILL)
        with pytest.raises(ConnectionLost):
            read_to_the_end(channel)
        assert channel.exit_status(1.0) is None
        transport.close()


def test_frozen_server(start_sshd: Callable[..., sshd.TestSshd], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("remote_diag.transport.requests.REPLY_TIMEOUT", 0.5)
    with start_sshd() as server:
        acts: tuple[Callable[[SshTransport], object], ...] = (
            lambda one: one.ping(0.5),
            lambda one: one.execute(SafeCommand("true")),
            lambda one: one.upload(b"", SafePath("x")),
        )
        for act in acts:
            transport = SshTransport(server.host())
            transport.connect()
            assert transport.ping(5.0) < 5.0
            for pid in server.session_pids():
                os.kill(pid, signal.SIGSTOP)
            started = time.monotonic()
            with pytest.raises(ConnectionLost):
                act(transport)
            transport.close()
            assert time.monotonic() - started < 3.0
            for pid in server.session_pids():
                os.kill(pid, signal.SIGKILL)


def test_frozen_line_is_noticed_by_ping(zsh_server: sshd.TestSshd) -> None:
    with Proxy(zsh_server.port) as proxy:
        transport = connected(zsh_server, proxy)
        proxy.freeze()
        with pytest.raises(ConnectionLost):
            transport.ping(0.3)
        transport.close()


def test_distance_alone_is_no_failure(zsh_server: sshd.TestSshd) -> None:
    with Proxy(zsh_server.port, delay_ms=30) as proxy:
        transport = connected(zsh_server, proxy)
        assert transport.ping(5.0) >= 0.06
        channel = transport.execute(SafeCommand("pwd"))
        received = channel.receive(5.0)
        assert received is not None
        assert received[0] == f"{zsh_server.home}\n".encode()
        transport.close()


# --- What a server says before the login ----------------------------------------------------------------------------


def test_banner_is_kept_as_it_was_sent(start_sshd: Callable[..., sshd.TestSshd]) -> None:
    banner = b"Authorised use only \x1b[2J\xff\n"
    with start_sshd(extra_config="Banner %D/banner", files={"banner": banner}) as server:
        transport = SshTransport(server.host())
        transport.connect()
        assert transport.facts.banner == banner
        transport.close()


def test_a_banner_that_breaks_the_server_is_no_refused_login(start_sshd: Callable[..., sshd.TestSshd]) -> None:
    with start_sshd(extra_config="Banner %D/banner", files={"banner": b"spam " * 120_000}) as server:
        error = failure(server.host(name="h"))
    assert type(error) is UnreachableError
    assert error.phase == "auth"


def test_huge_banner(start_sshd: Callable[..., sshd.TestSshd]) -> None:
    with start_sshd(extra_config="Banner %D/banner", files={"banner": b"spam " * 40_000}) as server:
        transport = SshTransport(server.host())
        transport.connect()
        assert transport.facts.banner.startswith(b"spam spam")
        assert len(transport.facts.banner) == 64 * 1024
        transport.close()


@contextmanager
def pending_login(port: int) -> Iterator[None]:
    """Hold the only place for a login that has not happened yet; an earlier connection may still occupy it."""
    for _ in range(500):
        with socket.create_connection(("127.0.0.1", port)) as first:
            if first.recv(4) == b"SSH-":
                yield
                return
        time.sleep(0.01)
    raise AssertionError("the server accepts nobody")


@pytest.mark.usefixtures("brisk")
def test_one_start_at_a_time(start_sshd: Callable[..., sshd.TestSshd]) -> None:
    with start_sshd(extra_config="MaxStartups 1:100:1") as server:
        with pending_login(server.port):
            error = failure(server.host(name="h"))
        assert isinstance(error, UnreachableError)
        assert "MaxStartups" in f"{error.message} {error.hint}"
        assert error.retryable


def test_no_session_to_be_had(start_sshd: Callable[..., sshd.TestSshd], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("remote_diag.transport.requests._SESSION_FREES", 0.3)
    with start_sshd(max_sessions=0) as server:
        transport = SshTransport(server.host())
        transport.connect()
        with pytest.raises(UnreachableError, match="refuses another session") as caught:
            transport.execute(SafeCommand("true"))
        assert "MaxSessions" in str(caught.value.hint)
        assert caught.value.phase == "start"
        transport.close()


# --- Facts ----------------------------------------------------------------------------------------------------------


def test_facts_of_a_connection(zsh_server: sshd.TestSshd) -> None:
    transport = SshTransport(zsh_server.host())
    transport.prestart()
    transport.prestart()
    transport.connect()
    transport.connect()
    facts = transport.facts
    assert facts.transport == "ssh"
    assert facts.target == f"{zsh_server.user}@127.0.0.1:{zsh_server.port}"
    assert list(facts.phase_seconds) == ["resolve", "connect", "host-key", "auth"]
    assert all(0 < seconds < 10 for seconds in facts.phase_seconds.values())
    assert str(facts.server_version).startswith("SSH-2.0-OpenSSH")
    assert facts.host_key_type == "ssh-ed25519"
    assert str(facts.host_key_fingerprint).startswith("SHA256:")
    assert facts.host_key_source == f"{zsh_server.known_hosts}:1"
    assert str(facts.auth_method).startswith("publickey (ed25519, ")
    transport.close()


def test_a_closed_prestart_leaves_nothing(zsh_server: sshd.TestSshd) -> None:
    threads = threading.active_count()
    transport = SshTransport(zsh_server.host())
    transport.prestart()
    transport.close()
    assert sshd.wait_until(lambda: threading.active_count() <= threads, 5.0)


def test_fabric_reads_no_configuration(
    zsh_server: sshd.TestSshd, tmp_path: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []
    original = open

    def recording(file: object, *args: object, **kwargs: object) -> object:
        opened.append(str(file))
        return original(file, *args, **kwargs)  # type: ignore[call-overload]

    monkeypatch.setattr("builtins.open", recording)
    transport = SshTransport(zsh_server.host())
    transport.connect()
    transport.close()
    assert not [name for name in opened if "fabric" in name or name.endswith((".ssh/config", "ssh_config"))]


def test_the_socket_is_tuned(zsh_server: sshd.TestSshd) -> None:
    from remote_diag.transport import sockets

    made = sockets.connect(sockets.lookup("127.0.0.1", zsh_server.port), sockets.Deadline(5.0))
    with made:
        for level, option in (
            (socket.IPPROTO_TCP, socket.TCP_NODELAY),
            (socket.SOL_SOCKET, socket.SO_KEEPALIVE),
            (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT),
        ):
            assert made.getsockopt(level, option) > 0
        idle, interval, count = (
            made.getsockopt(socket.IPPROTO_TCP, option)
            for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
        )
        assert idle + interval * count <= 15
