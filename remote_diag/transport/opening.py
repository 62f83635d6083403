"""The first steps towards a host, in a thread of their own: settings, name, TCP, identification lines.

They need no paramiko, so they run while it is being imported. Whoever waits for them does so with a limit, because
neither a name server nor a silent host can be hurried.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from ..errors import InternalError, RdiagError, UnreachableError
from ..host import Host
from . import sockets
from .failures import BUSY_SERVER, network_failure, timed_out
from .sockets import Deadline, NotAnSshServer, Wire

if TYPE_CHECKING:
    from ..ssh_config import SshSettings
    from .proxy_command import ProxyProcess


_PAUSES = (0.3, 0.8, 2.0)
"""Seconds before another try, give or take half, when a server turns a connection away before it says a word."""


class Opening:
    """The way to a host, up to the identification line of the first server on it; starts at once.

    Args:
        host: where to.
        deadline: when to give up; resolving, connecting and identification share it.
    """

    def __init__(self, host: Host, deadline: Deadline) -> None:
        self.seconds: dict[str, float] = {"resolve": 0.0, "connect": 0.0}
        self._host = host
        self.deadline = deadline
        self._step = ("resolve", "reading the ssh settings")
        self._route: tuple[tuple[Host, SshSettings], ...] = ()
        self._wire: Wire | None = None
        self._proxy: ProxyProcess | None = None
        self._failure: BaseException | None = None
        self._abandoned = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name=f"connect {host.name}", daemon=True)
        self._thread.start()

    def result(self) -> tuple[Wire, tuple[tuple[Host, SshSettings], ...]]:
        """Return the connected wire and the legs of the route; raise an RdiagError by phase."""
        self._thread.join(self.deadline.remaining() + 0.05)
        if self._thread.is_alive():
            self.abandon()
            phase, doing = self._step
            raise timed_out(self._host, doing, phase, self.deadline.seconds)
        if self._failure is not None:
            raise self._failure
        assert self._wire is not None  # noqa: S101 - the thread ended without a failure
        return self._wire, self._route

    def abandon(self) -> None:
        """Close what is open, and whatever the thread may still open; idempotent."""
        with self._lock:
            self._abandoned.set()
            wire, proxy = self._wire, self._proxy
        if wire is not None:
            wire.close()
        if proxy is not None:
            proxy.close()

    def _run(self) -> None:
        try:
            self._open()
        except RdiagError as error:
            self._failure = error
        except Exception as error:  # noqa: BLE001 - raised again by result(), in the caller's thread
            failure = InternalError(f"{type(error).__name__}: {error}", host=self._host.name, phase=self._step[0])
            failure.__cause__ = error
            self._failure = failure

    def _open(self) -> None:
        from .. import route, ssh_config

        started = time.monotonic()
        self._route = route.route(self._host)
        _, settings = self._route[0]
        command = ssh_config.expand_proxy_command(settings)
        if command is not None:
            self.seconds["resolve"] = time.monotonic() - started
            self._identify(self._proxied(command), settings, started=time.monotonic())
            return
        self._step = ("resolve", f"looking up {settings.hostname}")
        addresses = sockets.lookup(settings.hostname, settings.port, host=self._host.name)
        resolved = time.monotonic()
        self.seconds["resolve"] = resolved - started
        where = f"{settings.hostname}:{settings.port}"
        for pause in (*_PAUSES, None):
            self._step = ("connect", f"connecting to {where}")
            try:
                wire = Wire(sockets.connect(addresses, self.deadline))
            except OSError as error:
                raise network_failure(error, self._host, where, self._step[1], self.deadline.seconds) from None
            try:
                self._identify(wire, settings, started=resolved)
            except UnreachableError as error:
                if pause is None or not self._may_try_again(error, pause):
                    raise
            else:
                return

    def _may_try_again(self, error: UnreachableError, pause: float) -> bool:
        """Wait, and return True, when a busy server turned us away: nothing was begun, and no login was tried.

        Many hosts behind one jump host are many logins at once to sshd, and MaxStartups drops some of them at random.
        """
        if not isinstance(error.__cause__, (EOFError, ConnectionError)):
            return False
        from random import uniform

        pause *= uniform(0.5, 1.5)  # noqa: S311 - it only has to differ from that of the others
        return pause < self.deadline.remaining() and not self._abandoned.wait(pause)

    def _proxied(self, command: str) -> Wire:
        from .proxy_command import ProxyProcess

        self._step = ("connect", "starting ProxyCommand")
        proxy = ProxyProcess(command)
        with self._lock:
            self._proxy = proxy
        return Wire(proxy)

    def _identify(self, wire: Wire, settings: SshSettings, *, started: float) -> None:
        with self._lock:
            self._wire = wire
            abandoned = self._abandoned.is_set()
        if abandoned:
            wire.close()
            return
        self._step = ("connect", "waiting for the SSH identification")
        where = f"{settings.hostname}:{settings.port}"
        try:
            identify(wire, self._host, where, self.deadline)
        except UnreachableError as error:
            wire.close()
            if self._proxy is not None:
                error.details += self._proxy.last_words()
            raise
        self.seconds["connect"] = time.monotonic() - started


def identify(wire: Wire, host: Host, where: str, deadline: Deadline) -> None:
    """Exchange identification lines over ``wire``; raises UnreachableError that says what answered instead."""
    doing = "waiting for the SSH identification"
    try:
        wire.exchange_identification(deadline)
    except NotAnSshServer as error:
        raise UnreachableError(
            f"{where} is not an SSH server: it answered '{error}'",
            host=host.name,
            phase="connect",
            hint="check address and port",
        ) from None
    except EOFError as error:
        said = f" after '{error}'" if str(error) else ""
        raise UnreachableError(
            f"{where} closed the connection before it identified itself{said}",
            host=host.name,
            phase="connect",
            hint=BUSY_SERVER,
            retryable=True,
        ) from error
    except OSError as error:
        raise network_failure(error, host, where, doing, deadline.seconds) from error
