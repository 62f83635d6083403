"""The way to a host: through which jump hosts, as ssh's ProxyJump has it."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from .errors import ConfigError
from .host import Host
from .ssh_config import SshSettings, may_be_target, may_be_user, resolve

MAX_HOPS = 16
"""Jump hosts on the way to one host."""

_HOP = re.compile(r"(?:(?P<user>[^@]+)@)?(?:\[(?P<literal>[^\[\]]+)\]|(?P<host>[^:@\[\]]+))(?::(?P<port>[0-9]{1,5}))?\Z")


@dataclass(frozen=True)
class Hop:
    """One jump host, as ProxyJump names it."""

    host: str
    user: str | None = None
    port: int | None = None


def parse_hop(text: str) -> Hop:
    """Read ``[user@]host[:port]``, ``[user@][ipv6]:port`` or the same as an ``ssh://`` address.

    Raises:
        ConfigError: it is none of them, or holds characters that may not be given to ssh.
    """
    rest = text[len("ssh://") :].rstrip("/") if text.startswith("ssh://") else text
    if rest.count(":") > 1 and "[" not in rest:
        # A bare IPv6 address has no room for a port.
        user, at, address = rest.rpartition("@")
        rest = f"{user}{at}[{address}]"
    match = _HOP.match(rest)
    if match:
        name = match.group("literal") or match.group("host")
        user, port = match.group("user"), match.group("port")
        sound_port = port is None or 1 <= int(port) <= 65535
        if may_be_target(name) and (user is None or may_be_user(user)) and sound_port:
            return Hop(name, user, None if port is None else int(port))
    raise ConfigError(f"{text[:100]!r} is no jump host", hint="write [user@]host[:port]; several separated by commas")


def hop_host(host: Host, hop: Hop, *, jump: str | None = None) -> Host:
    """Return ``hop`` as a Host of its own: nothing of ``host`` applies to it but name, known_hosts and timeouts.

    Args:
        host: the host that is to be reached; errors on the way are errors about it.
        hop: the jump host.
        jump: how to get to the jump host itself; by default what ssh_config says.
    """
    return Host(
        name=host.name,
        ssh=hop.host,
        user=hop.user,
        port=hop.port,
        jump=jump,
        known_hosts=host.known_hosts,
        connect_timeout=host.connect_timeout,
        source=host.source,
    )


def route(host: Host, settings: SshSettings | None = None) -> tuple[tuple[Host, SshSettings], ...]:
    """Return every host to connect to on the way, in order, the last being ``host`` itself.

    As ssh does it: the first jump host of a list may have jump hosts of its own, the others are reached through the
    one before. An ``identity_file`` beside ``jump`` in hosts.yaml is offered to the jump hosts too, after their own.

    Raises:
        ConfigError: a jump host is not one, there are more than :data:`MAX_HOPS`, or the way leads in a circle.
    """
    ahead: list[tuple[Host, SshSettings]] = [(host, settings or resolve(host))]
    legs: list[tuple[Host, SshSettings]] = []
    while ahead:
        here, found = ahead.pop()
        legs.insert(0, (here, found))
        hops = [parse_hop(text) for text in found.proxy_jump]
        if len(legs) + len(hops) > MAX_HOPS + 1:
            raise ConfigError(f"more than {MAX_HOPS} jump hosts: {_shown(legs)}", host=host.name)
        if not hops:
            continue
        before = [_leg(host, hop, jump=None if position == 0 else "none") for position, hop in enumerate(hops)]
        legs = [*before[1:], *legs]
        ahead.append(before[0])
        _refuse_circle(host, [before[0], *legs])
    return tuple(legs)


def _leg(host: Host, hop: Hop, *, jump: str | None) -> tuple[Host, SshSettings]:
    resolved = hop_host(host, hop, jump=jump)
    settings = resolve(resolved)
    if host.jump is not None and host.identity_file is not None:
        settings = replace(settings, identity_files=(*settings.identity_files, host.identity_file))
    return resolved, settings


def _refuse_circle(host: Host, legs: list[tuple[Host, SshSettings]]) -> None:
    places = [(settings.hostname.lower(), settings.port, settings.user) for _, settings in legs]
    if len(set(places)) < len(places):
        raise ConfigError(
            f"the jump hosts lead in a circle: {_shown(legs)}",
            host=host.name,
            hint="see jump in hosts.yaml and ProxyJump in ~/.ssh/config; `ProxyJump none` ends the chain at a host",
        )


def _shown(legs: list[tuple[Host, SshSettings]]) -> str:
    return " -> ".join(f"{settings.user}@{settings.hostname}:{settings.port}" for _, settings in legs)
