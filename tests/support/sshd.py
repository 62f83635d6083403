"""A real OpenSSH server on loopback, for one test or one benchmark: own keys, own configuration, own home directory.

It serves the user who runs the tests, with any login shell: a forced command hands what the client asked for to
that shell, exactly as sshd would. Nothing outside its own directory is written (but for /run/sshd, as root, where
sshd insists on it).
"""

from __future__ import annotations

import contextlib
import getpass
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

from remote_diag.host import Host

SHELLS = ("bash", "dash", "zsh", "fish", "tcsh")
"""Login shells that the contract covers; ``sh -c COMMAND`` works with each of them."""
NOISE = b"Welcome!\r\n\x1b[31mRDIAG1 forged\x1b[0m\n\xff\xfe last login: never\n"
"""What a careless start-up file prints."""
_SFTP_SERVERS = ("/usr/lib/openssh/sftp-server", "/usr/libexec/openssh/sftp-server", "/usr/libexec/sftp-server",
                 "/usr/lib/ssh/sftp-server")  # fmt: skip
_PACKAGES = {"sshd": "openssh-server", "ssh-keygen": "openssh-client", "ssh": "openssh-client"}


class Missing(Exception):
    """A program that the test host needs is not installed."""


def tool(name: str) -> str:
    """Return the absolute path of ``name``; raise Missing that says how to install it."""
    found = shutil.which(name, path=os.environ.get("PATH", "") + ":/usr/sbin:/usr/local/sbin:/sbin")
    if found is None:
        raise Missing(f"{name} is not installed: apt-get install {_PACKAGES.get(name, name)}")
    return found


def sftp_server() -> str:
    """Return the path of OpenSSH's sftp-server."""
    for path in _SFTP_SERVERS:
        if Path(path).exists():
            return path
    raise Missing("sftp-server is not installed: apt-get install openssh-sftp-server")


