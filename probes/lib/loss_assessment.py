"""A whole training log, or bare numbers, assessed: which loss and accuracy count, and all that can be said of them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from statistics import median
from typing import Iterable

from . import accuracy_reading, loss_reading
from .accuracy_reading import LEARNT
from .loss_reading import Judgement, Known, Reference, Track
from .training_log import Event, Milestone, Point, Reader
from .training_series import ENDS, Gathered, Series

MAX_MILESTONES = 1000
"""Milestones kept; all are counted."""
MAX_UNREAD = 0.1
"""Share of the lines that look like metrics that may be unreadable before that is a finding."""
_HARD_FAULTS = ("failed-rank", "root-cause", "nccl-error", "cuda-error", "cuda-out-of-memory", "xid")
_SOFT_FAULTS = ("exception", "not-a-number")
_ACCURACIES = ("full_acc", "cond_acc", "acc")


class Contents:
    """What a log holds, gathered while it is read."""

    def __init__(self) -> None:
        self.reader = Reader()
        self.gathered = Gathered()
        self.milestones: list[Milestone] = []
        self.counts: Counter[str] = Counter()
        self.ranks: set[int] = set()
        self.numbers: dict[str, tuple[float, ...]] = {}

    def feed(self, data: bytes) -> None:
        """Take the next bytes of the log."""
        self._take(self.reader.feed(data))

    def finish(self) -> None:
        """Take the end of the log."""
        self._take(self.reader.finish())

    def add_numbers(self, losses: tuple[float, ...], accuracies: tuple[float, ...]) -> None:
        """Take numbers instead of a log."""
        self.numbers = {name: values for name, values in (("loss", losses), ("acc", accuracies)) if values}

    def _take(self, events: Iterable[Event]) -> None:
        for event in events:
            if event.where.rank is not None and len(self.ranks) < 1 << 16:
                self.ranks.add(event.where.rank)
            if isinstance(event, Point):
                self.gathered.add(event)
                continue
            self.counts[event.kind] += 1
            if len(self.milestones) < MAX_MILESTONES:
                self.milestones.append(event)

    def first(self, *kinds: str) -> Milestone | None:
        """Return the first milestone of these kinds."""
        return next((milestone for milestone in self.milestones if milestone.kind in kinds), None)

    def track(self, metric: str, position: int | None) -> Track | None:
        """Return a series of the training, None when the log has no such."""
        if metric in self.numbers and position is None:
            return _track_of_numbers(metric, self.numbers[metric])
        series = self.gathered.find(metric, position)
        return None if series is None else _track_of(series)

    def tracks(self, metric: str) -> dict[int, Track]:
        """Return the series of a metric by step k."""
        positions = sorted({key.position for key in self.gathered.series if key.metric == metric and key.position is not None})
        found = {position: self.track(metric, position) for position in positions}
        return {position: track for position, track in found.items() if track is not None}


def _track_of(series: Series) -> Track | None:
    first, last, lowest, highest = series.first, series.last, series.lowest, series.highest
    if first is None or last is None or lowest is None or highest is None:
        return None
    evidence: tuple[str, ...] = (f"line {first.where.line}: {first.where.text}",)
    if last.where.line != first.where.line:
        evidence += (f"line {last.where.line}: {last.where.text}",)
    return Track(
        label=series.key.label, family=series.key.family, dialect=first.dialect, position=series.key.position,
        start=series.start or 0.0, end=series.end or 0.0, lowest=lowest.value, highest=highest.value, count=series.count,
        resolution=first.resolution, evidence=evidence,
    )


def _track_of_numbers(metric: str, values: tuple[float, ...]) -> Track:
    shown = ", ".join(f"{value:g}" for value in values[:10]) + (f" and {len(values) - 10} more" if len(values) > 10 else "")
    return Track(
        label={"loss": "loss", "acc": "accuracy"}[metric], family="numbers", dialect="numbers", position=None,
        start=median(values[:ENDS]), end=median(values[-ENDS:]), lowest=min(values), highest=max(values), count=len(values),
        resolution=0.0, evidence=(f"given: {shown}",),
    )


@dataclass(frozen=True)
class Assessment:
    """Everything that can be said."""

    known: Known
    """What was given, completed by what the log says."""
    loss: Track | None
    accuracy: Track | None
    reference: Reference | None
    conditional: dict[int, float]
    """Accuracy at step k given that the steps before were right."""
    expected_length: float | None
    judgements: list[Judgement]
    verdict: str


def assess(contents: Contents, given: Known) -> Assessment:
    """Return what ``contents`` mean in the light of what was ``given``."""
    judgements: list[Judgement] = []
    known = _completed(contents, given, judgements)
    loss = _main_loss(contents)
    by_metric: dict[str, dict[int, Track]] = {name: contents.tracks(name) for name in (*_ACCURACIES, "loss")}
    accuracy = _main_accuracy(contents)
    served = contents.track("accept_length", None)
    served = served if served is not None and served.family == "serving" else None
    steps_seen = max((len(tracks) for tracks in by_metric.values()), default=0) or None
    ref = None if loss is None else loss_reading.reference(loss, known, steps_seen)
    judgements += _not_finite(contents)
    empty = accuracy_reading.judge_emptiness([loss] if loss else [], [accuracy] if accuracy else [])
    if empty is not None:
        judgements.append(empty)
    else:
        judgements += _levels(loss, accuracy, ref, known, served=served is not None)
    steps = accuracy_reading.conditional_accuracies(by_metric)
    if steps is not None and empty is None:
        evidence = by_metric[steps[0]][max(by_metric[steps[0]])].evidence[-1:]
        regular = accuracy_reading.judge_steps(steps[0], steps[1], evidence)
        judgements += [regular] if regular else []
    if served is not None:
        judgements.append(accuracy_reading.judge_length(served, contents.tracks("acceptance_rate")))
    judgements += _mappings(contents) + _faults(contents) + _unread(contents)
    return Assessment(
        known=known,
        loss=loss,
        accuracy=accuracy,
        reference=ref,
        conditional={} if steps is None else steps[1],
        expected_length=accuracy_reading.expected_length(by_metric),
        judgements=judgements,
        verdict=accuracy_reading.verdict(judgements),
    )


def _completed(contents: Contents, given: Known, judgements: list[Judgement]) -> Known:
    """Add what the log says to what was given; a contradiction is a finding."""
    known = given
    told = contents.first("token-coverage")
    if told is not None and told.top is not None:
        if known.draft_vocab_size is None and told.top >= 2:
            known = replace(known, draft_vocab_size=told.top)
        elif known.draft_vocab_size not in {None, told.top}:
            judgements.append(
                Judgement(
                    "degraded", "draft-vocab-size-differs",
                    f"the log speaks of the top {told.top} tokens, not of {known.draft_vocab_size}", None, float(told.top), "tokens",
                    known.draft_vocab_size, "given", (_line(told),), "look at draft_vocab_size of the config that was trained with",
                )
            )
        if known.coverage is None and told.value is not None and 0 < told.value <= 1:
            known = replace(known, coverage=told.value)
    if known.draft_vocab_size is None and known.target_vocab_size is not None and contents.first("mapping-missing"):
        known = replace(known, draft_vocab_size=known.target_vocab_size)
    if known.warm is None and contents.first("warm-start"):
        known = replace(known, warm=True)
    return known


def _main_loss(contents: Contents) -> Track | None:
    """Return the loss that says most: that of step 0, in training."""
    step, total = contents.track("loss", 0), contents.track("loss", None)
    if step is not None and (total is None or not step.label.startswith("val/") or total.label.startswith("val/")):
        return step
    return total or step


def _main_accuracy(contents: Contents) -> Track | None:
    for position in (0, None):
        for metric in _ACCURACIES:
            track = contents.track(metric, position)
            if track is not None:
                return track
    return None


def _levels(
    loss: Track | None, accuracy: Track | None, ref: Reference | None, known: Known, *, served: bool
) -> list[Judgement]:
    found = []
    if loss is not None:
        judgement = loss_reading.judge_loss(loss, ref, known)
        if judgement.code == "loss-reference-open" and accuracy is not None and accuracy.end >= LEARNT:
            # The accuracy rules out what the loss alone leaves open.
            message = f"cannot be held against ln D exactly; an accuracy of {accuracy.end:.3g} shows that it learns"
            judgement = judgement._replace(level="ok", message=message, action=None)
        found.append(judgement)
    if accuracy is not None:
        found.append(accuracy_reading.judge_accuracy(accuracy, known))
        found += [lost for lost in (accuracy_reading.judge_trend(accuracy),) if lost]
    if loss is not None and accuracy is not None:
        found += [odd for odd in (accuracy_reading.judge_contradiction(loss, accuracy, ref),) if odd]
    if served and loss is None:
        return found
    for name, track in (("loss", loss), ("accuracy", accuracy)):
        if track is None:
            found.append(
                Judgement("unknown", f"no-{name}", f"there is no {name}, so nothing is known about it",
                          action="give the training's standard output, or numbers: --loss, --accuracy")
            )
    return found


def _not_finite(contents: Contents) -> list[Judgement]:
    broken = [series for series in contents.gathered.series.values() if series.not_finite]
    if not broken:
        return []
    points = [series.first_not_finite for series in broken if series.first_not_finite is not None]
    first = min(points, key=lambda point: point.where.line)
    total = sum(series.not_finite for series in broken)
    return [
        Judgement(
            "fail", "loss-not-finite", f"{total} values are NaN or infinite, the first in line {first.where.line} ({first.raw})",
            first.raw, float(total), "values", 0.0, "every number of a training is finite", (f"line {first.where.line}: {first.where.text}",),
            "look for NaN in the stored hidden states: rdiag hidden-states SAMPLE...; and at the gradient norm before that line",
        )
    ]


def _mappings(contents: Contents) -> list[Judgement]:
    found = []
    warm = contents.first("warm-start")
    if warm is not None:
        later = [m for m in contents.milestones if m.kind == "mapping-loaded" and m.where.line > warm.where.line]
        if later:
            found.append(
                Judgement(
                    "degraded", "mapping-installed-over-warm-start",
                    "the drafter was warm-started, and then the vocabulary mapping of the data was loaded over its own", warm.subject or None,
                    evidence=(_line(warm), _line(later[0])),
                    action=f"rdiag vocab-compare {warm.subject or 'OLD_DRAFTER'} NEW_MAPPING",
                )
            )
    missing = contents.first("mapping-missing")
    if missing is not None:
        found.append(
            Judgement("degraded", "mapping-missing", "no vocabulary mapping was found: the drafter was given the full vocabulary",
                      evidence=(_line(missing),), action="give the trainer --d2t-path and --t2d-path")
        )
    return found


def _faults(contents: Contents) -> list[Judgement]:
    hard, soft = contents.first(*_HARD_FAULTS), contents.first(*_SOFT_FAULTS)
    first = hard or soft
    if first is None:
        return []
    kinds = _HARD_FAULTS if hard else _SOFT_FAULTS
    told = ", ".join(f"{contents.counts[kind]} {kind}" for kind in kinds if contents.counts[kind])
    named = contents.first("failed-rank")
    rank = first.where.rank if named is None or named.value is None else int(named.value)
    who = "" if rank is None else f"; first failing rank: {rank}"
    evidence = tuple(_line(milestone) for milestone in contents.milestones if milestone.kind in kinds)[:5]
    level, code = ("fail", "training-fault") if hard else ("degraded", "training-complaint")
    return [
        Judgement(level, code, f"the log tells of faults: {told}{who}", None if rank is None else f"rank {rank}",
                  float(sum(contents.counts[kind] for kind in kinds)), "lines", 0.0, "a sound training tells of none", evidence,
                  "rdiag check, and the GPU's own log for Xid errors")
    ]


def _unread(contents: Contents) -> list[Judgement]:
    statistics = contents.reader.statistics
    looking = statistics.unread + statistics.metric_lines
    if not contents.numbers and not statistics.metric_lines and not statistics.unread:
        return [
            Judgement("unknown", "no-metrics", f"nothing in {statistics.bytes} bytes and {statistics.lines} lines looks like metrics",
                      action="give the training's standard output or error")
        ]
    if not looking or statistics.unread / looking <= MAX_UNREAD:
        return []
    return [
        Judgement(
            "unknown", "metrics-unread", f"{statistics.unread} of {looking} lines that look like metrics are in no known dialect", None,
            round(statistics.unread / looking, 4), "share", MAX_UNREAD, "one in ten",
            tuple(f"line {where.line}: {where.text}" for where in statistics.unread_samples), "give numbers: --loss, --accuracy",
        )
    ]


def _line(milestone: Milestone) -> str:
    return f"line {milestone.where.line}: {milestone.where.text}"
