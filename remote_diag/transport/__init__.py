"""Ways to a host; :func:`for_host` picks the one its inventory entry names."""

from __future__ import annotations

from ..host import Host
from .base import Transport


def for_host(host: Host) -> Transport:
    """Return an unconnected transport for ``host``."""
    if host.transport == "local":
        from .local import LocalTransport

        return LocalTransport(host)
    from .ssh import SshTransport

    return SshTransport(host)
