"""Lengths of calls: millions of them, of which a percentile is asked, in bounded memory and exactly."""

from __future__ import annotations

from array import array
from math import inf

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Iterable, Iterator, Sequence

    from probes.lib.comm.overlap import Scratch

PENDING = 2_000_000
"""Lengths of all kinds together that stay in memory: 16 MB."""
_SORTED = 200_000
_BUCKETS = 1000


class Calls:
    """Calls of one kind of communication."""

    def __init__(self) -> None:
        self.kernel_us = 0.0
        """Sum of the parts within the windows; parallel ones count each."""
        self.recent = array("d")
        """Lengths, us, that are not in the file."""
        self._scratch: Scratch | None = None
        self._segments = array("q")
        """Place and count of what is in the file, alternately."""

    def __len__(self) -> int:
        """Return of how many calls the length is known."""
        return len(self.recent) + sum(self._segments[1::2])

    def store(self, scratch: Scratch) -> None:
        """Move the recent ones into the file; where that cannot be they stay."""
        place = scratch.append(self.recent) if self.recent else None
        if place is not None:
            self._segments.extend((place, len(self.recent)))
            self._scratch, self.recent = scratch, array("d")

    def blocks(self) -> Iterator[array[float]]:
        """Yield all lengths, some at a time."""
        if self._scratch is not None:
            for place, count in zip(self._segments[::2], self._segments[1::2]):
                yield from self._scratch.floats(place, count)
        if self.recent:
            yield self.recent


def percentile(calls: Sequence[Calls], share: float) -> float | None:
    """Return the nearest-rank percentile of all lengths together; None without any."""
    count = sum(map(len, calls))
    return ranked(calls, max(0, -int(-share * count // 1) - 1)) if count else None


def extremes(calls: Sequence[Calls]) -> tuple[float, float] | None:
    """Return the shortest and the longest; None without any."""
    low, high = inf, -inf
    for block in _blocks(calls):
        least, most = min(block), max(block)
        low, high = min(low, least), max(high, most)
    return (low, high) if low <= high else None


def ranked(calls: Sequence[Calls], rank: int) -> float:
    """Return the length that has ``rank`` smaller ones before it.

    Many are neither sorted as Python's objects, 40 bytes each, nor copied: the range in which it lies is narrowed.
    """
    count = sum(map(len, calls))
    found = extremes(calls)
    assert found is not None  # noqa: S101 - the caller's promise
    low, high = found
    while count > _SORTED and low < high:
        scale = _BUCKETS / (high - low)
        if scale > 1e300:
            break
        counts = [0] * (_BUCKETS + 1)
        for block in _blocks(calls):
            for value in block:
                if low <= value <= high:
                    counts[int((value - low) * scale)] += 1
        bucket = 0
        while rank >= counts[bucket]:
            rank -= counts[bucket]
            bucket += 1
        count, least, most = counts[bucket], inf, -inf
        for block in _blocks(calls):
            for value in block:
                if low <= value <= high and int((value - low) * scale) == bucket:
                    least, most = value if value < least else least, value if value > most else most
        low, high = least, most
    if low >= high:
        return low
    return sorted(value for block in _blocks(calls) for value in block if low <= value <= high)[rank]


def _blocks(calls: Iterable[Calls]) -> Iterator[array[float]]:
    for each in calls:
        yield from each.blocks()


def of(values: Iterable[float]) -> list[Calls]:
    """Return values as something that is ranked."""
    calls = Calls()
    calls.recent.extend(values)
    return [calls]
