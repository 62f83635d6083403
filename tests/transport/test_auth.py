"""Logging in: which keys are tried, and what is said when none is accepted."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from remote_diag import ssh_config
from remote_diag.errors import AuthError
from remote_diag.exitcodes import ExitCode
from remote_diag.transport import auth, keys
from remote_diag.transport.ssh import SshTransport
from tests.support import sshd

pytestmark = pytest.mark.ssh


def make_key(path: Path, *, kind: str = "ed25519", passphrase: str = "", old_format: bool = False) -> Path:
    options = ["-m", "PEM"] if old_format else []
    # Few rounds: the tests are not about the strength of a passphrase.
    subprocess.run(
        ["ssh-keygen", "-q", "-t", kind, "-a", "1", "-N", passphrase, "-C", f"comment of {path.name}", "-f", path, *options],
        check=True,
        stdin=subprocess.DEVNULL,
    )
    return path


@contextmanager
def agent(folder: Path, *added: Path) -> Iterator[Path]:
    """Run an ssh-agent that holds ``added``; yields its socket."""
    path = folder / "agent"
    process = subprocess.Popen(["ssh-agent", "-D", "-a", path], stdout=subprocess.DEVNULL)
    try:
        assert sshd.wait_until(path.exists, 5.0)
        for key in added:
            subprocess.run(
                ["ssh-add", "-q", key],
                env={"SSH_AUTH_SOCK": str(path), "SSH_ASKPASS": "/bin/false", "PATH": "/usr/bin:/bin"},
                check=True,
                stdin=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        yield path
    finally:
        process.terminate()
        process.wait(5.0)


@pytest.fixture(autouse=True)
def no_agent_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)


@pytest.fixture
def settings(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Replace what ssh -G says, as far as named."""

    def change(**changes: Any) -> None:
        original = ssh_config.resolve
        monkeypatch.setattr("remote_diag.route.resolve", lambda host: replace(original(host), **changes))

    return change


def method(server: sshd.TestSshd, **overrides: Any) -> str:
    transport = SshTransport(server.host(**overrides))
    transport.connect()
    assert transport.ping(5.0) < 5.0
    transport.close()
    return str(transport.facts.auth_method)


def refusal(server: sshd.TestSshd, **overrides: Any) -> AuthError:
    transport = SshTransport(server.host(**overrides))
    with pytest.raises(AuthError) as caught:
        transport.connect()
    transport.close()
    assert caught.value.exit_code == ExitCode.AUTH
    assert caught.value.phase == "auth"
    return caught.value


def test_the_named_key(zsh_server: sshd.TestSshd) -> None:
    assert method(zsh_server) == f"publickey (ed25519, {zsh_server.identity_file})"


@pytest.mark.parametrize("kind", ["rsa", "ecdsa"])
@pytest.mark.parametrize("old_format", [False, True])
def test_other_kinds_of_key(
    start_sshd: Callable[..., sshd.TestSshd], tmp_path: Path, kind: str, *, old_format: bool
) -> None:
    path = make_key(tmp_path / "key", kind=kind, old_format=old_format)
    with start_sshd(files={"authorized_keys": path.with_suffix(".pub").read_bytes()}) as server:
        assert method(server, identity_file=path).startswith(f"publickey ({kind}, ")


def test_wrong_key_is_tried_once(start_sshd: Callable[..., sshd.TestSshd], tmp_path: Path) -> None:
    wrong = make_key(tmp_path / "wrong")
    with start_sshd() as server:
        error = refusal(server, identity_file=wrong)
        assert str(wrong) in error.message
        assert server.user in error.message
        assert not error.retryable
        assert server.log().count("Failed publickey") == 1
        assert "password" not in server.log().lower()


def test_missing_key_file(zsh_server: sshd.TestSshd, tmp_path: Path) -> None:
    error = refusal(zsh_server, identity_file=tmp_path / "nowhere")
    assert "nowhere does not exist" in error.message


