"""Several readings of one card, and readings that claim the same card.

``nvidia-smi -l`` answers again and again: of a card that is described more than once the last reading counts. Two
readings that agree in one part of a card's identity and differ in another are no two moments: then somebody's row is
not what it seems, and nobody can tell whose.
"""

from __future__ import annotations

from .missing import known

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Sequence

    from .smi_reading import GpuReading

IDENTITY = ("uuid", "bus_id", "index")


def latest(readings: Sequence[GpuReading]) -> tuple[list[GpuReading], int]:
    """Return (the last reading of each card, in the order in which the cards came first; how often one came at most)."""
    kept: list[GpuReading] = []
    times: list[int] = []
    for reading in readings:
        place = next((place for place, old in enumerate(kept) if _is_same(old, reading)), None)
        if place is None:
            kept.append(reading)
            times.append(1)
            continue
        for part in IDENTITY:
            if known(getattr(reading, part)) is None:
                setattr(reading, part, getattr(kept[place], part))
        kept[place] = reading
        times[place] += 1
    for position, reading in enumerate(kept):
        reading.position = position
    return kept, max(times, default=0)


def _is_same(first: GpuReading, second: GpuReading) -> bool:
    parts = [(known(getattr(first, part)), known(getattr(second, part))) for part in IDENTITY]
    both = [(a, b) for a, b in parts if a is not None and b is not None]
    # An index alone names no card: another host's file counts from 0 as well.
    named = any(a is not None and b is not None for a, b in parts[:2])
    return named and all(a == b for a, b in both)


def confused(readings: Sequence[GpuReading]) -> list[str]:
    """Return, in words, what different cards have in common and cannot: an index, a UUID, an address."""
    found = []
    for part in IDENTITY:
        owners: dict[object, list[str]] = {}
        for reading in readings:
            value = known(getattr(reading, part))
            if value is not None:
                owners.setdefault(value, []).append(reading.describe())
        found += ["%s %s: %s" % (part, value, "; ".join(names[:4])) for value, names in owners.items() if len(names) > 1]
    return found
