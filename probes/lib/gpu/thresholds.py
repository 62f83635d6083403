"""Every number that a verdict hangs on, from ``thresholds.json``: value, unit, where it comes from and since when.

Users override values with ``--thresholds FILE``; the finding then names that file as the source.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from functools import lru_cache

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Mapping

PATH = os.path.join(os.path.dirname(os.path.abspath(__file__)), "thresholds.json")
OVERRIDDEN = "your thresholds file"


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

    Raises:
        ValueError: there is no threshold of that name, or the value is no number from 0 to 1e12.
    """

    def __init__(self, overrides: Mapping[str, float] | None = None) -> None:
        self._all = dict(standard())
        for name, value in (overrides or {}).items():
            if name not in self._all:
                raise ValueError("there is no threshold %r; there are %s" % (name, ", ".join(sorted(self._all))))
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1e12:
                raise ValueError("the threshold %s must be a number from 0 to 1e12, not %r" % (name, value))
            self._all[name] = Threshold(name, float(value), self._all[name].unit, OVERRIDDEN, "")

    def __getitem__(self, name: str) -> Threshold:
        """Return the threshold called ``name``."""
        return self._all[name]
