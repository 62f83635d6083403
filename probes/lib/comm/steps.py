"""The steps of a trace: which spans of an annotation are one step, and what share of each a kind of work takes.

Each call of the annotated code is one step, however close the next one follows. On the GPU a call has a span on each
stream that works for it; where no number tells which belong together, spans of one name on different streams that overlap
do. Spans within another one on the same stream (or thread) are parts of that step.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from math import inf

from probes.lib.comm.overlap import Share, union

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NamedTuple, Optional, Sequence, Tuple

    from probes.lib.comm.overlap import Ahead, Interval, Union

    Label = Tuple[str, int]

    class Span(NamedTuple):
        """One span of the step's annotation, us."""

        start: float
        end: float
        label: Optional[Label]
        """Its name and number, where that tells which spans are of one call."""
        name: str
        stream: str
        """Stream of the GPU, or thread of the program."""
else:
    from collections import namedtuple

    Span = namedtuple("Span", "start end label name stream")

_TOUCHING = 1e-3
"""us by which spans that follow one another may overlap: a start and a length are both rounded."""


class Windows:
    """The windows of one GPU.

    Args:
        kind: profiler-step, annotation, or span: from the first to the last event on the GPU.
        clock: gpu where the spans are those of the GPU's own work, cpu where they are those of the program.
        steps: start and end of each step; they may touch and overlap.
    """

    def __init__(self, kind: str, clock: str, steps: Sequence[Interval]) -> None:
        self.kind = kind
        self.clock = clock
        self.steps = sorted(steps)
        self.spans = union(steps)
        """What any step covers: disjoint and in order."""
        self.total = sum(end - start for start, end in self.spans)


def of_spans(kind: str, clock: str, spans: Sequence[Span], *, joined: bool) -> Windows:
    """Return the windows of an annotation's spans: those with one label are one step's, on several streams.

    Args:
        kind: As in :class:`Windows`.
        clock: As in :class:`Windows`.
        spans: In any order.
        joined: Whether a numbered step lasts until the next one begins, as one of the profiler does on the GPU: idling
            between them is part of it.
    """
    hulls: dict[Label, Interval] = {}
    for span in spans:
        if span.label is not None:
            known = hulls.get(span.label, (span.start, span.end))
            hulls[span.label] = min(span.start, known[0]), max(span.end, known[1])
    steps = [] if joined else list(hulls.values())
    if joined:
        numbers = {number: hull for (_, number), hull in hulls.items()}
        for number, (start, end) in numbers.items():
            steps.append((start, max(end, numbers[number + 1][0]) if number + 1 in numbers else end))
    loose = _outermost([span for span in spans if span.label is None])
    steps += _calls(loose) if clock == "gpu" else [(span.start, span.end) for span in loose]
    return Windows(kind, clock, steps)


def _outermost(spans: Sequence[Span]) -> list[Span]:
    """Return the spans that are within no other one of their stream, by start."""
    kept: list[Span] = []
    last: dict[str, Span] = {}
    for span in sorted(spans, key=lambda span: (span.start, -span.end)):
        outer = last.get(span.stream)
        if outer is not None and span.end <= outer.end and (span.start < outer.end or span.start == outer.start):
            continue
        kept.append(span)
        last[span.stream] = span
    return kept


def _calls(spans: Sequence[Span]) -> list[Interval]:
    """Return the calls that spans on several streams, by start and without numbers, are of."""
    found: list[Interval] = []
    # Of the last call of each name: its place among those found, and its streams.
    current: dict[str, tuple[int, set[str]]] = {}
    for span in spans:
        place, streams = current.get(span.name, (-1, set()))
        if place >= 0 and span.start < found[place][1] - _TOUCHING and span.stream not in streams:
            found[place] = found[place][0], max(found[place][1], span.end)
            streams.add(span.stream)
        else:
            current[span.name] = len(found), {span.stream}
            found.append((span.start, span.end))
    return found


class SharePerStep(Share):
    """Running measures like :class:`Share`, and afterwards how much of each step they take.

    Args:
        steps: start and end of each; those without a length have no share and are left out.
    """

    __slots__ = ("_exposed", "_moments", "_next", "_place", "_steps", "_totals")

    def __init__(self, steps: Sequence[Interval]) -> None:
        super().__init__()
        self._steps = [step for step in steps if step[1] > step[0]]
        self._moments = array("d", sorted({moment for step in self._steps for moment in step}))
        self._totals, self._exposed = array("d"), array("d")
        self._place = 0
        self._next = self._moments[0] if self._moments else inf

    def add(self, start: float, end: float, hiding: Union | Ahead, exposed: float = -1.0) -> None:
        """Add a part, as :meth:`Share.add` does."""
        if self._next < end:
            self._note(max(start, self._end), end, hiding)
        # As in Share.add, without the cost of calling it for each of millions.
        if start < self._end:
            start, exposed = self._end, -1.0
        if end > start:
            length = end - start
            self.total += length
            self.exposed += exposed if exposed >= 0 else length - hiding.covered(start, end)
            self._end = end

    def _note(self, start: float, end: float, hiding: Union | Ahead) -> None:
        while self._place < len(self._moments) and self._moments[self._place] < end:
            moment = self._moments[self._place]
            inside = max(0.0, moment - start)
            self._totals.append(self.total + inside)
            self._exposed.append(self.exposed + inside - (hiding.covered(start, moment) if inside else 0.0))
            self._place += 1
        self._next = self._moments[self._place] if self._place < len(self._moments) else inf

    def shares(self) -> tuple[array[float], array[float]]:
        """Return the share of each step that the work takes, and the share that nothing hides: 0 to 1, by start."""
        for _ in range(self._place, len(self._moments)):
            self._totals.append(self.total)
            self._exposed.append(self.exposed)
        self._place = len(self._moments)
        whole, exposed = array("d"), array("d")
        for start, end in self._steps:
            first, last = bisect_left(self._moments, start), bisect_left(self._moments, end)
            for values, shares in ((self._totals, whole), (self._exposed, exposed)):
                shares.append(min(1.0, max(0.0, values[last] - values[first]) / (end - start)))
        return whole, exposed

    def lengths(self) -> array[float]:
        """Return the length of each step, us, by start."""
        return array("d", (end - start for start, end in self._steps))