@pytest.mark.parametrize("content", [b"", b"rubbish\n", b"-----BEGIN OPENSSH PRIVATE KEY-----\nAAAA\n", bytes(100_000)])
def test_damaged_key_file(zsh_server: sshd.TestSshd, tmp_path: Path, content: bytes) -> None:
    (tmp_path / "damaged").write_bytes(content)
    error = refusal(zsh_server, identity_file=tmp_path / "damaged")
    assert "damaged" in error.message


@pytest.mark.parametrize("old_format", [False, True])
def test_encrypted_key_without_terminal_or_agent(
    zsh_server: sshd.TestSshd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, old_format: bool
) -> None:
    asked: list[str] = []
    monkeypatch.setattr("getpass.getpass", asked.append)
    key = make_key(tmp_path / "locked", kind="rsa", passphrase="secret", old_format=old_format)
    error = refusal(zsh_server, identity_file=key)
    assert "encrypted" in error.message
    assert "terminal" in error.message
    assert asked == []


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal:
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr("sys.stdin", Terminal())


@pytest.mark.usefixtures("terminal")
def test_passphrase_from_a_terminal(
    start_sshd: Callable[..., sshd.TestSshd], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import time

    key = make_key(tmp_path / "locked", passphrase="secret")
    answers = iter(["secret", "wrong", ""])

    def ask(prompt: str) -> str:
        assert str(key) in prompt
        # A person takes longer than the connect deadline, which waits meanwhile.
        time.sleep(1.2)
        return next(answers)

    monkeypatch.setattr("getpass.getpass", ask)
    with start_sshd(files={"authorized_keys": key.with_suffix(".pub").read_bytes()}) as server:
        assert method(server, identity_file=key, connect_timeout=1.0) == f"publickey (ed25519, {key})"
        assert "cannot be decrypted" in refusal(server, identity_file=key).message
        assert "no passphrase was given" in refusal(server, identity_file=key).message


def test_encrypted_key_held_by_an_agent(
    zsh_server: sshd.TestSshd, tmp_path: Path, settings: Callable[..., None]
) -> None:
    # The agent got the key while it was not encrypted; its file is now.
    locked = tmp_path / "locked"
    locked.write_bytes(zsh_server.identity_file.read_bytes())
    locked.chmod(0o600)
    with agent(tmp_path, locked) as path:
        subprocess.run(["ssh-keygen", "-q", "-p", "-a", "1", "-N", "secret", "-f", locked], check=True)
        settings(identity_agent=str(path))
        assert method(zsh_server, identity_file=locked) == "publickey (ed25519, agent)"


def test_public_key_file_points_at_an_agent(
    zsh_server: sshd.TestSshd, tmp_path: Path, settings: Callable[..., None]
) -> None:
    public = tmp_path / "which.pub"
    public.write_bytes(zsh_server.identity_file.with_suffix(".pub").read_bytes())
    error = refusal(zsh_server, identity_file=public)
    assert "no agent has the private one" in error.message
    with agent(tmp_path, zsh_server.identity_file) as path:
        settings(identity_agent=str(path))
        assert method(zsh_server, identity_file=public) == "publickey (ed25519, agent)"


def test_keys_of_an_agent(zsh_server: sshd.TestSshd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                          settings: Callable[..., None]) -> None:  # fmt: skip
    others = [make_key(tmp_path / f"other{number}") for number in range(2)]
    settings(identity_files=(), identities_only=False)
    with agent(tmp_path, *others, zsh_server.identity_file) as path:
        monkeypatch.setenv("SSH_AUTH_SOCK", str(path))
        assert method(zsh_server, identity_file=None) == "publickey (ed25519, agent)"
        settings(identity_agent="none", identity_files=(), identities_only=False)
        assert "no key" in refusal(zsh_server, identity_file=None).message


def test_identities_only_leaves_an_agents_other_keys_alone(
    start_sshd: Callable[..., sshd.TestSshd], tmp_path: Path, settings: Callable[..., None]
) -> None:
    wrong = make_key(tmp_path / "wrong")
    with start_sshd() as server, agent(tmp_path, server.identity_file) as path:
        settings(identity_files=(wrong,), identities_only=True, identity_agent=str(path))
        error = refusal(server, identity_file=None)
        assert "agent" not in error.message
        assert server.log().count("Failed publickey") == 1


def test_too_many_keys(start_sshd: Callable[..., sshd.TestSshd], tmp_path: Path, settings: Callable[..., None]) -> None:
    wrong = tuple(make_key(tmp_path / f"key{number}") for number in range(auth.MAX_KEYS + 2))
    with start_sshd(extra_config="MaxAuthTries 10") as server:
        settings(identity_files=wrong, identities_only=True)
        error = refusal(server, identity_file=None)
        assert server.log().count("Failed publickey") == auth.MAX_KEYS
        assert str(wrong[0]) in error.message
        assert "identity_file" in str(error.hint)
        assert any("not tried" in line for line in error.details)


def test_server_that_allows_fewer_keys(
    start_sshd: Callable[..., sshd.TestSshd], tmp_path: Path, settings: Callable[..., None]
) -> None:
    wrong = tuple(make_key(tmp_path / f"key{number}") for number in range(3))
    with start_sshd(extra_config="MaxAuthTries 2") as server:
        settings(identity_files=(*wrong, server.identity_file), identities_only=True)
        error = refusal(server, identity_file=None)
        assert "MaxAuthTries" in f"{error.message} {error.hint}"
        assert str(wrong[0]) in error.message


def test_server_without_public_keys(start_sshd: Callable[..., sshd.TestSshd]) -> None:
    with start_sshd(extra_config="PubkeyAuthentication no\nKbdInteractiveAuthentication yes\nUsePAM yes") as server:
        error = refusal(server)
        assert "with a key" in error.message
        assert "keyboard-interactive" in error.message


def test_second_factor(start_sshd: Callable[..., sshd.TestSshd]) -> None:
    configuration = "AuthenticationMethods publickey,keyboard-interactive\nKbdInteractiveAuthentication yes\nUsePAM yes"
    with start_sshd(extra_config=configuration) as server:
        error = refusal(server)
        assert "wants more" in error.message
        assert "keyboard-interactive" in error.message


def test_agent_that_is_not_there(zsh_server: sshd.TestSshd, tmp_path: Path, settings: Callable[..., None]) -> None:
    settings(identity_files=(), identities_only=False, identity_agent=str(tmp_path / "gone"))
    error = refusal(zsh_server, identity_file=None)
    assert "gone does not answer" in error.message


def test_certificate_beside_the_key(start_sshd: Callable[..., sshd.TestSshd], tmp_path: Path) -> None:
    authority = make_key(tmp_path / "authority")
    key = make_key(tmp_path / "key")
    with start_sshd(
        extra_config="TrustedUserCAKeys %D/authority\nAuthorizedKeysFile none",
        files={"authority": authority.with_suffix(".pub").read_bytes()},
    ) as server:
        refusal(server, identity_file=key)
        subprocess.run(
            ["ssh-keygen", "-q", "-s", authority, "-I", "me", "-n", server.user, key.with_suffix(".pub")], check=True
        )
        assert method(server, identity_file=key).startswith("publickey (ed25519, ")


# --- Key files ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("passphrase", ["", "secret"])
@pytest.mark.parametrize("old_format", [False, True])
def test_what_a_key_file_tells(tmp_path: Path, passphrase: str, *, old_format: bool) -> None:
    path = make_key(tmp_path / "key", kind="rsa", passphrase=passphrase, old_format=old_format)
    found = keys.read(path)
    assert found.problem is None
    assert found.private
    assert found.encrypted == bool(passphrase)
    public = keys.read(path.with_suffix(".pub"))
    assert not public.private
    assert found.public == public.public is not None


def test_every_cut_of_a_key_file_is_survived(tmp_path: Path) -> None:
    data = make_key(tmp_path / "key").read_bytes()
    for length in range(len(data)):
        (tmp_path / "cut").write_bytes(data[:length])
        keys.read(tmp_path / "cut")
    assert keys.read(tmp_path).problem is not None, "a directory"
