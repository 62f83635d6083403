"""What the fields of hosts.yaml may hold: one pydantic type each, with messages that say what to write instead.

Host names, users and aliases become arguments of ssh, parts of local paths and of what a terminal shows, so their
characters are listed, never excluded. Raises nothing itself: pydantic collects what the checks say.
"""

from __future__ import annotations

import base64
import binascii
import ipaddress
import re
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

from .text import safe
from .transport.base import SafePath

NAME_RULE = "lower-case letters, digits and . _ -, beginning with a letter or digit, at most 64 characters"
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}\Z")
_RESERVED_NAMES = {"all"}
_HOSTNAME = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9._-]*[A-Za-z0-9_.])?\Z")
_ALIAS = re.compile(r"[A-Za-z0-9._][A-Za-z0-9._:%+-]*\Z")
_USER = re.compile(r"[A-Za-z0-9._](?:[A-Za-z0-9._@+\\-]*[A-Za-z0-9._@+$-])?\Z")
_JUMP = re.compile(r"(?:(?P<user>[^@\[\]]+)@)?(?:\[(?P<literal>[^\[\]]+)\]|(?P<host>[^@:\[\]]+))(?::(?P<port>[0-9]{1,5}))?\Z")
_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
_CONTAINER = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]+\Z")
_COMMAND = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+-]*\Z")
_CONDA_NAME = re.compile(r"[A-Za-z0-9_.][A-Za-z0-9_.+-]*\Z")
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029]")
_FINGERPRINT = re.compile(r"SHA256:[A-Za-z0-9+/]{43}\Z")
MAX_ENVIRONMENT_BYTES = 128 * 1024 - 1
"""Largest ``NAME=value`` that Linux passes to a program (MAX_ARG_STRLEN), without the closing NUL."""
MIN_LEASE = 10.0
"""Seconds; the client is heard from every 5."""


def wrong(message: str, hint: str | None = None) -> PydanticCustomError:
    """Return the error that a check raises: what is wrong, and what to write instead."""
    return PydanticCustomError("rdiag", "{text}", {"text": message, "hint": hint})


def _shown(text: str) -> str:
    return "'" + safe(text, limit=60) + "'"


def check_name(name: str) -> str:
    """Return ``name`` when a host or group may be called so."""
    if name in _RESERVED_NAMES:
        raise wrong(f"{name!r} stands for every host and cannot be a name", "choose another name")
    if _NAME.match(name):
        return name
    likely = re.sub(r"[^a-z0-9._-]+", "-", name.lower()).strip("._-")[:64]
    hint = f"for example {likely}" if likely and likely not in _RESERVED_NAMES else None
    raise wrong(f"{_shown(name)} cannot be a name; allowed are {NAME_RULE}", hint)


def check_address(text: str) -> str:
    """Return ``text`` when it is a host name or an IP address."""
    if len(text) <= 253 and (_is_ipv6(text) or _HOSTNAME.match(text)):
        return text
    raise wrong(f"{_shown(text)} is no host name and no IP address", _address_hint(text))


def _is_ipv6(text: str) -> bool:
    if not re.match(r"[A-Za-z0-9._:%-]+\Z", text) or ":" not in text:
        return False
    try:
        ipaddress.IPv6Address(text)
    except ValueError:
        return False
    return True


def _address_hint(text: str) -> str | None:
    user, at, rest = text.rpartition("@")
    if at and _USER.match(user) and _HOSTNAME.match(rest):
        return f"write user: {user} and address: {rest}"
    host, colon, port = text.rpartition(":")
    if colon and port.isdecimal() and (_HOSTNAME.match(host) or host.startswith("[")):
        return f"write address: {host.strip('[]')} and port: {port}"
    if text.startswith("[") and text.endswith("]"):
        return f"write it without brackets: '{text[1:-1]}'"
    if "://" in text:
        return "write the host name alone, without a scheme"
    if not text.isascii():
        return _punycode_hint(text)
    return "allowed are letters, digits and . _ -, not beginning with -"


