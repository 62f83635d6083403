"""Every number that a verdict hangs on, from ``thresholds.json``: value, unit, where it comes from and since when.

Users override values with ``--thresholds FILE``; the finding then names that file as the source. Some are bounds of one
scale: a shipped one gives way where a user's own would contradict it, so that no override is without effect.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from functools import lru_cache

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Mapping, Sequence

PATH = os.path.join(os.path.dirname(os.path.abspath(__file__)), "thresholds.json")
OVERRIDDEN = "your thresholds file"
"""The source of a user's own, where the file is not told."""
ASCENDING = (
    ("nccl.degraded_ratio", "nccl.note_ratio", "nccl.ok_ratio"),
    ("nccl.latency_32k_good_us", "nccl.latency_32k_bad_us"),
)
"""Bounds of one scale each, none above the next."""


@dataclass(frozen=True)
class Threshold:
    """One of them."""

    name: str
    """``gpu.temperature_c``: the command, then what is measured with its unit."""
    value: float
    unit: str
    source: str
    as_of: str
    """Month it was looked up, ``2026-08``; empty for a user's own."""

    @property
    def provenance(self) -> str:
        """Where it comes from, for a finding."""
        return "%s (%s)" % (self.source, self.as_of) if self.as_of else self.source


@lru_cache(maxsize=1)
def standard() -> dict[str, Threshold]:
    """Return the shipped ones, by name."""
    with open(PATH, encoding="utf-8") as stream:
        table = json.load(stream)
    return {
        name: Threshold(name, float(row["value"]), row["unit"], row["source"], row["as_of"]) for name, row in table.items()
    }


class Thresholds:
    """The shipped ones with a user's own in their place.

    Args:
        overrides: values by name.
        file: where they are from, for findings; "" where that is not known.

    Raises:
        ValueError: there is no threshold of that name, the value is no number from 0 to 1e12, or two of them contradict
            each other.
    """

    def __init__(self, overrides: Mapping[str, float] | None = None, file: str = "") -> None:
        self._all = dict(standard())
        self._source = "yours (%s)" % file if file else OVERRIDDEN
        for name, value in (overrides or {}).items():
            if name not in self._all:
                raise ValueError("there is no threshold %r; there are %s" % (name, ", ".join(sorted(self._all))))
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1e12:
                raise ValueError("the threshold %s must be a number from 0 to 1e12, not %r" % (name, value))
            self._all[name] = Threshold(name, float(value), self._all[name].unit, self._source, "")
        for scale in ASCENDING:
            self._give_way(scale, [name for name in scale if name in (overrides or {})])

    def __getitem__(self, name: str) -> Threshold:
        """Return the threshold called ``name``."""
        return self._all[name]

    def _give_way(self, scale: Sequence[str], own: Sequence[str]) -> None:
        """Move the shipped bounds of a scale out of the way of the user's own."""
        for lower, upper in zip(own, own[1:]):
            if self._all[lower].value > self._all[upper].value:
                told = lower, self._all[lower].value, upper, self._all[upper].value
                raise ValueError("the threshold %s (%g) must not be above %s (%g)" % told)
        for name in own:
            bound = self._all[name].value
            for place, other in enumerate(scale):
                shipped = self._all[other]
                above = place > scale.index(name)
                if other not in own and (shipped.value < bound if above else shipped.value > bound):
                    source = "%s, with %s" % (self._source, name)
                    self._all[other] = Threshold(other, bound, shipped.unit, source, "")
