"""What only the local transport does: no shell, its own process group, an end for what does not end."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from remote_diag.errors import ConnectionLost, EnvironmentUnfit
from remote_diag.host import Host
from remote_diag.transport.base import SafeCommand, SafePath
from remote_diag.transport.local import LocalTransport
from tests.support import sshd


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


@pytest.fixture
def transport(home: Path) -> LocalTransport:
    return LocalTransport(Host(name="here", transport="local"))


def started(home: Path, transport: LocalTransport, text: str) -> tuple[int, object]:
    (home / "script").write_text(f"echo $$\n{text}")
    channel = transport.execute(SafeCommand("sh script"))
    received = channel.receive(5.0)
    assert received is not None
    return int(received[0]), channel


def ended(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return True
    return state == "Z"


def test_missing_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "gone"))
    with pytest.raises(EnvironmentUnfit, match="does not exist"):
        LocalTransport(Host(name="here", transport="local")).connect()


def test_missing_program(transport: LocalTransport) -> None:
    with pytest.raises(EnvironmentUnfit, match="no-such-program cannot be started: No such file"):
        transport.execute(SafeCommand("no-such-program"))


def test_no_shell_reads_the_command(transport: LocalTransport, home: Path) -> None:
    (home / "script").write_text('echo "$PPID $0 $1 $#"')
    channel = transport.execute(SafeCommand("sh script a.b/c -d"))
    assert channel.receive(5.0) == (f"{os.getpid()} script a.b/c 2\n".encode(), b"")
    transport.close()


def test_ctrl_c_in_the_terminal_does_not_reach_the_child(transport: LocalTransport, home: Path) -> None:
    pid, _ = started(home, transport, "cat")
    assert os.getpgid(pid) == pid != os.getpgid(0)
    assert os.getsid(pid) == pid
    transport.close()


def test_close_ends_a_child_that_ignores_its_stdin(transport: LocalTransport, home: Path) -> None:
    pid, _ = started(home, transport, "trap '' TERM\nsleep 60 & sleep 60")
    before = time.monotonic()
    transport.close()
    assert time.monotonic() - before < 3.0
    assert sshd.wait_until(lambda: ended(pid), 5.0)


def test_close_lets_a_child_finish_that_heeds_its_stdin(transport: LocalTransport, home: Path) -> None:
    started(home, transport, "cat >/dev/null; sleep 0.2; echo done >finished")
    transport.close()
    assert (home / "finished").read_text() == "done\n"


def test_closed_streams_with_a_running_child(transport: LocalTransport, home: Path) -> None:
    pid, channel = started(home, transport, "exec >&- 2>&-; sleep 60")
    assert channel.receive(5.0) is None  # type: ignore[attr-defined]
    assert channel.exit_status(0.1) is None  # type: ignore[attr-defined]
    os.kill(pid, signal.SIGKILL)
    assert channel.exit_status(5.0) is None, "death by a signal is no status"  # type: ignore[attr-defined]
    transport.close()


def test_sending_to_somebody_who_does_not_read_ends(
    transport: LocalTransport, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("remote_diag.transport.local.SEND_TIMEOUT", 0.3)
    channel = transport.execute(SafeCommand("sleep 60"))
    with pytest.raises(ConnectionLost, match="did not read its input"):
        channel.send(bytes(1_000_000))
    transport.close()


def test_no_descriptor_is_left(transport: LocalTransport, home: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        channel = transport.execute(SafeCommand("cat"))
        channel.send(b"x")
        channel.close()
    transport.execute(SafeCommand("true"))
    transport.close()
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("obstacle", ["file-in-the-way", "directory-at-the-target"])
def test_upload_that_cannot_be(transport: LocalTransport, home: Path, obstacle: str) -> None:
    if obstacle == "file-in-the-way":
        (home / "folder").write_text("a file")
    else:
        (home / "folder" / "file").mkdir(parents=True)
    with pytest.raises(EnvironmentUnfit) as caught:
        transport.upload(b"data", SafePath("folder/file"))
    assert caught.value.phase == "upload"
    assert caught.value.host == "here"
    assert not list(home.rglob("*.part"))
