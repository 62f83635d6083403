"""A rank without torch: speaks as ``worker_main`` does, and misbehaves as the variable ``PLAY`` says.

``PLAY`` is a JSON object: ``do`` (hang, kill, exit, error, stop, wrong, silent, garbage), ``rank``, ``phase`` and
``size`` of the moment, ``text`` of an error, ``name`` of the GPUs, ``with_p2p``: only where P2P is on.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from typing import Any

SPEC = json.loads(open(sys.argv[1]).read())  # noqa: SIM115, PTH123
PLAY: dict[str, Any] = json.loads(os.environ.get("PLAY", "{}"))
LOCK = threading.Lock()
BEATS = threading.Event()


def say(**what: Any) -> None:
    with LOCK:
        os.write(SPEC["descriptor"], (json.dumps(what) + "\n").encode())


def beat() -> None:
    while not BEATS.wait(0.2):
        say(beat=True)


def due(phase: str, size: int | None) -> bool:
    """Whether this is the moment to misbehave."""
    if PLAY.get("with_p2p") and os.environ.get("NCCL_P2P_DISABLE") == "1":
        return False
    return (
        PLAY.get("rank", SPEC["rank"]) == SPEC["rank"]
        and PLAY.get("phase") == phase
        and PLAY.get("size", size) == size
    )


def phase(name: str, size: int | None = None) -> None:
    say(phase=name, size=size)
    if not due(name, size):
        return
    do = PLAY["do"]
    if do == "kill":
        os.kill(os.getpid(), PLAY.get("signal", signal.SIGKILL))
    elif do == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif do == "exit":
        os._exit(3)
    elif do == "hang":
        time.sleep(600)
    elif do == "silent":
        BEATS.set()
        time.sleep(600)
    elif do == "error":
        sys.stdout.write("node:1:1 [0] transport.cc:1 NCCL WARN the first word\n")
        sys.stdout.flush()
        raise RuntimeError(PLAY.get("text", "NCCL error: unhandled cuda error"))
    elif do == "garbage":
        os.write(SPEC["descriptor"], b"\xff\xfe{nonsense}\n[1,2]\n{\"phase\"\n")


def main() -> None:
    phase("import")
    if SPEC["backend"] == "nccl":
        phase("devices")
    phase("meet")
    say(ready=True, name=PLAY.get("name", "Stand-in"), bus_id=f"0000:{SPEC['rank']:02x}:00.0", uuid=None, free=PLAY.get("free", 1 << 30), torch="2.9", library="2.27.7")
    size = 0
    for line in sys.stdin:
        order = json.loads(line)
        if order["do"] == "stop":
            say(done="stop")
            return
        if order["do"] == "prepare":
            size = order["size"]
            phase("prepare", size)
            phase("check", size)
            wrong = 3 if PLAY.get("do") == "wrong" and due("check", size) else 0
            phase("warm-up", size)
            say(done="prepare", wrong=wrong if order["check"] else None, count=size // 2, estimate_us=10.0 + size / 1e4)
            continue
        if order["latency"]:
            phase("latency", size)
        phase("burst", size)
        us = 10.0 + size / 1e4
        say(done="time", latency_us=[us + SPEC["rank"]] * order["latency"], burst_us=[us] * order["bursts"])


if __name__ == "__main__":
    threading.Thread(target=beat, daemon=True).start()
    try:
        main()
    except RuntimeError as error:
        say(error=type(error).__name__, text=str(error))
    os._exit(0)
