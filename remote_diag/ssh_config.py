"""How to reach a host by ssh: what hosts.yaml says, and for the rest what ``ssh -G`` says.

``ssh -G`` is the only faithful reader of ~/.ssh/config (Include, Match, canonical names, tokens), so rdiag has none of
its own. It takes some milliseconds; :func:`begin` starts it and :meth:`PendingSettings.result` collects it, so other
work can go on meanwhile. Where no ssh client is installed, only the explicit fields of hosts.yaml apply, and
``notes`` says so.
"""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from .errors import ConfigError
from .host import Host
from .text import last_lines

TIME_LIMIT = 5.0
"""Seconds that ``ssh -G`` may take."""
OUTPUT_LIMIT = 1024 * 1024
"""Bytes that ``ssh -G`` may print; a real answer has about 5 kB."""
NO_CLIENT_NOTE = (
    "no ssh client is installed on this machine, so ~/.ssh/config is not read: only what hosts.yaml says applies"
)

_TARGET = re.compile(r"[A-Za-z0-9._:%+][A-Za-z0-9._:%+-]*\Z")
_USER = re.compile(r"[A-Za-z0-9._@+\\$][A-Za-z0-9._@+\\$-]*\Z")
_SHELL_PROOF_USER = re.compile(r"[A-Za-z0-9._@+][A-Za-z0-9._@+-]*\Z")
_VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")
_TOKEN = re.compile(r"%(.?)", re.DOTALL)
_IDENTITIES = ("~/.ssh/id_ed25519", "~/.ssh/id_ecdsa", "~/.ssh/id_rsa")
_USER_KNOWN_HOSTS = ("~/.ssh/known_hosts", "~/.ssh/known_hosts2")
_GLOBAL_KNOWN_HOSTS = (Path("/etc/ssh/ssh_known_hosts"), Path("/etc/ssh/ssh_known_hosts2"))


@dataclass(frozen=True)
class SshSettings:
    """How to reach one host; paths have their ``~`` and tokens replaced. Nothing says that a file exists."""

    target: str
    """What the user calls the host: the alias or address that was given to ``ssh -G``."""
    hostname: str
    """Name or address to connect to."""
    port: int
    user: str
    identity_files: tuple[Path, ...] = ()
    """Private keys, in the order in which they are offered."""
    identities_only: bool = False
    """Whether an agent's other keys are left alone."""
    identity_agent: str | None = None
    """Socket of the agent; ``none`` for no agent; None for the one in SSH_AUTH_SOCK."""
    certificate_files: tuple[Path, ...] = ()
    proxy_jump: tuple[str, ...] = ()
    """Jump hosts as :func:`remote_diag.route.parse_hop` reads them, the one to connect to first in front."""
    proxy_command: str | None = None
    """As ssh_config has it, tokens not replaced: see :func:`expand_proxy_command`."""
    user_known_hosts: tuple[Path, ...] = ()
    global_known_hosts: tuple[Path, ...] = ()
    host_key_alias: str | None = None
    """Name under which the host's key is looked up, instead of hostname and port."""
    revoked_host_keys: Path | None = None
    """File of keys that are never accepted: one public key a line, or an OpenSSH key revocation list."""
    connect_timeout: float | None = None
    """Seconds; None when ssh_config says nothing."""
    notes: tuple[str, ...] = ()
    """What a person should know about where these settings come from."""


def resolve(host: Host) -> SshSettings:
    """Return how to reach ``host``.

    Raises:
        ConfigError: the name cannot be given to ssh; ``ssh -G`` failed, took too long, or answered nonsense.
    """
    return begin(host).result()


def begin(host: Host) -> PendingSettings:
    """Start to find out how to reach ``host``; raises ConfigError like :func:`resolve`."""
    return PendingSettings(host)


