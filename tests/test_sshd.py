"""The test server: what it records, and what happens where its programs are missing."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from remote_diag.transport.base import SafeCommand
from remote_diag.transport.ssh import SshTransport

from .support import sshd


def test_a_missing_program_names_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda *_, **__: None)
    with pytest.raises(sshd.Missing, match="apt-get install openssh-server"):
        sshd.tool("sshd")


@pytest.mark.parametrize(("ci", "outcome"), [("true", pytest.fail.Exception), (None, pytest.skip.Exception)])
def test_missing_is_a_failure_in_ci(
    start_sshd: Callable[..., sshd.TestSshd],
    monkeypatch: pytest.MonkeyPatch,
    ci: str | None,
    outcome: type[BaseException],
) -> None:
    monkeypatch.setattr("shutil.which", lambda *_, **__: None)
    if ci is None:
        monkeypatch.delenv("CI", raising=False)
    else:
        monkeypatch.setenv("CI", ci)
    with pytest.raises(outcome, match="apt-get install"):
        start_sshd()


def test_every_command_is_recorded(start_sshd: Callable[..., sshd.TestSshd]) -> None:
    with start_sshd() as server:
        directory = server.identity_file.parent
        assert server.commands() == []
        transport = SshTransport(server.host())
        transport.connect()
        assert server.commands() == []
        channel = transport.execute(SafeCommand("echo one two"))
        channel.exit_status(5.0)
        assert server.commands() == ["echo one two"]
        pids = server.session_pids()
        assert pids
    assert not directory.exists()
    assert sshd.wait_until(lambda: not any(map(sshd.alive, pids)), 5.0), "sessions end with the server"
    transport.close()
