"""What is alarming about a running training: told when it begins, and kept as a finding.

An alert is raised when it begins. One that is over stays, as ``degraded``: it happened. The rules:

* NaN or infinity: the first one in a loss is a failure, in anything else ``degraded``.
* Above a uniform guess (with a vocabulary size): the median of a loss's last five points is more than 1.1 times what
  guessing evenly among the rows costs, summed over the steps where a total over unrolled steps is printed. It is over
  when the median is no longer above the guess itself.
* Divergence: 20 points in a row are above twice the lowest median of 20 points so far, and more than 0.1 above it. So
  neither a spike nor noise counts, and a loss has to have been low for a while first.
* Silence: a running job on a working connection wrote no byte for so many minutes.
* NCCL, CUDA, Xid, tracebacks: as the log says; with the first rank that failed, by torchrun's root cause if there is
  one, otherwise by the first such line that names its rank.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from statistics import median
from typing import TYPE_CHECKING, Any, Literal

from .findings import LEVELS, Finding

if TYPE_CHECKING:
    from probes.lib.training_log import Milestone, Point, Where
    from probes.lib.training_series import Series

DIVERGED_POINTS = 20
"""So many points in a row far above the lowest level are divergence; fewer are a spike. The level is the median of as
many: the lowest of short stretches would be noise."""
DIVERGED_FACTOR = 2.0
DIVERGED_BY = 0.1
"""And by so much, nat: twice next to nothing is no divergence."""
_WINDOW = 5
_EVIDENCE = 3
_LOSSES = frozenset({"loss", "kl_div"})
_FAULTS: dict[str, tuple[Literal["fail", "degraded"], str, str | None]] = {
    "nccl-error": (
        "fail", "NCCL reports an error or a collective that timed out",
        "look at the first rank that failed, not at those that waited for it",
    ),
    "cuda-error": ("fail", "CUDA reports an error", "run once with CUDA_LAUNCH_BLOCKING=1 to get the line that is at fault"),
    "cuda-out-of-memory": ("fail", "a GPU has no memory left", None),
    "xid": ("fail", "the driver reports a GPU error (Xid)", "check that GPU before anything else runs on it"),
    "root-cause": ("fail", "torchrun reports a failed rank", None),
    "not-a-number": ("degraded", "the log speaks of a loss or gradient that is not a number", None),
    "exception": ("degraded", "the log has a traceback", None),
}  # fmt: skip
_HARD = frozenset({"nccl-error", "cuda-error", "cuda-out-of-memory", "xid"})
_Key = tuple[str, str]


@dataclass
class _Course:
    """The level of one loss."""

    recent: deque[float] = field(default_factory=lambda: deque(maxlen=DIVERGED_POINTS))
    lowest: float | None = None
    beyond: int = 0

    def add(self, value: float) -> None:
        self.recent.append(value)
        if self.lowest is not None and value > max(DIVERGED_FACTOR * self.lowest, self.lowest + DIVERGED_BY):
            self.beyond += 1
            return
        self.beyond = 0
        if len(self.recent) == DIVERGED_POINTS:
            level = median(self.recent)
            self.lowest = level if self.lowest is None else min(self.lowest, level)


class Alerts:
    """Watches points, faults and silence.

    Args:
        reading: the library's module that knows what a uniform guess costs.
        faults: kinds of milestones that are faults.
        vocabulary: rows of the head that the loss is over.
        stall: seconds of silence.
        tell: gets every alert when it is raised.
    """

    def __init__(
        self,
        reading: Any,
        faults: frozenset[str],
        *,
        vocabulary: int | None = None,
        stall: float | None = None,
        tell: Callable[[Finding], None] | None = None,
    ) -> None:
        self._reading = reading
        self._known_faults = faults
        self._vocabulary = vocabulary
        self._stall = stall
        self._tell = tell or (lambda _: None)
        self._raised: dict[_Key, Finding] = {}
        self._over: set[_Key] = set()
        self._courses: dict[int, _Course] = {}
        self._fault_counts: dict[str, int] = {}
        self._awaits_rank: set[str] = set()
        self._heard: float | None = None

    def findings(self) -> tuple[Finding, ...]:
        """Return all alerts, the worst first, otherwise in the order in which they were raised."""
        order = {level: place for place, level in enumerate(("fail", "degraded", "unknown"))}
        return tuple(sorted(self._raised.values(), key=lambda finding: order.get(finding.level, len(LEVELS))))

    def point(self, series: Series, point: Point, steps: int | None) -> None:
        """Look at the newest point of a series; ``steps`` is over how many steps k the log has losses."""
        label = series.key.label if series.key.rank is None else f"{series.key.label} rank {series.key.rank}"
        if not math.isfinite(point.value):
            self._not_finite(label, point)
        elif point.metric in _LOSSES and series.key.split != "summary":
            self._diverged(label, series, point)
            if point.metric == "loss" and self._vocabulary is not None:
                self._above_uniform(label, series, point, steps)

    def _not_finite(self, label: str, point: Point) -> None:
        loss = point.metric in _LOSSES
        self._raise(
            Finding(
                "fail" if loss else "degraded",
                "not-finite",
                f"is {point.value} from {_at(point)} on" if loss else f"was {point.value} at {_at(point)}",
                subject=label,
                value=str(point.value),
                evidence=(_line(point.where),),
                action="stop the job and restart from the last good checkpoint: weights do not recover from this" if loss else None,
            )
        )

    def _diverged(self, label: str, series: Series, point: Point) -> None:
        course = self._courses.setdefault(id(series), _Course())
        course.add(point.value)
        key = ("diverged", label)
        if course.beyond == 0:
            self._settle(key, f"; it came back to {point.value:.4g} by {_at(point)}")
        elif course.beyond >= DIVERGED_POINTS and course.lowest is not None:
            factor = f" ({point.value / course.lowest:.3g} times)" if course.lowest > 0 else ""
            self._raise(
                Finding(
                    "fail",
                    key[0],
                    f"diverged: {DIVERGED_POINTS} points in a row are above twice the lowest level so far;"
                    f" {course.lowest:.4g} to {point.value:.4g}{factor} at {_at(point)}",
                    subject=label,
                    value=round(point.value, 6),
                    unit="nat",
                    threshold=round(max(DIVERGED_FACTOR * course.lowest, course.lowest + DIVERGED_BY), 6),
                    threshold_source=f"twice the lowest median of {DIVERGED_POINTS} points",
                    evidence=(_line(point.where),),
                    action="restart from a checkpoint before that, with a lower learning rate",
                )
            )

    def _above_uniform(self, label: str, series: Series, point: Point, steps: int | None) -> None:
        end = series.end
        if end is None or series.count < _WINDOW:
            return
        reference = self._reading.reference(self._track(label, series, point, end), self._known(), steps)
        if reference is None or reference.high is None:
            return
        key = ("loss-above-uniform", label)
        if end <= reference.high:
            self._settle(key, f"; it fell to {end:.4g} by {_at(point)}")
        if end <= self._reading.ABOVE * reference.high:
            return
        self._raise(
            Finding(
                "fail",
                key[0],
                f"is {end:.4g}, above the {reference.high:.4g} that a uniform guess costs:"
                " confidently wrong: mapping or shift, not warm-up",
                subject=label,
                value=round(end, 6),
                unit="nat",
                threshold=round(self._reading.ABOVE * reference.high, 6),
                threshold_source=f"{self._reading.ABOVE:g} times a uniform guess, {reference.formula}",
                evidence=(_line(point.where), *(f"assumed: {item}" for item in reference.assumed)),
                action="compare the mappings: rdiag vocab-compare OLD_DRAFTER NEW_MAPPING",
            )
        )

    def _known(self) -> Any:
        return self._reading.Known(draft_vocab_size=self._vocabulary)

    def _track(self, label: str, series: Series, point: Point, end: float) -> Any:
        return self._reading.Track(
            label=label, family=series.key.family, dialect=point.dialect, position=series.key.position, start=end, end=end,
            lowest=end, highest=end, count=series.count, resolution=point.resolution, evidence=(),
        )  # fmt: skip

    def milestone(self, stream: str, milestone: Milestone) -> None:
        """Look at something that the log tells besides numbers."""
        kind, where = milestone.kind, milestone.where
        if kind == "failed-rank":
            # Of the ranks that torchrun lists, the one behind its "root cause" failed first.
            if stream in self._awaits_rank and milestone.value is not None:
                self._awaits_rank.discard(stream)
                self._first_rank(int(milestone.value), where, "torchrun's root cause", replaces=True)
            return
        if kind not in self._known_faults or kind not in _FAULTS:
            return
        if kind == "root-cause":
            self._awaits_rank.add(stream)
        level, message, action = _FAULTS[kind]
        count = self._fault_counts[kind] = self._fault_counts.get(kind, 0) + 1
        earlier = self._raised.get((kind, ""))
        if earlier is None:
            self._raise(Finding(level, kind, message, value=1, unit="lines", evidence=(_line(where, stream),), action=action))
        else:
            evidence = earlier.evidence if len(earlier.evidence) >= _EVIDENCE else (*earlier.evidence, _line(where, stream))
            self._raised[kind, ""] = replace(earlier, value=count, evidence=evidence)
        if kind in _HARD and where.rank is not None:
            self._first_rank(where.rank, where, f"the first line with {kind}", replaces=False)

    def _first_rank(self, rank: int, where: Where, source: str, *, replaces: bool) -> None:
        key = ("first-failing-rank", "")
        earlier = self._raised.get(key)
        if earlier is not None and (not replaces or earlier.value == rank):
            return
        self._raised.pop(key, None)
        message = f"rank {rank} failed first, by {source}"
        self._raise(Finding("fail", key[0], message, value=rank, evidence=(_line(where),)))

    def heard(self, now: float) -> None:
        """Note that bytes came from a job that runs."""
        self._settle(("no-output", ""), "; then it went on")
        self._heard = now

    def listen(self, now: float) -> None:
        """Note that the connection is there (again): silence counts from now on."""
        self._heard = now

    def deaf(self) -> None:
        """Note that there is no connection, or that the job has ended: silence says nothing."""
        self._heard = None

    def tick(self, now: float) -> None:
        """Look at the clock: ``now`` on the scale of :meth:`heard`, seconds."""
        if self._stall is None or self._heard is None or now - self._heard < self._stall:
            return
        minutes = self._stall / 60
        self._raise(
            Finding(
                "degraded",
                "no-output",
                f"no line for {minutes:g} minute{'' if minutes == 1 else 's'} while the job runs",
                value=minutes,
                unit="min",
                threshold=minutes,
                threshold_source="--stall",
                action="see whether it waits: rdiag jobs; a hung collective shows in NCCL's watchdog after its own timeout",
            )
        )

    def _raise(self, finding: Finding) -> None:
        key = (finding.code, _subject(finding))
        if key in self._raised and key not in self._over:
            return
        self._over.discard(key)
        self._raised[key] = finding
        self._tell(finding)

    def _settle(self, key: _Key, how: str) -> None:
        finding = self._raised.get(key)
        if finding is not None and key not in self._over:
            self._over.add(key)
            self._raised[key] = replace(finding, level="degraded", message=finding.message + how)


def _subject(finding: Finding) -> str:
    return finding.subject or ""


def _at(point: Point) -> str:
    place = f"line {point.where.line}"
    return place if point.step is None else f"step {point.step} ({place})"


def _line(where: Where, stream: str | None = None) -> str:
    return f"{stream + ' ' if stream else ''}line {where.line}: {where.text}"