class PendingSettings:
    """An ``ssh -G`` that may still be running."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._target = _checked_target(host)
        self._settings: SshSettings | None = None
        self._deadline = time.monotonic() + TIME_LIMIT
        self._process = self._start()
        self._no_client = self._process is None

    def result(self) -> SshSettings:
        """Return the settings, waiting at most until :data:`TIME_LIMIT` after the start; again the same later.

        Raises ConfigError like :func:`resolve`, and RuntimeError when there was an error or a ``close`` before.
        """
        if self._settings is None:
            if self._no_client:
                self._settings = _without_client(self._host, self._target)
            elif self._process is None:
                raise RuntimeError("these settings were given up")
            else:
                self._settings = _from_output(self._host, self._target, self._collect(self._process))
        return self._settings

    def close(self) -> None:
        """End the subprocess if it still runs; idempotent."""
        process, self._process = self._process, None
        if process is not None:
            abandon(process)

    def _start(self) -> subprocess.Popen[bytes] | None:
        host = self._host
        command = ["ssh", "-G"]
        if host.port is not None:
            command += ["-p", str(host.port)]
        if host.user is not None:
            command += ["-l", host.user]
        try:
            return subprocess.Popen(
                [*command, "--", self._target],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                # Its own group, so that a hanging `Match exec` command can be ended with it.
                start_new_session=True,
            )
        except FileNotFoundError:
            return None
        except OSError as error:
            raise ConfigError(f"cannot start the ssh client: {error.strerror}", host=host.name) from error

    def _collect(self, process: subprocess.Popen[bytes]) -> bytes:
        try:
            stdout, stderr = self._read(process)
            status = _wait(process, max(1.0, self._deadline - time.monotonic()))
        finally:
            self.close()
        if status == 0:
            return stdout
        raise ConfigError(
            f"`ssh -G {self._target}` failed" + ("" if status is None else f" with exit status {status}"),
            host=self._host.name,
            hint=f"`ssh -G {self._target}` shows the same error; correct ~/.ssh/config",
            details=tuple(last_lines(stderr)),
        )

    def _read(self, process: subprocess.Popen[bytes]) -> tuple[bytes, bytes]:
        assert process.stdout is not None  # noqa: S101 - both are pipes, for the type checker
        assert process.stderr is not None  # noqa: S101
        buffers = {process.stdout.fileno(): bytearray(), process.stderr.fileno(): bytearray()}
        stdout, stderr = buffers.values()
        poller = select.poll()
        for descriptor in buffers:
            poller.register(descriptor, select.POLLIN)
        open_ends = len(buffers)
        while open_ends:
            # Ready data is taken even when the deadline passed while this process was busy elsewhere.
            ready = poller.poll(max(0.0, self._deadline - time.monotonic()) * 1000)
            if not ready:
                raise self._unusable(f"did not answer within {TIME_LIMIT:g} s", "a `Match exec` command in it may hang")
            for descriptor, _ in ready:
                data = os.read(descriptor, 65536)
                buffers[descriptor] += data
                if not data:
                    poller.unregister(descriptor)
                    open_ends -= 1
            if len(stdout) + len(stderr) > OUTPUT_LIMIT:
                raise self._unusable(f"printed more than {OUTPUT_LIMIT // 1024} kB", "is this OpenSSH's ssh?")
        return bytes(stdout), bytes(stderr)

    def _unusable(self, cause: str, hint: str) -> ConfigError:
        return ConfigError(
            f"`ssh -G {self._target}` {cause}",
            host=self._host.name,
            hint=f"run it by hand; it reads ~/.ssh/config: {hint}",
        )


def _wait(process: subprocess.Popen[bytes], seconds: float) -> int | None:
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return None


def abandon(process: subprocess.Popen[bytes]) -> None:
    """Kill ``process`` and its group, and wait only for a moment: one that cannot die is left behind."""
    for stream in (process.stdout, process.stderr):
        if stream is not None:
            stream.close()
    if process.poll() is None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        _wait(process, 0.5)


# --- What may be given to ssh ---------------------------------------------------------------------------------------


def may_be_target(name: str) -> bool:
    """Tell whether ``name`` can be given to ssh as a host: no option, nothing that a shell interprets."""
    return len(name) <= 253 and bool(_TARGET.match(name))


def may_be_user(name: str) -> bool:
    """Tell whether ``name`` can be given to ssh as a user."""
    return len(name) <= 128 and bool(_USER.match(name))


def _checked_target(host: Host) -> str:
    target = host.ssh or host.address
    if not target:
        raise ConfigError("has neither address nor ssh", host=host.name, hint=f"see {host.source}")
    if not may_be_target(target):
        raise ConfigError(f"{target!r} is no host name that may be given to ssh", host=host.name, hint=f"see {host.source}")
    if host.user is not None and not may_be_user(host.user):
        raise ConfigError(f"{host.user!r} is no user name that may be given to ssh", host=host.name, hint=f"see {host.source}")
    return target


def _checked_hostname(host: Host, hostname: str) -> str:
    bare = hostname[1:-1] if hostname.startswith("[") and hostname.endswith("]") else hostname
    if may_be_target(bare):
        return bare
    raise ConfigError(
        f"ssh says that the host is called {hostname[:80]!r}, which is no host name",
        host=host.name,
        hint="see HostName in ~/.ssh/config",
    )


# --- The answer of ssh -G -------------------------------------------------------------------------------------------


def _from_output(host: Host, target: str, output: bytes) -> SshSettings:
    options = _parse(output)
    hostname = _checked_hostname(host, host.address or _first(options, "hostname") or target)
    user = host.user or _first(options, "user")
    port = host.port or _port(host, _first(options, "port"))
    if not user:
        raise ConfigError("`ssh -G` names no user", host=host.name, hint="is the ssh on PATH OpenSSH's?")
    notes: list[str] = []
    known = {"h": hostname, "n": target, "p": str(port), "r": user, "k": _first(options, "hostkeyalias") or target}

    def path(text: str) -> Path | None:
        try:
            return Path(_expand(text, known))
        except ValueError as error:
            notes.append(f"{text} in the ssh configuration is not used: {error}")
            return None

    def paths(texts: list[str]) -> tuple[Path, ...]:
        return tuple(found for found in map(path, texts) if found is not None)

    if _is_set(options, "knownhostscommand"):
        notes.append("KnownHostsCommand in the ssh configuration is not used")
    settings = SshSettings(
        target=target,
        hostname=hostname,
        port=port,
        user=user,
        identity_files=paths(_not_none(options.get("identityfile", []))),
        identities_only=_first(options, "identitiesonly") == "yes",
        identity_agent=_agent(_first(options, "identityagent"), path),
        certificate_files=paths(_not_none(options.get("certificatefile", []))),
        proxy_jump=_jumps(_first(options, "proxyjump")),
        proxy_command=_first(options, "proxycommand") if _is_set(options, "proxycommand") else None,
        user_known_hosts=paths(_file_list(_first(options, "userknownhostsfile"))),
        global_known_hosts=paths(_file_list(_first(options, "globalknownhostsfile"))),
        host_key_alias=_first(options, "hostkeyalias"),
        revoked_host_keys=_revoked(host, _first(options, "revokedhostkeys"), path),
        connect_timeout=_seconds(_first(options, "connecttimeout")),
    )
    return _with_explicit(host, replace(settings, notes=tuple(notes)))


def _parse(output: bytes) -> dict[str, list[str]]:
    options: dict[str, list[str]] = {}
    for line in os.fsdecode(output).splitlines():
        key, _, value = line.partition(" ")
        options.setdefault(key.lower(), []).append(value.strip())
    return options


def _first(options: Mapping[str, list[str]], key: str) -> str | None:
    values = options.get(key)
    return values[0] if values and values[0] else None


def _is_set(options: Mapping[str, list[str]], key: str) -> bool:
    return (_first(options, key) or "none").lower() != "none"


def _not_none(values: list[str]) -> list[str]:
    return [value for value in values if value and value.lower() != "none"]


def _port(host: Host, text: str | None) -> int:
    if text is not None and text.isdecimal() and len(text) <= 5 and 1 <= int(text) <= 65535:
        return int(text)
    raise ConfigError(f"`ssh -G` answers with the port {text!r}", host=host.name, hint="is the ssh on PATH OpenSSH's?")


def _seconds(text: str | None) -> float | None:
    try:
        seconds = float(text or "")
    except ValueError:
        return None
    return seconds if 0 < seconds < 1e6 else None


def _agent(text: str | None, path: Callable[[str], Path | None]) -> str | None:
    if text is None or text == "SSH_AUTH_SOCK":
        return None
    if text == "none":
        return text
    if text.startswith("$") and not text.startswith("${"):
        return os.environ.get(text[1:]) or "none"
    found = path(text)
    # An agent that was chosen and cannot be named is no reason to ask another one.
    return "none" if found is None else str(found)


def _revoked(host: Host, text: str | None, path: Callable[[str], Path | None]) -> Path | None:
    if text is None or text.lower() == "none":
        return None
    found = path(text)
    if found is None:
        raise ConfigError(f"cannot tell which file RevokedHostKeys {text} is", host=host.name)
    return found


def _jumps(text: str | None) -> tuple[str, ...]:
    if text is None or text.strip().lower() == "none":
        return ()
    return tuple(hop.strip() for hop in text.split(",") if hop.strip())


def _file_list(text: str | None) -> list[str]:
    """Split a list of files; ssh prints names with blanks unquoted, so a name begins with ``/``, ``~`` or a token."""
    if text is None or text.lower() == "none":
        return []
    names: list[str] = []
    for word in text.split(" "):
        if names and not word.startswith(("/", "~", "%", "${")) and _may_continue(names[-1], word):
            names[-1] += " " + word
        elif word:
            names.append(word)
    return names


def _may_continue(name: str, word: str) -> bool:
    # A relative name is possible too, if rare: then nothing is called by the two words together.
    return not Path(word).is_file() or Path(name + " " + word).exists()


# --- Tokens ---------------------------------------------------------------------------------------------------------


def _home() -> str:
    """Return the home directory as ssh sees it: from the account, whatever HOME says."""
    import pwd

    try:
        return pwd.getpwuid(os.getuid()).pw_dir
    except KeyError:
        return os.path.expanduser("~")  # noqa: PTH111 - Path.home() raises where there is none


def _local_user() -> str | None:
    import pwd

    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return os.environ.get("LOGNAME") or os.environ.get("USER")


def _expand(text: str, known: Mapping[str, str]) -> str:
    """Return ``text`` with ``~``, ``%`` tokens and ``${variables}`` replaced; ValueError says which is not possible."""
    if text == "~" or text.startswith("~/"):
        text = _home() + text[1:]
    elif text.startswith("~"):
        text = os.path.expanduser(text)  # noqa: PTH111 - somebody else's home; Path would raise

    def token(match: re.Match[str]) -> str:
        value = known.get(match.group(1)) or _local_token(match.group(1))
        if value is None:
            raise ValueError(f"rdiag does not know the token {match.group(0)}")
        return value

    def variable(match: re.Match[str]) -> str:
        value = os.environ.get(match.group(1))
        if value is None:
            raise ValueError(f"the environment variable {match.group(1)} is not set")
        return value

    return _VARIABLE.sub(variable, _TOKEN.sub(token, text))


def _local_token(letter: str) -> str | None:
    if letter == "%":
        return "%"
    if letter == "d":
        return _home()
    if letter == "u":
        return _local_user()
    if letter == "i":
        return str(os.getuid())
    if letter in {"l", "L"}:
        name = os.uname().nodename
        return name.partition(".")[0] if letter == "L" else name
    return None


def expand_proxy_command(settings: SshSettings) -> str | None:
    """Return ProxyCommand with ``%h``, ``%p``, ``%r``, ``%n`` and ``%%`` replaced; None when there is none.

    The result is for ``/bin/sh -c``, as ssh does it: it is the user's own command line out of ssh_config. What is put
    into it holds no character that a shell interprets. Raises ConfigError for other tokens, and for such characters.
    """
    if settings.proxy_command is None:
        return None
    values = {"h": settings.hostname, "p": str(settings.port), "r": settings.user, "n": settings.target, "%": "%"}

    def token(match: re.Match[str]) -> str:
        letter = match.group(1)
        value = values.get(letter)
        if value is None:
            raise ConfigError(
                f"ProxyCommand holds the token {match.group(0)}, which rdiag does not replace",
                hint="%h, %p, %r, %n and %% are replaced; or use ProxyJump",
            )
        fitting = _SHELL_PROOF_USER if letter == "r" else _TARGET
        if letter != "%" and not fitting.match(value):
            raise ConfigError(f"{value!r} cannot be put into ProxyCommand in place of %{letter}")
        return value

    return _TOKEN.sub(token, settings.proxy_command)


# --- hosts.yaml on top, or alone ------------------------------------------------------------------------------------


def _with_explicit(host: Host, settings: SshSettings) -> SshSettings:
    """Return ``settings`` with what hosts.yaml says in place of what ssh says; name, user and port are in already."""
    if host.identity_file is not None:
        settings = replace(settings, identity_files=(host.identity_file,), identities_only=True)
    if host.jump is not None:
        settings = replace(settings, proxy_jump=_jumps(host.jump), proxy_command=None)
    if host.known_hosts is not None:
        settings = replace(settings, user_known_hosts=(host.known_hosts,), global_known_hosts=())
    return settings


def _without_client(host: Host, target: str) -> SshSettings:
    user = host.user or _local_user()
    if not user:
        raise ConfigError("nothing says which user to log in as", host=host.name, hint="set user: in hosts.yaml")
    settings = SshSettings(
        target=target,
        hostname=_checked_hostname(host, target),
        port=host.port or 22,
        user=user,
        identity_files=tuple(Path(_expand(name, {})) for name in _IDENTITIES),
        user_known_hosts=tuple(Path(_expand(name, {})) for name in _USER_KNOWN_HOSTS),
        global_known_hosts=_GLOBAL_KNOWN_HOSTS,
        notes=(NO_CLIENT_NOTE,),
    )
    return _with_explicit(host, settings)
