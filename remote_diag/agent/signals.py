"""Signals as bytes on a pipe, so that the event loop sees them beside everything else."""

from __future__ import annotations

import os
import signal

STOPPING = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
"""Signals by which somebody asks the agent itself to stop."""


class SignalPipe:
    """Turns the signals of :data:`STOPPING` and SIGCHLD into readable bytes; SIGPIPE becomes an error code."""

    def __init__(self) -> None:
        self.descriptor, writer = os.pipe()
        os.set_blocking(self.descriptor, False)
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)
        for number in (*STOPPING, signal.SIGCHLD):
            signal.signal(number, lambda _number, _frame: None)

    def read(self) -> list[int]:
        """Return the numbers of the signals that arrived since the last call."""
        try:
            return list(os.read(self.descriptor, 4096))
        except BlockingIOError:
            return []


def name_of(number: int) -> str:
    """Return the usual name of a signal, such as ``SIGKILL``."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return "signal %d" % number
