"""Where a probe's answer goes: to the agent, or, for a run repeated by hand, to a file."""

from __future__ import annotations

import os
import sys
from _thread import allocate_lock

from .frames import Encoder

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Protocol

    class Channel(Protocol):
        """Takes messages."""

        def send(self, kind: str, payload: bytes) -> None:
            """Pass one message on."""


class AgentChannel:
    """A pipe to the agent, out of reach of whatever prints to stdout or stderr and of child processes.

    Args:
        descriptor: number of the pipe.
        nonce: nonce of the messages.
    """

    def __init__(self, descriptor: int, nonce: str) -> None:
        os.set_inheritable(descriptor, False)  # noqa: FBT003 - the only way this call takes it
        status = os.fstat(descriptor)
        self._descriptor = descriptor
        self._identity = (status.st_dev, status.st_ino)
        self._encoder = Encoder(nonce)
        self._one_at_a_time = allocate_lock()

    def send(self, kind: str, payload: bytes) -> None:
        """Write one frame; leave the process when nobody is there to read it. Any thread may call this."""
        with self._one_at_a_time:
            self._write(kind, memoryview(self._encoder.encode(kind, payload)))

    def _write(self, kind: str, data: memoryview) -> None:
        try:
            self._check_identity()
            while data:
                data = data[os.write(self._descriptor, data) :]
        except OSError as error:
            if kind in ("result", "error"):
                os.write(2, b"rdiag: the pipe to the agent is gone (%s)\n" % str(error).encode("utf-8"))
                os._exit(1)
            raise

    def _check_identity(self) -> None:
        """Raise OSError when code that closes descriptors it does not own gave our number to a file of its own."""
        status = os.fstat(self._descriptor)
        if (status.st_dev, status.st_ino) != self._identity:
            raise OSError("its number belongs to another file now")


class HandChannel:
    """Shows messages on stderr and writes the result to ``result.json`` in the run directory."""

    def __init__(self, directory: str) -> None:
        self._path = os.path.join(directory, "result.json")

    def send(self, kind: str, payload: bytes) -> None:
        """Pass one message on."""
        if kind == "result":
            temporary = self._path + ".new"
            with open(temporary, "wb") as stream:
                stream.write(payload)
            os.replace(temporary, self._path)
            sys.stderr.write("result: %s\n" % self._path)
        else:
            sys.stderr.write("%s: %s\n" % (kind, payload.decode("utf-8", "backslashreplace")))


def wait_for_agent(entrance: int) -> None:
    """Wait for the byte that says that the agent is ready; leave the process when the agent is gone."""
    ready = os.read(entrance, 1)
    os.close(entrance)
    if not ready:
        os._exit(1)
