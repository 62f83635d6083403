"""How much of a step communication takes, and how much of that computation hides.

Times are microseconds of the trace's own clock. Everything is the measure of a union of intervals, so what runs twice at
the same time on one GPU counts once. Definitions, for each GPU by itself:

* a step is a window; all windows together are the denominator of every share;
* communication is the union of the kernels of NCCL and of other libraries that move data between GPUs;
* of it, overlapped is where a kernel that computes runs at the same time, exposed is the rest. Copies hide nothing.
"""

from __future__ import annotations

import os
from array import array
from bisect import bisect_right
from heapq import merge
from os import SEEK_END
from tempfile import TemporaryFile

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import IO, Any, Iterable, Iterator, List, Sequence, Tuple

    Interval = Tuple[float, float]
    Event = Tuple[float, float, int]
    Run = Tuple["array[float]", "array[float]", "array[int]"]

RUN = 1 << 15
"""Events that are sorted at once: small enough to cost little as Python objects."""
ROOM = 4_000_000
"""Events that stay in memory: 80 MB."""
_BLOCK = 1 << 12
"""Events that are read back at once, and intervals that are worth forgetting."""
_FEW = 6
"""Runs whose times overlap and that are sorted together; more of them are merged one event at a time."""


class Scratch:
    """A file without a name that takes runs of events once memory holds enough of them; where it cannot, memory does.

    Args:
        folder: where it is made.
        room: events of all users together that stay in memory.
    """

    def __init__(self, folder: str, room: int = ROOM) -> None:
        self._folder = folder
        self._room = room
        self._file: IO[bytes] | None = None

    def put(self, run: Run) -> Run | Stored:
        """Keep a run, here or in the file."""
        self._room -= len(run[0])
        if self._room >= 0:
            return run
        try:
            if self._file is None:
                self._file = TemporaryFile(dir=self._folder)  # noqa: SIM115 - it goes with this object
            place = self._file.seek(0, SEEK_END)
            self._file.write(b"".join(part.tobytes() for part in run))
            self._file.flush()
        except OSError:
            # No space, or no folder: slower machines have swap, and nothing is lost.
            return run
        return Stored(self._file, place, run)


    def append(self, values: array[float]) -> int | None:
        """Write numbers into the file, and return their place there; None where that cannot be."""
        try:
            if self._file is None:
                self._file = TemporaryFile(dir=self._folder)  # noqa: SIM115 - it goes with this object
            place = self._file.seek(0, SEEK_END)
            self._file.write(values.tobytes())
            self._file.flush()
        except OSError:
            return None
        return place

    def floats(self, place: int, count: int) -> Iterator[array[float]]:
        """Yield ``count`` numbers that were written to a place, some at a time."""
        assert self._file is not None  # noqa: S101 - they were written
        for begin in range(0, count, RUN):
            part = array("d")
            part.frombytes(os.pread(self._file.fileno(), 8 * min(RUN, count - begin), place + 8 * begin))
            yield part


class Stored:
    """A run in a file."""

    def __init__(self, file: IO[bytes], place: int, run: Run) -> None:
        self._file = file
        self._place = place
        self._count = len(run[0])
        self.first = run[0][0]
        self.last = run[0][-1]

    def __iter__(self) -> Iterator[Event]:
        """Yield its events, read a few at a time."""
        for begin in range(0, self._count, _BLOCK):
            count = min(_BLOCK, self._count - begin)
            parts: list[Any] = []
            base = self._place
            for code in "ddi":
                part = array(code)
                data = os.pread(self._file.fileno(), part.itemsize * count, base + part.itemsize * begin)
                part.frombytes(data)
                parts.append(part)
                base += part.itemsize * self._count
            yield from zip(*parts)


class Events:
    """Many intervals with a key each, in 20 bytes an event; given back by their start.

    Args:
        scratch: where those go that are too many; without it all stay in memory.
    """

    def __init__(self, scratch: Scratch | None = None) -> None:
        self._scratch = scratch
        self._pending: list[Event] = []
        self._runs: list[Run | Stored] = []
        self._sorted = 0
        self._first = float("inf")
        self._last = float("-inf")

    @property
    def count(self) -> int:
        """How many were added."""
        return self._sorted + len(self._pending)

    @property
    def first(self) -> float:
        """The earliest start; infinite without any."""
        self._flush()
        return self._first

    @property
    def last(self) -> float:
        """The latest end; minus infinite without any."""
        self._flush()
        return self._last

    def add(self, start: float, end: float, key: int) -> None:
        """Add one; ``end`` is not before ``start``."""
        pending = self._pending
        pending.append((start, end, key))
        if len(pending) >= RUN:
            self._flush()

    def _flush(self) -> None:
        if self._pending:
            self._pending.sort()
            starts, ends, keys = zip(*self._pending)
            run = array("d", starts), array("d", ends), array("i", keys)
            self._runs.append(run if self._scratch is None else self._scratch.put(run))
            self._sorted += len(starts)
            self._first = min(self._first, starts[0])
            self._last = max(self._last, *ends)
            self._pending = []

    def drain(self) -> Iterator[Event]:
        """Yield all of them, by start; they are gone afterwards."""
        self._flush()
        runs = sorted(self._runs, key=_reach)
        self._runs = []
        runs.reverse()
        while runs:
            group = [runs.pop()]
            until = _reach(group[0])[1]
            # Runs whose starts interleave go together; a profiler writes almost in order, so that is few.
            while runs and _reach(runs[-1])[0] <= until:
                group.append(runs.pop())
                until = max(until, _reach(group[-1])[1])
            if len(group) == 1:
                yield from _events(group.pop())
            elif len(group) <= _FEW:
                events = [event for run in group for event in _events(run)]
                group.clear()
                # Sorted stretches behind one another: the sort finds and merges them.
                events.sort()
                yield from events
            else:
                yield from merge(*map(_events, group))


