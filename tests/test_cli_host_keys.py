"""A host whose key cannot be trusted: exit 6, nothing runs there, and the way out is shown."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from .support.cli import Ran, rdiag
from .support.sshd import TestSshd


def _inventory(server: TestSshd, known_hosts: Path, folder: Path, *more: str) -> str:
    path = folder / "hosts.yaml"
    path.write_text(
        f"""
hosts:
  box:
    address: 127.0.0.1
    port: {server.port}
    user: {server.user}
    identity_file: {server.identity_file}
    known_hosts: {known_hosts}
"""
        + "".join(f"    {line}\n" for line in more)
    )
    return str(path)


def _refused(server: TestSshd, ran: Ran) -> None:
    assert ran.code == 6, ran.err
    assert "box: host-key: " in ran.err
    assert "SHA256:" in ran.err
    assert "hint: " in ran.err
    assert server.commands() == []
    assert "Accepted publickey" not in server.log()


@pytest.mark.parametrize("command", [("run", "hello"), ("vocab-compare", "/a", "/b"), ("check",)])
def test_a_swapped_key(start_sshd: Callable[..., TestSshd], tmp_path: Path, command: tuple[str, ...]) -> None:
    with start_sshd(shell="zsh") as server:
        server.new_host_keys()
        inventory = _inventory(server, server.known_hosts, tmp_path)
        ran = rdiag(*command, "-H", "box", "-i", inventory, home=tmp_path)
        assert ran.code == 6
        assert server.commands() == []
        assert "Accepted publickey" not in server.log()
        if command[0] != "check":
            _refused(server, ran)
            assert rdiag(*command, "-H", "box", "-i", inventory, "--json", home=tmp_path).json["error"]["exit"] == 6


def test_an_unknown_key(start_sshd: Callable[..., TestSshd], tmp_path: Path) -> None:
    with start_sshd(shell="zsh") as server:
        (tmp_path / "empty").touch()
        ran = rdiag("run", "hello", "-H", "box", "-i", _inventory(server, tmp_path / "empty", tmp_path), home=tmp_path)
        _refused(server, ran)
        assert "rdiag trust box" in ran.err


def test_a_revoked_key(start_sshd: Callable[..., TestSshd], tmp_path: Path) -> None:
    with start_sshd(shell="zsh") as server:
        known = tmp_path / "known"
        known.write_text(server.known_hosts.read_text() + f"@revoked * {' '.join(server.host_key())}\n")
        ran = rdiag("run", "hello", "-H", "box", "-i", _inventory(server, known, tmp_path), home=tmp_path)
        _refused(server, ran)
        assert "revoked" in ran.err


def test_a_pinned_key_that_is_another(start_sshd: Callable[..., TestSshd], tmp_path: Path) -> None:
    with start_sshd(shell="zsh") as server:
        pin = "host_key: SHA256:AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA"
        ran = rdiag("run", "hello", "-H", "box", "-i", _inventory(server, server.known_hosts, tmp_path, pin), home=tmp_path)
        _refused(server, ran)


def test_trust_then_run(start_sshd: Callable[..., TestSshd], tmp_path: Path) -> None:
    with start_sshd(shell="zsh") as server:
        path = tmp_path / "hosts.yaml"
        path.write_text(
            f"hosts: {{box: {{address: 127.0.0.1, port: {server.port}, user: {server.user}, "
            f"identity_file: {server.identity_file}}}}}\n"
        )
        assert rdiag("run", "hello", "-H", "box", "-i", str(path), home=tmp_path).code == 6
        assert rdiag("trust", "box", "-i", str(path), home=tmp_path).code == 2, "no terminal, no yes"
        assert rdiag("trust", "box", "-i", str(path), "--yes", home=tmp_path).code == 0
        assert rdiag("run", "hello", "-H", "box", "-i", str(path), home=tmp_path).code == 0


def test_this_machine_has_no_key_to_trust(tmp_path: Path) -> None:
    ran = rdiag("trust", "local", home=tmp_path)
    assert ran.code == 2
    assert "this machine is not reached over ssh" in ran.err
