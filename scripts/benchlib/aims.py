"""What rdiag aims at, as ratios of times measured side by side."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from . import contenders
from .clock import Times


@dataclass(frozen=True)
class Aim:
    """``value`` is to be at most ``limit``; infinity for what is told without an aim."""

    what: str
    value: float
    limit: float
    unit: str = "times"

    @property
    def met(self) -> bool:
        """Whether it is."""
        return self.value <= self.limit

    def as_dict(self) -> dict[str, Any]:
        """Return the object that --json prints."""
        limit = None if math.isinf(self.limit) else self.limit
        return {**asdict(self), "value": round(self.value, 3), "limit": limit, "met": self.met}


# (round trip in ms, what is compared with, largest ratio)
LIMITS = (
    (0.0, contenders.SSH_STDIN, 1.0),
    (0.0, contenders.SCP_SSH, 0.55),
    (50.0, contenders.SSH_STDIN, 0.8),
    (50.0, contenders.SCP_SSH, 0.3),
)


def of_race(rtt_ms: float, times: dict[str, Times]) -> list[Aim]:
    """Return the aims that stand for one distance."""
    if contenders.RDIAG not in times:
        return []
    ours = times[contenders.RDIAG].median
    return [
        Aim(f"rdiag / {other}, {rtt:g} ms", ours / times[other].median, limit)
        for rtt, other, limit in LIMITS
        if rtt == rtt_ms and other in times
    ]
