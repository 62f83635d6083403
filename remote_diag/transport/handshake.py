"""From a connected socket to a logged-in connection, over jump hosts where the route has some."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from ..errors import RdiagError
from ..host import Host
from ..known_hosts import HostKeyVerifier
from . import failures
from .auth import KeyAuthentication
from .client import dispose, open_connection
from .libraries import paramiko
from .opening import Opening, identify
from .sockets import Deadline, Wire
from .watchdog import Watchdog

if TYPE_CHECKING:
    from ..ssh_config import SshSettings
    from .base import ConnectionFacts


def run(
    host: Host,
    opening: Opening,
    facts: ConnectionFacts,
    connections: list[Any],
    *,
    verifier: Callable[[Host, SshSettings], HostKeyVerifier] = HostKeyVerifier,
) -> None:
    """Finish what ``opening`` began; appends one authenticated connection for each leg of the route.

    Args:
        host: the host to reach.
        opening: under way towards the first server of the route.
        facts: filled in as far as it gets.
        connections: where each ``fabric.Connection`` goes as soon as it exists, so that the caller can close it.
        verifier: decides about the key of each leg; ``rdiag trust`` has one that looks and goes no further.

    Raises:
        RdiagError: by phase; a failure at a jump host names it.
    """
    try:
        wire, route = opening.result()
    finally:
        facts.phase_seconds.update(opening.seconds)
    for position, (leg, settings) in enumerate(route):
        last = position == len(route) - 1
        target = f"{settings.user}@{settings.hostname}:{settings.port}"
        if last:
            facts.target = target
        else:
            facts.notes.append(f"through the jump host {target}")
        with _named(None if last else target):
            if position > 0:
                wire = _through(connections[-1], settings, host, opening.deadline)
            # The leg's own Host: a key that is pinned for the host says nothing about its jump hosts.
            login = _Login(leg, settings, wire, opening.deadline, verifier(leg, settings))
            try:
                connections.append(login.connection())
            finally:
                login.record(facts, last=last)


class _Login:
    """One server: key exchange, host key, authentication."""

    def __init__(
        self, host: Host, settings: SshSettings, wire: Wire, deadline: Deadline, verifier: HostKeyVerifier
    ) -> None:
        self._host = host
        self._settings = settings
        self._wire = wire
        self._deadline = deadline
        self._where = f"{settings.hostname}:{settings.port}"
        self._verifier = verifier
        self._watchdog = Watchdog(deadline.remaining(), wire.close)
        self._authentication = KeyAuthentication(host, settings, patience=self._watchdog.paused)
        self._phase = "host-key"
        self._started = time.monotonic()
        self._seconds: dict[str, float] = {}
        self._key: tuple[str, bytes] | None = None
        self._key_source: str | None = None

    def connection(self) -> Any:
        """Return the authenticated connection."""
        with self._watchdog:
            try:
                connection = open_connection(
                    self._settings,
                    self._wire,
                    key_types=self._verifier.preferred_key_types(),
                    accept_key=self._accept,
                    authentication=self._authentication,
                    timeout=max(0.1, self._deadline.remaining()),
                )
            except RdiagError:
                if self._watchdog.fired:
                    raise self._too_late() from None
                raise
            except Exception as error:
                if self._watchdog.fired or self._deadline.passed:
                    raise self._too_late() from error
                raise failures.handshake_failure(error, self._host, self._where, self._phase) from error
            finally:
                self._clock()
        if self._watchdog.fired:
            dispose(connection)
            raise self._too_late()
        return connection

    def record(self, facts: ConnectionFacts, *, last: bool) -> None:
        """Write what is known into ``facts``: times add up over the legs, the rest is about the last one."""
        for phase, seconds in self._seconds.items():
            facts.phase_seconds[phase] = facts.phase_seconds.get(phase, 0.0) + seconds
        for note in (*self._settings.notes, *self._verifier.notes):
            if note not in facts.notes:
                facts.notes.append(note)
        if not last:
            return
        facts.server_version = self._wire.server_identification or None
        facts.auth_method = self._authentication.method
        facts.banner = self._authentication.banner
        facts.host_key_source = self._key_source
        if self._key is not None:
            digest = hashlib.sha256(self._key[1]).digest()
            facts.host_key_type = self._key[0]
            facts.host_key_fingerprint = "SHA256:" + base64.b64encode(digest).decode("ascii").rstrip("=")

    def _accept(self, key_type: str, blob: bytes) -> None:
        self._key = (key_type, blob)
        self._key_source = self._verifier.verify(key_type, blob)
        self._clock()
        self._phase = "auth"

    def _clock(self) -> None:
        now = time.monotonic()
        self._seconds[self._phase] = now - self._started
        self._started = now

    def _too_late(self) -> RdiagError:
        doing = "negotiating the encryption" if self._phase == "host-key" else "logging in"
        return failures.timed_out(self._host, f"{doing} ({self._where})", self._phase, self._deadline.seconds)


def _through(connection: Any, settings: SshSettings, host: Host, deadline: Deadline) -> Wire:
    """Return a wire to the next server, carried by a connection to the one before it."""
    where = f"{settings.hostname}:{settings.port}"
    transport = connection.client.get_transport()
    try:
        channel = transport.open_channel(
            "direct-tcpip", (settings.hostname, settings.port), ("", 0), timeout=max(0.1, deadline.remaining())
        )
    except paramiko().SSHException as error:
        raise failures.jump_failure(error, host, where, deadline) from error
    wire = Wire(channel)
    try:
        identify(wire, host, where, deadline)
    except BaseException:
        wire.close()
        raise
    return wire


@contextlib.contextmanager
def _named(jump_host: str | None) -> Iterator[None]:
    """Say in an error at which jump host it happened; None for the host itself."""
    try:
        yield
    except RdiagError as error:
        if jump_host is not None:
            error.message = f"at the jump host {jump_host}: {error.message}"
            error.args = (error.message,)
        raise
