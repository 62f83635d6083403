"""What is asked of a connected ssh server: a command, a sign of life. Every answer is waited for with a limit."""

from __future__ import annotations

import threading
import time
from typing import Any

from ..errors import ConnectionLost
from ..host import Host
from . import failures
from .base import SafeCommand
from .libraries import paramiko
from .watchdog import Watchdog

REPLY_TIMEOUT = 15.0
"""Seconds that a connected server may take to answer a request."""
_SESSION_FREES = 3.0
"""Seconds in which a server that allows few sessions is asked again: it frees one only when the command has ended."""


def open_session(transport: Any, host: Host) -> Any:
    """Return a new session channel; raises ConnectionLost when the server does not answer."""
    give_up = time.monotonic() + _SESSION_FREES
    while True:
        try:
            return transport.open_session(timeout=REPLY_TIMEOUT)
        except paramiko().ChannelException as error:
            if time.monotonic() >= give_up:
                raise failures.request_failure(error, host, "opening a session") from error
            time.sleep(0.05)
        except (paramiko().SSHException, EOFError, OSError) as error:
            raise failures.request_failure(error, host, "opening a session") from error


def execute(transport: Any, command: SafeCommand, host: Host) -> Any:
    """Return the channel on which ``command`` runs."""
    channel = open_session(transport, host)
    with Watchdog(REPLY_TIMEOUT, transport.close) as watchdog:
        try:
            channel.exec_command(str(command))
        except (paramiko().SSHException, EOFError, OSError) as error:
            doing = "starting the command"
            if watchdog.fired:
                raise failures.no_reply(host, doing, REPLY_TIMEOUT) from error
            refused = transport.is_active()
            raise failures.request_failure(error, host, doing, refused=refused) from error
    return channel


def ping(transport: Any, timeout: float, host: Host) -> float:
    """Return the seconds that a request took which every server answers, if only to say that it does not know it."""
    # paramiko waits for the reply without a limit, hence the thread; closing the transport ends it.
    started = time.monotonic()
    asking = threading.Thread(target=transport.global_request, args=("keepalive@openssh.com",), daemon=True)
    asking.start()
    asking.join(timeout)
    took = time.monotonic() - started
    if asking.is_alive():
        transport.close()
        raise failures.no_reply(host, "looking for a sign of life", timeout)
    if not transport.is_active():
        raise ConnectionLost("the connection has ended", host=host.name, retryable=True)
    return took
