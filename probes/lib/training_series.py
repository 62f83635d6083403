"""Points of a training log gathered into series: bounded in memory, extremes never lost."""

from __future__ import annotations

import math
from collections import deque
from statistics import median
from typing import NamedTuple

from .training_dialects import DIALECTS
from .training_log import Point

ENDS = 5
"""Points that the value at the start and at the end is the median of: one odd batch decides nothing."""
MAX_SERIES = 64
"""Series that are kept; points of others are counted."""
SPREAD = 1000
"""Extremes kept per series while reading, at most; half of them the lowest of their stretch, half the highest."""


class Key(NamedTuple):
    """Which series a point belongs to."""

    family: str
    """Whose rules hold for the numbers: the family of the dialect."""
    metric: str
    position: int | None
    split: str | None
    rank: int | None

    @property
    def label(self) -> str:
        """The name as people read it: ``train/full_acc_0``."""
        name = self.metric if self.position is None else f"{self.metric}_{self.position}"
        return f"{self.split}/{name}" if self.split else name


class Series:
    """One metric over the run."""

    def __init__(self, key: Key) -> None:
        self.key = key
        self.count = 0
        """Finite points."""
        self.not_finite = 0
        self.first_not_finite: Point | None = None
        self.first: Point | None = None
        self.last: Point | None = None
        self.lowest: Point | None = None
        self.highest: Point | None = None
        self._head: list[float] = []
        self._tail: deque[float] = deque(maxlen=ENDS)
        self._stretch = 1
        self._extremes: list[tuple[Point, Point]] = []
        self._filled = 0

    def add(self, point: Point) -> None:
        """Add the next point."""
        if not math.isfinite(point.value):
            self.not_finite += 1
            self.first_not_finite = self.first_not_finite or point
            return
        self.count += 1
        self.first = self.first or point
        self.last = point
        if self.lowest is None or point.value < self.lowest.value:
            self.lowest = point
        if self.highest is None or point.value > self.highest.value:
            self.highest = point
        if len(self._head) < ENDS:
            self._head.append(point.value)
        self._tail.append(point.value)
        self._spread(point)

    def _spread(self, point: Point) -> None:
        if self._extremes and self._filled < self._stretch:
            low, high = self._extremes[-1]
            self._extremes[-1] = (point if point.value < low.value else low, point if point.value > high.value else high)
            self._filled += 1
            return
        if len(self._extremes) >= SPREAD // 2:
            self._extremes = _halved(self._extremes)
            self._stretch *= 2
        self._extremes.append((point, point))
        self._filled = 1

    @property
    def start(self) -> float | None:
        """Median of the first five points."""
        return median(self._head) if self._head else None

    @property
    def end(self) -> float | None:
        """Median of the last five points."""
        return median(self._tail) if self._tail else None

    def thinned(self, most: int) -> list[Point]:
        """Return at most ``most`` points (2 or more) in order, the lowest and the highest of every stretch among them."""
        extremes = self._extremes
        while True:
            points: list[Point] = []
            for low, high in extremes:
                pair = (low, high) if low.where.offset <= high.where.offset else (high, low)
                points += pair if low is not high else pair[:1]
            if len(points) <= max(2, most):
                return points
            extremes = _halved(extremes)


def _halved(extremes: list[tuple[Point, Point]]) -> list[tuple[Point, Point]]:
    merged = []
    for place in range(0, len(extremes), 2):
        pair = extremes[place : place + 2]
        lows, highs = [low for low, _ in pair], [high for _, high in pair]
        merged.append((min(lows, key=_value), max(highs, key=_value)))
    return merged


def _value(point: Point) -> float:
    return point.value


class Gathered:
    """All series of a log."""

    def __init__(self) -> None:
        self.series: dict[Key, Series] = {}
        self.left_out = 0
        """Points of series beyond :data:`MAX_SERIES`."""

    def add(self, point: Point) -> Series | None:
        """Add a point to its series, and return that; None when there are too many already."""
        key = Key(DIALECTS[point.dialect].family, point.metric, point.position, point.split, point.where.rank)
        series = self.series.get(key)
        if series is None:
            if len(self.series) >= MAX_SERIES:
                self.left_out += 1
                return None
            series = self.series[key] = Series(key)
        series.add(point)
        return series

    def find(self, metric: str, position: int | None) -> Series | None:
        """Return the series of a metric that stands for the training: not the validation's, of the lowest rank seen."""
        found = [
            series
            for key, series in self.series.items()
            if key.metric == metric and key.position == position and series.count and key.split != "summary"
        ]
        if not found:
            return None
        return min(found, key=_unlikeness)


def _unlikeness(series: Series) -> tuple[bool, bool, int]:
    key = series.key
    return key.split == "val", key.family == "generic", -1 if key.rank is None else key.rank
