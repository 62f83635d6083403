"""GPUs for the copying process of p2p that are bytearrays, and misbehave as the variable ``PLAY`` says.

``PLAY`` is a JSON object: ``gpus`` (how many), ``do`` (corrupt, swallow, hang, crash, stop, error) and ``pair`` where;
``text`` of an error, ``refused`` pairs, ``slow`` (pairs and their GB/s); the host is -1.
"""

from __future__ import annotations

import json
import os
import signal
import time
from typing import Any

PLAY: dict[str, Any] = json.loads(os.environ.get("PLAY", "{}"))


class Memory:
    def __init__(self, where: int, contents: bytearray) -> None:
        self.where, self.contents = where, contents


class Layer:
    version = "stand-in"

    def devices(self) -> list[dict[str, Any]]:
        return [{"name": "Stand-in", "bus_id": f"0000:{index:02x}:00.0", "uuid": f"GPU-{index}"} for index in range(PLAY.get("gpus", 2))]

    def can_access(self, source: int, target: int) -> bool | None:
        if -1 in (source, target) or source == target:
            return None
        return PLAY.get("refused") != "all" and [source, target] not in PLAY.get("refused", [])

    def blank(self, where: int, size: int) -> Memory:
        return Memory(where, bytearray(b"\xff" * size))

    def filled(self, where: int, size: int, seed: int) -> Memory:
        return Memory(where, self._contents(size, seed))

    def differing(self, buffer: Memory, seed: int) -> int:
        right = self._contents(len(buffer.contents), seed)
        return sum(one != other for one, other in zip(buffer.contents, right, strict=True)) if buffer.contents != right else 0

    def copy(self, target: Memory, source: Memory) -> None:
        due = PLAY.get("pair") == [source.where, target.where]
        do = PLAY.get("do") if due else None
        if do == "hang":
            time.sleep(600)
        elif do == "crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        elif do == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif do == "error":
            raise RuntimeError(PLAY.get("text", "CUDA error: an illegal memory access was encountered"))
        if do != "swallow":
            target.contents[:] = source.contents
        if do == "corrupt":
            target.contents[-1] ^= 1

    def settle(self) -> None:
        return

    def seconds(self, copies: list[tuple[Memory, Memory]], calls: int) -> float:  # noqa: ARG002
        target, source = copies[0]
        speed = float(PLAY.get("slow", {}).get(f"{source.where},{target.where}", 50.0))
        return 1e-5 + len(target.contents) / speed / 1e9

    @staticmethod
    def _contents(size: int, seed: int) -> bytearray:
        return bytearray((bytes((place + seed) % 251 for place in range(251)) * (size // 251 + 1))[:size])