class TestSshd:
    """One server; a context manager.

    Args:
        shell: login shell, one of :data:`SHELLS` or an absolute path.
        noise: printed to stdout by the "start-up file", before the shell gets its command; SFTP gets it too when
            ``sftp`` is ``"noisy"``.
        sftp: whether there is SFTP; ``noisy`` when the start-up file prints into it; or the server's command line.
        max_sessions: sshd's MaxSessions.
        extra_config: further lines of sshd_config; they win over the usual ones. ``%D`` is the server's directory.
        files: further files for that directory.
        env: added to the environment of everything that runs on the "host".
        home: home directory on the "host"; a new empty one by default.
        host_key_types: the host keys to make.
    """

    __test__ = False

    def __init__(
        self,
        *,
        shell: str = "bash",
        noise: bytes = b"",
        sftp: bool | str = True,
        max_sessions: int | None = None,
        extra_config: str = "",
        files: Mapping[str, bytes] | None = None,
        env: Mapping[str, str] | None = None,
        home: Path | None = None,
        host_key_types: tuple[str, ...] = ("ed25519",),
    ) -> None:
        self._sshd = tool("sshd")
        self._keygen = tool("ssh-keygen")
        self._shell = shell if shell.startswith("/") else tool(shell)
        self._noise = noise
        self._sftp = sftp
        self._max_sessions = max_sessions
        self._files = dict(files or {})
        self._env = dict(env or {})
        self._host_key_types = host_key_types
        # Not below pytest's own directory: a parent that others may not enter is no obstacle there.
        self._directory = Path(tempfile.mkdtemp(prefix="rdiag-sshd-"))
        self._extra_config = extra_config.replace("%D", str(self._directory))
        self.home = home or self._directory / "home"
        self.user = getpass.getuser()
        self.port = 0
        self.identity_file = self._directory / "client"
        self.known_hosts = self._directory / "known_hosts"
        self.pid = 0

    def __enter__(self) -> TestSshd:
        """Start the server; it accepts connections when this returns."""
        try:
            self._prepare()
            self._start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Stop the server, its sessions, and remove its directory."""
        self.close()

    def host(self, **overrides: Any) -> Host:
        """Return a Host that reaches this server; keyword arguments replace fields of it."""
        fields: dict[str, Any] = {
            "name": "testhost",
            "address": "127.0.0.1",
            "user": self.user,
            "port": self.port,
            "identity_file": self.identity_file,
            "known_hosts": self.known_hosts,
            "connect_timeout": 10.0,
        }
        return replace(Host(name="testhost"), **{**fields, **overrides})

    def commands(self) -> list[str]:
        """Return every command that a client asked for, in order; SFTP is ``sftp``."""
        try:
            text = (self._directory / "commands").read_bytes().decode("utf-8", "surrogateescape")
        except FileNotFoundError:
            return []
        return text.split("\0")[:-1]

    def log(self) -> str:
        """Return the server's log."""
        with contextlib.suppress(FileNotFoundError):
            return (self._directory / "log").read_text(errors="replace")
        return ""

    def host_key(self, kind: str = "ed25519") -> tuple[str, str]:
        """Return (type, base64) of a host key."""
        words = (self._directory / f"host_{kind}.pub").read_text().split()
        return words[0], words[1]

    def new_host_keys(self) -> None:
        """Give the server other host keys, as a reinstalled machine (or somebody in the middle) has them."""
        self.stop()
        for kind in self._host_key_types:
            for path in (self._directory / f"host_{kind}", self._directory / f"host_{kind}.pub"):
                path.unlink()
            self._make_key(self._directory / f"host_{kind}", kind)
        self._start()

    def session_pids(self) -> list[int]:
        """Return the processes of this server's sessions (and of its login phase), the listener not included."""
        return [pid for pid in _descendants(self.pid) if pid != self.pid]

    def stop(self) -> None:
        """Stop listening and end every session."""
        if self.pid == 0:
            return
        victims = [self.pid, *self.session_pids()]
        for pid in victims:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
                os.kill(pid, signal.SIGTERM if pid == self.pid else signal.SIGKILL)
        wait_until(lambda: not alive(self.pid), 5.0)
        self.pid = 0
        with contextlib.suppress(FileNotFoundError):
            (self._directory / "pid").unlink()

    def close(self) -> None:
        """Stop, and remove everything; idempotent."""
        self.stop()
        shutil.rmtree(self._directory, ignore_errors=True)

    def _prepare(self) -> None:
        self.home.mkdir(mode=0o700, exist_ok=True)
        for kind in self._host_key_types:
            self._make_key(self._directory / f"host_{kind}", kind)
        self._make_key(self.identity_file, "ed25519")
        shutil.copy(self.identity_file.with_suffix(".pub"), self._directory / "authorized_keys")
        for name, data in {"noise": self._noise, **self._files}.items():
            (self._directory / name).write_bytes(data)
        login = self._directory / "login"
        login.write_text(self._login_script())
        login.chmod(0o700)

    def _make_key(self, path: Path, kind: str) -> None:
        subprocess.run(
            [self._keygen, "-q", "-t", kind, "-N", "", "-C", "rdiag test", "-f", path], check=True, stdin=subprocess.DEVNULL
        )

    def _login_script(self) -> str:
        """Return the forced command: note what was asked for, be the start-up file, then be the login shell."""
        quoted = {name: _quoted(str(path)) for name, path in {
            "directory": self._directory, "home": self.home, "shell": self._shell}.items()}  # fmt: skip
        sftp = self._sftp if isinstance(self._sftp, str) and self._sftp != "noisy" else _quoted(sftp_server())
        exports = "".join(f"export {name}={_quoted(value)}\n" for name, value in self._env.items())
        noisy_sftp = f"cat {quoted['directory']}/noise; " if self._sftp == "noisy" else ""
        return f"""#!/bin/sh
export HOME={quoted['home']}
unset SHLVL XDG_CACHE_HOME XDG_CONFIG_HOME XDG_STATE_HOME XDG_RUNTIME_DIR SSH_AUTH_SOCK
{exports}cd "$HOME" || exit 98
command=$SSH_ORIGINAL_COMMAND
case $command in
    *sftp-server*) {noisy_sftp}printf 'sftp\\0' >>{quoted['directory']}/commands; exec {sftp} ;;
esac
printf '%s\\0' "$command" >>{quoted['directory']}/commands
cat {quoted['directory']}/noise
SHELL={quoted['shell']}
export SHELL
exec {quoted['shell']} -c "$command"
"""

    def _configuration(self) -> str:
        directory = self._directory
        lines = [
            "ListenAddress 127.0.0.1",
            f"Port {self.port}",
            *(f"HostKey {directory / f'host_{kind}'}" for kind in self._host_key_types),
            f"AuthorizedKeysFile {directory / 'authorized_keys'}",
            f"PidFile {directory / 'pid'}",
            "StrictModes no",
            "UsePAM no",
            "UseDNS no",
            "PasswordAuthentication no",
            "KbdInteractiveAuthentication no",
            "PermitRootLogin yes",
            "PrintMotd no",
            "LogLevel VERBOSE",
            # The account's real shell starts the forced command; at this level bash leaves the real .bashrc alone.
            "SetEnv SHLVL=1",
            f"ForceCommand {directory / 'login'}",
        ]
        if self._sftp:
            lines.append(f"Subsystem sftp {sftp_server()}")
        if self._max_sessions is not None:
            lines.append(f"MaxSessions {self._max_sessions}")
        # sshd takes the first value it sees.
        return "\n".join([*self._extra_config.splitlines(), *lines]) + "\n"

    def _start(self) -> None:
        if os.geteuid() == 0:
            Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
        for _ in range(5):
            self.port = free_port() if self.port == 0 else self.port
            (self._directory / "config").write_text(self._configuration())
            subprocess.run(
                [self._sshd, "-f", self._directory / "config", "-E", self._directory / "log"],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                check=False,
            )
            if wait_until(self._listening, 5.0):
                self._write_known_hosts()
                return
            self.port = 0
        raise RuntimeError(f"sshd did not start:\n{self.log()[-2000:]}")

    def _listening(self) -> bool:
        try:
            self.pid = int((self._directory / "pid").read_text())
        except (FileNotFoundError, ValueError):
            return False
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1.0) as probe:
            return probe.recv(4) == b"SSH-"
        return False

    def _write_known_hosts(self) -> None:
        if self.known_hosts.exists():
            return
        lines = [f"[127.0.0.1]:{self.port} {' '.join(self.host_key(kind))}\n" for kind in self._host_key_types]
        self.known_hosts.write_text("".join(lines))


def free_port() -> int:
    """Return a loopback port that nobody listens on at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def wait_until(condition: Any, seconds: float) -> bool:
    """Return whether ``condition()`` became true within ``seconds``."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def alive(pid: int) -> bool:
    """Return whether a process exists and is no zombie."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def _descendants(root: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError, IndexError):
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                children.setdefault(parent, []).append(int(entry.name))
    found, queue = [], [root]
    while queue:
        pid = queue.pop()
        found.append(pid)
        queue += children.get(pid, [])
    return found


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"