def _punycode_hint(text: str) -> str | None:
    try:
        encoded = text.encode("idna").decode("ascii")
    except UnicodeError:
        return "write it in ASCII"
    return f"write it in ASCII: {encoded}" if _HOSTNAME.match(encoded) else "write it in ASCII"


def check_alias(text: str) -> str:
    """Return ``text`` when it can be an alias for ``ssh -G``."""
    if _ALIAS.match(text) and len(text) <= 253:
        return text
    hint = "the name after `Host` in ~/.ssh/config; letters, digits and . _ : % + -, not beginning with -"
    user, at, rest = text.rpartition("@")
    if at and _USER.match(user) and _ALIAS.match(rest):
        hint = f"write user: {user} and ssh: {rest}"
    raise wrong(f"{_shown(text)} cannot be an ssh alias", hint)


def check_user(text: str) -> str:
    """Return ``text`` when it can be a login name."""
    if _USER.match(text) and len(text) <= 128:
        return text
    raise wrong(f"{_shown(text)} cannot be a user name", "letters, digits and . _ @ + \\ -, not beginning with -")


def check_jump(text: str) -> str:
    """Return ``text`` when it is a list of jump hosts as ProxyJump has them."""
    for hop in text.split(","):
        match = _JUMP.match(hop)
        if not match or not _jump_is_sound(match):
            raise wrong(f"{_shown(hop)} is no jump host", "write [user@]host[:port]; several separated by commas")
    return text


def _jump_is_sound(match: re.Match[str]) -> bool:
    user, literal, host, port = match.group("user", "literal", "host", "port")
    if user is not None and not _USER.match(user):
        return False
    if port is not None and not 1 <= int(port) <= 65535:
        return False
    return _is_ipv6(literal) if literal is not None else bool(_HOSTNAME.match(host)) and len(host) <= 253


def expand(text: str) -> Path:
    """Return a local path with ``~`` replaced by the home directory, as far as there is one."""
    try:
        return Path(text).expanduser()
    except RuntimeError:
        return Path(text)


def check_local_path(text: str) -> str:
    """Return ``text`` when it is a path on this machine that does not depend on the working directory."""
    _refuse_control(text)
    if not text.startswith(("/", "~")):
        raise wrong(f"{_shown(text)} is relative; a path on this machine begins with / or ~", f"write ~/{text}, or the whole path")
    if not expand(text).is_absolute():
        raise wrong(f"{_shown(text)}: there is no such home directory", "write the whole path")
    return text


def check_remote_path(text: str) -> str:
    """Return ``text`` when it is an absolute path on a host."""
    _refuse_control(text)
    if text.startswith("~"):
        raise wrong(f"{_shown(text)}: ~ is not expanded on the host", f"write the whole path: /home/USER{text[1:]}")
    if not text.startswith("/"):
        raise wrong(f"{_shown(text)} is relative", "a path on a host begins with /")
    if len(text.encode()) > 4095:
        raise wrong("the path is longer than 4095 bytes")
    return text


def check_venv(text: str) -> str:
    """Return ``text`` when it is the absolute path of a virtual environment."""
    match = re.match(r"(/.+)/bin/(?:python[0-9.]*|activate(?:\.[a-z]+)?)\Z", text)
    if match:
        raise wrong(f"{_shown(text)} is a file in a virtual environment", f"name its folder: {match.group(1)}")
    return check_remote_path(text)


def check_python(text: str) -> str:
    """Return ``text`` when it is an absolute path, or a command that the host's login PATH finds."""
    return text if _COMMAND.match(text) else check_remote_path(text)


def check_conda(text: str) -> str:
    """Return ``text`` when it is the name or the prefix of a conda environment."""
    if "/" in text or text.startswith("~"):
        return check_remote_path(text)
    if _CONDA_NAME.match(text):
        return text
    raise wrong(f"{_shown(text)} cannot be a conda environment", "write its name, or the whole path of its prefix")


def check_container(text: str) -> str:
    """Return ``text`` when docker can have a container called so."""
    if _CONTAINER.match(text) and len(text) <= 255:
        return text
    raise wrong(f"{_shown(text)} cannot be a container", "a name or an id, as `docker ps` shows it")


