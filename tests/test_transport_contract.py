"""What every way to a host has to do, whatever carries it and whichever login shell is there."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from remote_diag.errors import ConnectionLost
from remote_diag.host import Host
from remote_diag.transport import for_host
from remote_diag.transport.base import Channel, SafeCommand, SafePath, Transport, UploadUnavailable
from remote_diag.transport.local import LocalTransport

from .support import sshd

VARIANTS = ("local", "bash", "dash", "zsh", "fish", "tcsh", "noisy", "no-sftp", "noisy-sftp", "one-session")


@pytest.fixture(scope="module", params=VARIANTS)
def place(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Host, Path]]:
    """Yield (variant, host, its home directory)."""
    variant: str = request.param
    if variant == "local":
        home = tmp_path_factory.mktemp("home")
        before = os.environ.get("HOME")
        os.environ["HOME"] = str(home)
        try:
            yield variant, Host(name="here", transport="local"), home
        finally:
            if before is None:
                del os.environ["HOME"]
            else:
                os.environ["HOME"] = before
        return
    with request.getfixturevalue("start_sshd")(
        shell=variant if variant in sshd.SHELLS else "zsh",
        noise=sshd.NOISE if variant.startswith("noisy") else b"",
        sftp={"no-sftp": False, "noisy-sftp": "noisy"}.get(variant, True),
        max_sessions=1 if variant == "one-session" else None,
    ) as server:
        yield variant, server.host(), server.home


@pytest.fixture
def transport(place: tuple[str, Host, Path]) -> Iterator[Transport]:
    connected = for_host(place[1])
    connected.connect()
    yield connected
    connected.close()


@pytest.fixture
def home(place: tuple[str, Host, Path]) -> Path:
    return place[2]


@pytest.fixture
def noise(place: tuple[str, Host, Path]) -> bytes:
    return sshd.NOISE if place[0].startswith("noisy") else b""


def script(home: Path, text: str) -> SafeCommand:
    """Put a script on the host and return the command that runs it: what a shell parses stays inside the class."""
    (home / "script").write_text(text)
    return SafeCommand("sh script")


def read_all(channel: Channel, seconds: float = 30.0) -> tuple[bytes, bytes]:
    out, err = bytearray(), bytearray()
    deadline = time.monotonic() + seconds
    while (received := channel.receive(1.0)) is not None:
        out += received[0]
        err += received[1]
        assert time.monotonic() < deadline, "the streams did not end"
    return bytes(out), bytes(err)


def test_runs_in_the_login_directory(transport: Transport, home: Path, noise: bytes) -> None:
    channel = transport.execute(SafeCommand("pwd"))
    channel.send_eof()
    out, err = read_all(channel)
    assert out == noise + f"{home}\n".encode()
    assert err == b""
    assert channel.exit_status(5.0) == 0
    channel.close()


def test_binary_echo_is_exact(transport: Transport, noise: bytes) -> None:
    sent = bytes(range(256)) * 4096
    channel = transport.execute(SafeCommand("cat"))
    channel.send(sent)
    channel.send_eof()
    channel.send_eof()
    out, _ = read_all(channel)
    assert out == noise + sent
    channel.close()


def test_big_output_on_both_streams(transport: Transport, home: Path, noise: bytes) -> None:
    command = script(home, "head -c 10000000 /dev/zero >&2; head -c 3000000 /dev/zero; head -c 10000000 /dev/zero >&2")
    channel = transport.execute(command)
    channel.send_eof()
    out, err = read_all(channel)
    assert out == noise + bytes(3_000_000)
    assert err == bytes(20_000_000)
    assert channel.exit_status(5.0) == 0
    channel.close()


def test_one_receive_is_bounded(transport: Transport, home: Path) -> None:
    channel = transport.execute(script(home, "head -c 1000000 /dev/zero; head -c 1000000 /dev/zero >&2"))
    channel.send_eof()
    while (received := channel.receive(5.0)) is not None:
        assert max(map(len, received)) <= 256 * 1024
    channel.close()


@pytest.mark.parametrize("status", [0, 1, 44, 255])
def test_exit_status(transport: Transport, home: Path, status: int) -> None:
    channel = transport.execute(script(home, f"exit {status}"))
    channel.send_eof()
    read_all(channel)
    assert channel.exit_status(5.0) == status
    channel.close()


def test_death_by_signal_is_no_exit_status(transport: Transport, home: Path) -> None:
    channel = transport.execute(script(home, "exec >&- 2>&-; kill -9 $$"))
    channel.send_eof()
    read_all(channel)
    status = channel.exit_status(5.0)
    # A login shell that forks reports its child's death as 128+9, which is a status; -1 and 0 it must never be.
    assert status in {None, 137}
    channel.close()


def test_unknown_exit_status_is_none(transport: Transport) -> None:
    channel = transport.execute(SafeCommand("cat"))
    assert channel.exit_status(0.05) is None
    channel.close()


def test_receive_without_output_returns_in_time(transport: Transport, home: Path) -> None:
    channel = transport.execute(script(home, "read line; echo answer"))
    started = time.monotonic()
    received = channel.receive(0.2)
    while received is not None and received[0]:
        received = channel.receive(0.2)
    assert received == (b"", b"")
    assert time.monotonic() - started < 5.0
    channel.send(b"go\n")
    out, _ = read_all(channel)
    assert out.endswith(b"answer\n")
    channel.close()


def test_send_to_a_command_that_ended(transport: Transport, home: Path) -> None:
    channel = transport.execute(script(home, "exit 3"))
    channel.exit_status(5.0)
    with pytest.raises(ConnectionLost):
        # More than every buffer on the way takes.
        channel.send(bytes(64_000_000))
    assert channel.exit_status(5.0) == 3
    channel.close()


def test_output_before_the_end_is_not_lost(transport: Transport, home: Path) -> None:
    for _ in range(5):
        channel = transport.execute(script(home, "printf last; printf words >&2"))
        channel.send_eof()
        channel.exit_status(5.0)
        out, err = read_all(channel)
        assert out.endswith(b"last")
        assert err == b"words"
        channel.close()


def test_close_is_idempotent_and_wakes_nobody_twice(transport: Transport) -> None:
    channel = transport.execute(SafeCommand("cat"))
    started = time.monotonic()
    channel.close()
    channel.close()
    channel.send_eof()
    assert time.monotonic() - started < 2.0
    with pytest.raises(ConnectionLost):
        channel.receive(0.1)
    with pytest.raises(ConnectionLost):
        channel.send(b"x")


def test_closing_ends_the_command_by_its_stdin(transport: Transport, home: Path) -> None:
    channel = transport.execute(script(home, "cat >/dev/null; echo done >ended"))
    channel.close()
    assert sshd.wait_until((home / "ended").exists, 5.0)
    (home / "ended").unlink()


def test_only_a_safe_command_is_executed(transport: Transport) -> None:
    with pytest.raises(TypeError):
        transport.execute("true")  # type: ignore[arg-type]


def test_ping(transport: Transport) -> None:
    assert 0.0 <= transport.ping(5.0) < 5.0


def test_close_of_the_transport_is_idempotent(place: tuple[str, Host, Path]) -> None:
    transport = for_host(place[1])
    transport.close()
    transport.connect()
    channel = transport.execute(SafeCommand("cat"))
    transport.close()
    transport.close()
    with pytest.raises(ConnectionLost):
        read_all(channel)


def test_close_from_another_thread_wakes_a_receiver(place: tuple[str, Host, Path]) -> None:
    transport = for_host(place[1])
    transport.connect()
    channel = transport.execute(SafeCommand("cat"))
    closer = threading.Timer(0.1, transport.close)
    closer.start()
    started = time.monotonic()
    with contextlib.suppress(ConnectionLost):
        while channel.receive(30.0) is not None:
            pass
    assert time.monotonic() - started < 10.0
    closer.join()


def test_close_wakes_a_receiver_although_output_is_held_open_by_another_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "holder").write_text("sleep 4 &\ncat\n")
    transport = LocalTransport(Host(name="here", transport="local"))
    channel = transport.execute(SafeCommand("sh holder"))
    closer = threading.Timer(0.2, transport.close)
    closer.start()
    started = time.monotonic()
    with pytest.raises(ConnectionLost):
        channel.receive(30.0)
    assert time.monotonic() - started < 10.0
    closer.join()


# --- Upload ---------------------------------------------------------------------------------------------------------


WITHOUT_SFTP = ("no-sftp", "noisy-sftp")
carries_files = pytest.mark.parametrize("place", [one for one in VARIANTS if one not in WITHOUT_SFTP], indirect=True)


@pytest.mark.parametrize("place", WITHOUT_SFTP, indirect=True)
def test_no_sftp_is_said_and_harms_nothing(transport: Transport, home: Path) -> None:
    before = sorted(home.rglob("*"))
    with pytest.raises(UploadUnavailable):
        transport.upload(b"x", SafePath("refused/file"))
    assert sorted(home.rglob("*")) == before
    channel = transport.execute(SafeCommand("pwd"))
    channel.send_eof()
    read_all(channel)
    assert channel.exit_status(5.0) == 0
    channel.close()


@carries_files
@pytest.mark.parametrize("size", [0, 1, 32768, 32769, 1_000_003])
def test_upload_is_exact_and_private(transport: Transport, home: Path, size: int) -> None:
    data = os.urandom(size)
    transport.upload(data, SafePath("some/new/folder/file.bin"))
    path = home / "some/new/folder/file.bin"
    assert path.read_bytes() == data
    assert path.stat().st_mode & 0o777 == 0o600
    for parent in (home / "some", home / "some/new", home / "some/new/folder"):
        assert parent.stat().st_mode & 0o777 == 0o700
    assert [one.name for one in path.parent.iterdir()] == ["file.bin"]


@carries_files
def test_upload_replaces(transport: Transport, home: Path) -> None:
    for data in (b"first", b"second, longer", b"3"):
        transport.upload(data, SafePath("replaced"))
        assert (home / "replaced").read_bytes() == data


@carries_files
def test_upload_does_not_follow_a_link_at_the_target(transport: Transport, home: Path) -> None:
    victim = home / "victim"
    victim.write_bytes(b"untouched")
    link = home / "link"
    link.symlink_to(victim)
    transport.upload(b"new", SafePath("link"))
    assert victim.read_bytes() == b"untouched"
    assert not link.is_symlink()
    assert link.read_bytes() == b"new"


@carries_files
def test_upload_to_an_absolute_path(transport: Transport, home: Path) -> None:
    transport.upload(b"data", SafePath(f"{home}/absolute/file"))
    assert (home / "absolute/file").read_bytes() == b"data"


@carries_files
def test_upload_wants_a_safe_path(transport: Transport) -> None:
    with pytest.raises(TypeError):
        transport.upload(b"", "file")  # type: ignore[arg-type]
