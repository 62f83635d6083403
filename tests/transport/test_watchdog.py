"""The limit around calls that have none."""

from __future__ import annotations

import threading
import time

from remote_diag.transport.watchdog import Watchdog


def test_fires_once_and_says_so() -> None:
    fired: list[float] = []
    happened = threading.Event()

    def act() -> None:
        fired.append(time.monotonic())
        happened.set()

    with Watchdog(0.02, act) as watchdog:
        assert happened.wait(5.0)
    assert watchdog.fired
    assert len(fired) == 1


def test_does_not_fire_when_the_block_ends_first() -> None:
    fired = threading.Event()
    with Watchdog(0.2, fired.set) as watchdog:
        pass
    assert not fired.wait(0.4)
    assert not watchdog.fired


def test_a_pause_does_not_count() -> None:
    fired = threading.Event()
    with Watchdog(0.3, fired.set) as watchdog:
        with watchdog.paused():
            assert not fired.wait(0.6)
        assert fired.wait(5.0), "the clock goes on after the pause"