def check_cache_dir(text: str) -> str:
    """Return ``text`` when a shell can be given it as it is: it becomes part of the command sent to the host."""
    hint = "letters, digits and . _ - /; without a leading / it begins at the login directory, like .cache/rdiag"
    if text.startswith("~/"):
        raise wrong(f"{_shown(text)}: ~ is not expanded on the host", f"relative begins at the login directory: {text[2:]}")
    try:
        path = SafePath(text.rstrip("/"))
    except ValueError:
        raise wrong(f"{_shown(text)} cannot be a cache directory", hint) from None
    if "." in path.split("/") or len(path) > 200:
        raise wrong(f"{_shown(text)} cannot be a cache directory", hint)
    return str(path)


def check_env_name(name: str) -> str:
    """Return ``name`` when an environment variable can be called so and rdiag does not use it."""
    if not _ENV_NAME.match(name):
        raise wrong(f"{_shown(name)} cannot be an environment variable", "letters, digits and _, no digit first")
    if name.startswith("RDIAG_"):
        raise wrong(f"{_shown(name)}: names that begin with RDIAG_ are used by rdiag itself", "rename the variable")
    return name


def check_env_value(text: str) -> str:
    """Return ``text`` when a program can receive it in its environment: anything without NUL."""
    if "\0" in text:
        raise wrong("an environment variable cannot hold a NUL character", "remove it")
    if len(text.encode()) > MAX_ENVIRONMENT_BYTES - 256:
        raise wrong("the value is larger than an environment variable can be (128 KiB)", "put it into a file")
    return text


def check_host_key(text: str) -> str:
    """Return a pinned key: a SHA256 fingerprint, or ``type base64`` without its comment."""
    if _FINGERPRINT.match(text):
        return text
    hint = "as `ssh-keygen -lf` prints it: SHA256:...; or the two words of a .pub file: ssh-ed25519 AAAA..."
    kind, _, rest = text.partition(" ")
    encoded = rest.split(" ")[0]
    try:
        blob = base64.b64decode(encoded, validate=True)
    except (binascii.Error, ValueError):
        blob = b""
    length = int.from_bytes(blob[:4], "big")
    if len(blob) <= 4 + length or blob[4 : 4 + length] != kind.encode("utf-8", "replace"):
        raise wrong(f"{_shown(text)} is no host key", hint)
    return f"{kind} {encoded}"


def _refuse_control(text: str) -> None:
    if not text:
        raise wrong("is empty", "give a value or remove the line")
    found = _CONTROL.search(text)
    if found:
        raise wrong(f"{_shown(text)} holds the control character U+{ord(found.group()):04X}", "remove it")


Name = Annotated[str, AfterValidator(check_name)]
Address = Annotated[str, AfterValidator(check_address)]
Alias = Annotated[str, AfterValidator(check_alias)]
User = Annotated[str, AfterValidator(check_user)]
Jump = Annotated[str, AfterValidator(check_jump)]
LocalPath = Annotated[str, AfterValidator(check_local_path)]
RemotePath = Annotated[str, AfterValidator(check_remote_path)]
Venv = Annotated[str, AfterValidator(check_venv)]
Python = Annotated[str, AfterValidator(check_python)]
Conda = Annotated[str, AfterValidator(check_conda)]
Container = Annotated[str, AfterValidator(check_container)]
CacheDir = Annotated[str, AfterValidator(check_cache_dir)]
EnvName = Annotated[str, AfterValidator(check_env_name)]
EnvValue = Annotated[str, AfterValidator(check_env_value)]
HostKey = Annotated[str, AfterValidator(check_host_key)]
Port = Annotated[int, Field(ge=1, le=65535)]
Gpus = Annotated[int, Field(ge=0, le=1024)]
ConnectTimeout = Annotated[float, Field(gt=0, le=3600)]
Timeout = Annotated[float, Field(gt=0, le=7 * 24 * 3600)]
Lease = Annotated[float, Field(ge=MIN_LEASE, le=24 * 3600)]
