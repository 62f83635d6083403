"""A host over ssh: fabric on our own socket, with our own host-key check.

Importing this module is cheap: paramiko and fabric are imported inside ``connect``, while the network is busy.
"""

from __future__ import annotations

from typing import Any

from ..errors import ConnectionLost
from ..host import Host
from .base import ConnectionFacts, SafeCommand, SafePath
from .channels import SshChannel
from .opening import Opening
from .sockets import Deadline


class SshTransport:
    """A host over ssh; satisfies :class:`remote_diag.transport.base.Transport`."""

    def __init__(self, host: Host) -> None:
        self.facts = ConnectionFacts(transport="ssh", target=host.address or host.ssh or host.name)
        self._host = host
        self._opening: Opening | None = None
        self._connections: list[Any] = []

    def prestart(self) -> None:
        """Begin to connect in the background, and import paramiko and fabric while the network is busy."""
        if self._opening is None and not self._connections:
            self._opening = Opening(self._host, Deadline(self._host.connect_timeout))
            from . import handshake, libraries  # noqa: F401 - connect needs both

            libraries.fabric()

    def connect(self) -> None:
        """Connect, check the host key, log in; see :meth:`remote_diag.transport.base.Transport.connect`."""
        if self._connections:
            return
        self.prestart()
        assert self._opening is not None  # noqa: S101 - prestart made it
        opening, self._opening = self._opening, None
        try:
            from . import handshake  # paramiko and fabric, while the opening thread waits for the network

            handshake.run(self._host, opening, self.facts, self._connections)
        except BaseException:
            opening.abandon()
            self.close()
            raise

    def execute(self, command: SafeCommand) -> SshChannel:
        """Start ``command`` in the login directory; raise TypeError for anything but a SafeCommand."""
        if not isinstance(command, SafeCommand):
            raise TypeError(f"only a SafeCommand is executed, not {type(command).__name__}")
        from . import requests

        return SshChannel(requests.execute(self._transport, command, self._host), self._host.name)

    def upload(self, data: bytes, path: SafePath) -> None:
        """Create ``path`` holding ``data`` over SFTP; see :meth:`remote_diag.transport.base.Transport.upload`."""
        if not isinstance(path, SafePath):
            raise TypeError(f"only a SafePath is uploaded to, not {type(path).__name__}")
        from . import upload

        upload.upload(self._transport, data, path, self._host)

    def ping(self, timeout: float) -> float:
        """Return the seconds a replied round trip took; raise ConnectionLost when no reply came in time."""
        from . import requests

        return requests.ping(self._transport, timeout, self._host)

    def close(self) -> None:
        """End everything; idempotent, never raises."""
        if self._opening is not None:
            self._opening.abandon()
            self._opening = None
        connections, self._connections[:] = list(self._connections), []
        if connections:
            from .client import dispose

            # The innermost first: the others carry it.
            for connection in reversed(connections):
                dispose(connection)

    @property
    def _transport(self) -> Any:
        if not self._connections:
            raise ConnectionLost("not connected", host=self._host.name, phase="connect")
        return self._connections[-1].client.get_transport()