def _reach(run: Run | Stored) -> Interval:
    """Return the first and the last start of a run."""
    return (run.first, run.last) if isinstance(run, Stored) else (run[0][0], run[0][-1])


def _events(run: Run | Stored) -> Iterator[Event]:
    return iter(run) if isinstance(run, Stored) else zip(*run)


class Union:
    """A union of intervals, added by their start; then asked for how much of an interval it covers."""

    def __init__(self) -> None:
        self.starts = array("d")
        self.ends = array("d")
        self._before = array("d")
        self.total = 0.0
        # The same part is often asked about several times in a row.
        self._asked = (0.0, 0.0)
        self._answer = 0.0

    def add(self, start: float, end: float) -> None:
        """Add an interval that does not start before the last one did."""
        ends = self.ends
        if ends and start <= ends[-1]:
            if end > ends[-1]:
                self.total += end - ends[-1]
                ends[-1] = end
            return
        if end > start:
            self._before.append(self.total)
            self.starts.append(start)
            ends.append(end)
            self.total += end - start

    def covered(self, start: float, end: float) -> float:
        """Return the length of the part of (start, end) that the union covers."""
        if (start, end) != self._asked:
            self._asked = start, end
            self._answer = self._until(end) - self._until(start) if end > start else 0.0
        return self._answer

    def forget(self, moment: float) -> None:
        """Drop intervals that end before ``moment``, once they are many: nothing before it is asked about any more."""
        if len(self.ends) > 2 * _BLOCK and self.ends[_BLOCK] < moment:
            many = min(bisect_right(self.ends, moment), len(self.ends) - 1)
            for column in (self.starts, self.ends, self._before):
                del column[:many]

    def _until(self, moment: float) -> float:
        place = bisect_right(self.starts, moment) - 1
        if place < 0:
            return self._before[0] if self._before else 0.0
        return self._before[place] + min(moment, self.ends[place]) - self.starts[place]


class Ahead:
    """The union of parts that come by, known a little further than where it is asked about.

    Args:
        parts: start, end, key; by start.
    """

    def __init__(self, parts: Iterator[Event]) -> None:
        self._parts = parts
        self._known = Union()
        self._next: Event | None = next(parts, None)

    def covered(self, start: float, end: float) -> float:
        """Return the length of the part of (start, end) that is covered; nothing before what was forgotten."""
        coming, known = self._next, self._known
        if coming is not None and coming[0] < end:
            self._read_to(end)
        return known.covered(start, end) if known.ends and known.ends[-1] > start else 0.0

    def forget(self, moment: float) -> None:
        """Promise to ask for nothing before ``moment`` any more."""
        self._known.forget(moment)

    def total(self) -> float:
        """Read the rest, and return the length of all."""
        while self._next is not None:
            self._read_to(self._next[0] + 1)
            self._known.forget(self._next[0] if self._next is not None else 0.0)
        return self._known.total

    def _read_to(self, moment: float) -> None:
        coming, add, parts = self._next, self._known.add, self._parts
        while coming is not None and coming[0] < moment:
            add(coming[0], coming[1])
            coming = next(parts, None)
        self._next = coming


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the union of intervals in any order, as disjoint ones in order."""
    joined = Union()
    for start, end in sorted(intervals):
        joined.add(start, end)
    return list(zip(joined.starts, joined.ends))


def clipped(events: Iterable[Event], windows: Sequence[Interval]) -> Iterator[Tuple[float, float, int, bool]]:
    """Yield the parts of ``events`` that lie within ``windows``, by start, with the key and whether the event begins there.

    Args:
        events: by start.
        windows: disjoint and in order.
    """
    first = 0
    late: List[Tuple[float, float, int, bool]] = []
    for start, end, key in events:
        while first < len(windows) and windows[first][1] <= start:
            first += 1
        if late:
            # Parts in later windows of an event that began earlier take their turn.
            late.sort()
            while late and late[0][0] <= start:
                yield late.pop(0)
        if first == len(windows):
            continue
        begin, finish = windows[first]
        if begin <= start and end <= finish:
            yield start, end, key, True
            continue
        place = first
        while place < len(windows) and windows[place][0] < end:
            begin, finish = windows[place]
            part = max(start, begin), min(end, finish), key, begin <= start
            if part[1] > part[0] or begin <= start:
                late.append(part)
            place += 1
        late.sort()
        while late and late[0][0] <= start:
            yield late.pop(0)
    late.sort()
    yield from late


class Share:
    """Running measures of one kind of work while its parts come by, in the order of their starts."""

    __slots__ = ("_end", "exposed", "total")

    def __init__(self) -> None:
        self.total = 0.0
        """Length of the union, us."""
        self.exposed = 0.0
        """Length of what nothing hides, us."""
        self._end = float("-inf")

    def add(self, start: float, end: float, hiding: Union | Ahead, exposed: float = -1.0) -> None:
        """Add a part; ``hiding`` is what it may hide behind, ``exposed`` what it leaves of the whole part, where known."""
        # Several times faster than max(), in the innermost loop.
        if start < self._end:
            start, exposed = self._end, -1.0
        if end > start:
            length = end - start
            self.total += length
            self.exposed += exposed if exposed >= 0 else length - hiding.covered(start, end)
            self._end = end

    def follow(self, other: Share) -> None:
        """Take the measures of another one, which was given the same parts."""
        self.total, self.exposed, self._end = other.total, other.exposed, other._end
