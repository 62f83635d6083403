"""A limit for calls into libraries that wait without one."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from types import TracebackType


class Watchdog:
    """When the ``with`` block runs longer than ``seconds``, ``action`` is called once, in another thread.

    The action closes whatever the block waits on, so that the wait ends; :attr:`fired` tells afterwards why.
    """

    def __init__(self, seconds: float, action: Callable[[], object]) -> None:
        self.fired = False
        self._action = action
        self._left = max(0.0, seconds)
        self._timer: threading.Timer | None = None
        self._started = 0.0

    def __enter__(self) -> Watchdog:
        """Start the clock."""
        self._start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Stop the clock."""
        self._stop()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Stop the clock for a while: a person is asked something."""
        self._stop()
        try:
            yield
        finally:
            self._start()

    def _start(self) -> None:
        self._started = time.monotonic()
        self._timer = threading.Timer(self._left, self._fire)
        self._timer.daemon = True
        self._timer.start()

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
            self._left = max(0.0, self._left - (time.monotonic() - self._started))

    def _fire(self) -> None:
        self.fired = True
        self._action()
