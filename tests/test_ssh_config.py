"""ssh settings: what ``ssh -G`` says, with hosts.yaml on top, bounded; and what applies without an ssh client."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remote_diag import ssh_config
from remote_diag.errors import ConfigError
from remote_diag.host import Host
from remote_diag.ssh_config import SshSettings, begin, expand_proxy_command, resolve

SSH = shutil.which("ssh")
needs_ssh = pytest.mark.skipif(SSH is None, reason="no ssh client is installed")
Fake = Callable[[str], None]


@pytest.fixture
def fake_ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fake:
    """Put a script in front of everything on PATH that is called ``ssh``."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")

    def install(script: str) -> None:
        path = folder / "ssh"
        path.write_text("#!/bin/sh\n" + script)
        path.chmod(0o755)

    return install


@pytest.fixture
def configured(fake_ssh: Fake, tmp_path: Path) -> Fake:
    """Let the real ssh read the given text instead of ~/.ssh/config."""

    def install(text: str) -> None:
        config = tmp_path / "ssh_config"
        config.write_text(text)
        fake_ssh(f'exec {SSH} -F "{config}" "$@"\n')

    return install


def answer(*lines: str) -> str:
    """Return a script that prints what ``ssh -G`` could print."""
    text = "\n".join(("user ada", "hostname h.example", "port 22", *lines))
    return f"cat <<'END'\n{text}\nEND\n"


@pytest.fixture
def no_client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))


@needs_ssh
class TestRealClient:
    def test_alias_include_match_and_repeated_keys(self, configured: Fake, tmp_path: Path) -> None:
        included = tmp_path / "included"
        included.write_text("Host gpu\n  HostName 203.0.113.7\n  Port 2222\n  IdentityFile /keys/one\n")
        configured(
            f"Include {included}\nMatch host 203.0.113.7\n  User trainer\nHost *\n  IdentityFile /keys/%h\n"
            "  IdentitiesOnly yes\n  ConnectTimeout 7\n  HostKeyAlias lab\n  CertificateFile /keys/one-cert.pub\n"
        )
        settings = resolve(Host("gpu8", ssh="gpu"))
        assert (settings.target, settings.hostname, settings.port) == ("gpu", "203.0.113.7", 2222)
        assert settings.user == "trainer"
        assert settings.identity_files == (Path("/keys/one"), Path("/keys/203.0.113.7"))
        assert settings.identities_only
        assert settings.connect_timeout == 7
        assert settings.host_key_alias == "lab"
        assert settings.certificate_files == (Path("/keys/one-cert.pub"),)

    def test_explicit_fields_win(self, configured: Fake) -> None:
        configured(
            "Host *\n  HostName 192.0.2.1\n  Port 22\n  User config\n  IdentityFile /keys/config\n  ProxyJump away\n"
            "  UserKnownHostsFile /known/config\n"
        )
        host = Host(
            "gpu8",
            address="203.0.113.7",
            user="root",
            port=2200,
            identity_file=Path("/keys/mine"),
            known_hosts=Path("/known/mine"),
            jump="a@one:22,two",
        )
        settings = resolve(host)
        assert (settings.hostname, settings.user, settings.port) == ("203.0.113.7", "root", 2200)
        assert settings.identity_files == (Path("/keys/mine"),)
        assert settings.identities_only
        assert (settings.user_known_hosts, settings.global_known_hosts) == ((Path("/known/mine"),), ())
        assert settings.proxy_jump == ("a@one:22", "two")

    def test_port_and_user_take_part_in_match(self, configured: Fake) -> None:
        configured("Match user root\n  HostName as-root.example\n")
        assert resolve(Host("h", ssh="gpu", user="root")).hostname == "as-root.example"
        assert resolve(Host("h", ssh="gpu", user="ada")).hostname == "gpu"

    def test_jump_none_switches_it_off(self, configured: Fake) -> None:
        configured("Host *\n  ProxyJump bastion\n")
        assert resolve(Host("h", address="a.example")).proxy_jump == ("bastion",)
        assert resolve(Host("h", address="a.example", jump="none")).proxy_jump == ()

    def test_explicit_jump_replaces_proxy_command(self, configured: Fake) -> None:
        configured("Host *\n  ProxyCommand nc %h %p\n")
        assert resolve(Host("h", address="a.example")).proxy_command == "nc %h %p"
        settings = resolve(Host("h", address="a.example", jump="bastion"))
        assert (settings.proxy_jump, settings.proxy_command) == (("bastion",), None)

    @pytest.mark.parametrize("line", ["ProxyJump none", "ProxyCommand none"])
    def test_none_is_no_host(self, configured: Fake, line: str) -> None:
        configured(f"Host *\n  {line}\n")
        settings = resolve(Host("h", address="a.example"))
        assert (settings.proxy_jump, settings.proxy_command) == ((), None)

    def test_known_hosts_with_blanks_and_without(self, configured: Fake, tmp_path: Path) -> None:
        spaced = tmp_path / "with blank"
        configured(f'Host *\n  UserKnownHostsFile /a/one "{spaced}" ~/.ssh/two\n  GlobalKnownHostsFile none\n')
        settings = resolve(Host("h", address="a.example"))
        home = Path(f"~{_account()}").expanduser()
        assert settings.user_known_hosts == (Path("/a/one"), spaced, home / ".ssh/two")
        assert settings.global_known_hosts == ()

    def test_home_is_the_account_s_as_for_ssh(self, configured: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HOME", "/elsewhere")
        configured("Host *\n  IdentityFile ~/.ssh/key\n")
        (identity,) = resolve(Host("h", address="a.example")).identity_files
        assert identity == Path(f"~{_account()}").expanduser() / ".ssh/key"

    def test_broken_configuration_is_shown_not_ignored(self, configured: Fake) -> None:
        configured("Host *\n  NoSuchKeyword yes\n")
        with pytest.raises(ConfigError) as caught:
            resolve(Host("gpu8", address="a.example"))
        assert "failed" in caught.value.message
        assert any("nosuchkeyword" in line.lower() for line in caught.value.details)
        assert caught.value.host == "gpu8"

    def test_ipv6_with_a_zone(self, configured: Fake) -> None:
        configured("")
        assert resolve(Host("h", address="fe80::1%eth0")).hostname == "fe80::1%eth0"


class TestAnswers:
    @pytest.mark.parametrize(
        ("line", "expected"),
        [
            ("x y", None),
            ("identityagent none", "none"),
            ("identityagent SSH_AUTH_SOCK", None),
            ("identityagent /run/agent", "/run/agent"),
            ("identityagent $MY_AGENT", "/run/mine"),
            ("identityagent ${MY_AGENT}.x", "/run/mine.x"),
            ("identityagent $NO_SUCH", "none"),
            ("identityagent ${NO_SUCH}", "none"),
        ],
    )
    def test_agent(self, fake_ssh: Fake, monkeypatch: pytest.MonkeyPatch, line: str, expected: str | None) -> None:
        monkeypatch.setenv("MY_AGENT", "/run/mine")
        monkeypatch.delenv("NO_SUCH", raising=False)
        fake_ssh(answer(line))
        assert resolve(Host("h", address="a.example")).identity_agent == expected

    def test_tokens_in_paths(self, fake_ssh: Fake) -> None:
        fake_ssh(answer("hostkeyalias K", "identityfile /k/%h-%p-%r-%n-%k-%%-%i"))
        (identity,) = resolve(Host("h", ssh="alias")).identity_files
        assert identity == Path(f"/k/h.example-22-ada-alias-K-%-{os.getuid()}")

    def test_unknown_token_costs_one_file_and_is_said(self, fake_ssh: Fake) -> None:
        fake_ssh(answer("identityfile /k/%C", "identityfile /k/two"))
        settings = resolve(Host("h", address="a.example"))
        assert settings.identity_files == (Path("/k/two"),)
        assert any("%C" in note for note in settings.notes)

    def test_revocation_file_that_cannot_be_named_is_an_error(self, fake_ssh: Fake) -> None:
        fake_ssh(answer("revokedhostkeys /k/%C"))
        with pytest.raises(ConfigError, match="RevokedHostKeys"):
            resolve(Host("h", address="a.example"))

    def test_known_hosts_command_is_said_to_be_unused(self, fake_ssh: Fake) -> None:
        fake_ssh(answer("knownhostscommand /bin/keys"))
        assert any("KnownHostsCommand" in note for note in resolve(Host("h", address="a.example")).notes)

    @pytest.mark.parametrize("name", ["-oProxyCommand=x", "a b", "a;b", "$(x)", "é.example", "[-x]"])
    def test_host_name_out_of_the_configuration_is_checked(self, fake_ssh: Fake, name: str) -> None:
        fake_ssh(f"printf 'user ada\\nport 22\\nhostname %s\\n' '{name}'\n")
        with pytest.raises(ConfigError, match="no host name"):
            resolve(Host("h", ssh="alias"))

    @pytest.mark.parametrize("port", ["0", "65536", "-1", "x", "", "99999999999999"])
    def test_nonsense_port(self, fake_ssh: Fake, port: str) -> None:
        fake_ssh(f"printf 'user ada\\nhostname h\\nport {port}\\n'\n")
        with pytest.raises(ConfigError, match="port"):
            resolve(Host("h", address="a.example"))

    def test_arguments_are_a_vector(self, fake_ssh: Fake, tmp_path: Path) -> None:
        seen = tmp_path / "seen"
        fake_ssh(f"printf '%s\\n' \"$@\" > {seen}\n" + answer())
        resolve(Host("h", address="a.example", user="ada", port=2222))
        assert seen.read_text().split() == ["-G", "-p", "2222", "-l", "ada", "--", "a.example"]

    @given(st.binary(max_size=300))
    def test_any_output_gives_settings_or_a_config_error(self, output: bytes) -> None:
        try:
            settings = ssh_config._from_output(Host("h", address="a.example"), "a.example", output)
        except ConfigError:
            return
        assert settings.hostname == "a.example"


class TestBounds:
    def test_begin_returns_while_ssh_works(self, fake_ssh: Fake, tmp_path: Path) -> None:
        gate = tmp_path / "gate"
        fake_ssh(f"while [ ! -e {gate} ]; do sleep 0.01; done\n" + answer())
        pending = begin(Host("h", address="a.example"))
        gate.touch()
        assert pending.result().user == "ada"
        assert pending.result() is pending.result()

    def test_hanging_client_is_abandoned_with_its_children(
        self, fake_ssh: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(ssh_config, "TIME_LIMIT", 0.5)
        pids = tmp_path / "pids"
        fake_ssh(f"sleep 600 &\necho $$ $! > {pids}\nwait\n")
        with pytest.raises(ConfigError, match="did not answer within") as caught:
            resolve(Host("gpu8", address="a.example"))
        assert "Match exec" in (caught.value.hint or "")
        for pid in map(int, pids.read_text().split()):
            assert _gone(pid), f"{pid} still runs"

    def test_endless_output_is_refused(self, fake_ssh: Fake) -> None:
        fake_ssh("exec yes 'identityfile /k/a-rather-long-name-to-get-there-quickly'\n")
        with pytest.raises(ConfigError, match="printed more than"):
            resolve(Host("h", address="a.example"))

    def test_late_collection_still_takes_a_ready_answer(self, fake_ssh: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(ssh_config, "TIME_LIMIT", 0.0)
        fake_ssh(answer())
        pending = begin(Host("h", address="a.example"))
        assert pending._process is not None
        pending._process.wait(10)
        assert pending.result().user == "ada"

    def test_close_ends_it(self, fake_ssh: Fake) -> None:
        fake_ssh("exec sleep 600\n")
        pending = begin(Host("h", address="a.example"))
        process = pending._process
        assert process is not None
        pending.close()
        pending.close()
        assert process.poll() is not None
        with pytest.raises(RuntimeError):
            pending.result()

    @pytest.mark.parametrize("target", ["-oProxyCommand=x", "a b", "a;b", "$(x)", "a\n", "a/b", "é", "", "x" * 254])
    def test_names_that_may_not_reach_ssh(self, fake_ssh: Fake, tmp_path: Path, target: str) -> None:
        seen = tmp_path / "seen"
        fake_ssh(f"touch {seen}\n" + answer())
        for host in (Host("h", ssh=target), Host("h", address=target)):
            with pytest.raises(ConfigError):
                begin(host)
        assert not seen.exists()

    @pytest.mark.parametrize("user", ["-x", "a b", "a;b", "", "a\n", "a`b", "x" * 129])
    def test_users_that_may_not_reach_ssh(self, fake_ssh: Fake, tmp_path: Path, user: str) -> None:
        seen = tmp_path / "seen"
        fake_ssh(f"touch {seen}\n" + answer())
        with pytest.raises(ConfigError):
            begin(Host("h", address="a.example", user=user))
        assert not seen.exists()

    @given(st.text(max_size=40))
    def test_targets_are_options_never(self, text: str) -> None:
        if ssh_config.may_be_target(text):
            assert text
            assert not text.startswith("-")
            assert set(text) <= set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._:%+-")


@pytest.mark.usefixtures("no_client")
class TestWithoutClient:
    def test_said_plainly_with_the_usual_files(self) -> None:
        settings = resolve(Host("h", address="a.example", user="ada"))
        assert settings.notes == (ssh_config.NO_CLIENT_NOTE,)
        assert (settings.hostname, settings.port, settings.user) == ("a.example", 22, "ada")
        assert [path.name for path in settings.identity_files] == ["id_ed25519", "id_ecdsa", "id_rsa"]
        assert [path.name for path in settings.user_known_hosts] == ["known_hosts", "known_hosts2"]
        assert all(path.is_absolute() for path in settings.user_known_hosts)

    def test_explicit_fields_apply(self) -> None:
        host = Host("h", ssh="alias", user="ada", port=2222, identity_file=Path("/k"), known_hosts=Path("/n"), jump="j")
        settings = resolve(host)
        assert (settings.hostname, settings.port) == ("alias", 2222)
        assert settings.identity_files == (Path("/k"),)
        assert (settings.user_known_hosts, settings.global_known_hosts) == ((Path("/n"),), ())
        assert settings.proxy_jump == ("j",)

    def test_client_that_cannot_be_started_is_an_error(self, tmp_path: Path) -> None:
        (tmp_path / "ssh").write_text("not executable")
        with pytest.raises(ConfigError, match="cannot start the ssh client"):
            resolve(Host("h", address="a.example", user="ada"))

    def test_user_is_the_account(self) -> None:
        assert resolve(Host("h", address="a.example")).user == _account()


SETTINGS = SshSettings(target="alias", hostname="h.example", port=2222, user="ada")


class TestProxyCommand:
    @pytest.mark.parametrize(
        ("command", "expected"),
        [
            ("nc %h %p", "nc h.example 2222"),
            ("aws --target '%n' --user \"%r\"", "aws --target 'alias' --user \"ada\""),
            ("printf 100%%", "printf 100%"),
            ("printf %%h", "printf %h"),
            (None, None),
        ],
    )
    def test_tokens(self, command: str | None, expected: str | None) -> None:
        assert expand_proxy_command(replace(SETTINGS, proxy_command=command)) == expected

    @pytest.mark.parametrize("command", ["nc %C", "nc %", "nc %\n", "nc %d"])
    def test_other_tokens_are_refused(self, command: str) -> None:
        with pytest.raises(ConfigError, match="token"):
            expand_proxy_command(replace(SETTINGS, proxy_command=command))

    @pytest.mark.parametrize("value", ["a;b", "$(x)", "-x", "a b", "`x`", "a\n", "a$b", "a\\"])
    def test_values_that_a_shell_would_interpret_are_refused(self, value: str) -> None:
        with pytest.raises(ConfigError, match="ProxyCommand"):
            expand_proxy_command(replace(SETTINGS, hostname=value, proxy_command="nc %h"))
        with pytest.raises(ConfigError, match="ProxyCommand"):
            expand_proxy_command(replace(SETTINGS, user=value, proxy_command="nc %r"))


def _account() -> str:
    import pwd

    return pwd.getpwuid(os.getuid()).pw_name


def _gone(pid: int) -> bool:
    """Wait until ``pid`` has ended; a zombie that nobody collects yet counts as ended."""
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return True
        if state == "Z":
            return True
        time.sleep(0.02)
    return False
