"""Read a training log, or numbers, and say what the loss and accuracy mean.

Knows the logs of SpecForge, speculators, SafeAI's EAGLE, ModelOpt, NeMo, AngelSlim, TorchSpec, SGLang and vLLM, of the
Hugging Face Trainer, tqdm, JSON lines and plain key=value. Holds the loss against what a uniform guess over the draft
vocabulary would print there, and the accuracy against chance, token frequencies and a known ceiling.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from probes.lib.files import File
    from probes.lib.loss_assessment import Assessment, Contents
    from probes.lib.training_series import Series
    from remote_diag.probe import Context

EFFECTS = ("reads-files",)
CHUNK = 1 << 20
"""Bytes read at once."""
MAX_MILESTONES = 100
"""Milestones in the result; the rest is counted."""
RESERVE_S = 5.0
"""Seconds before the deadline at which reading stops, so that what was read still gets told."""


@dataclass(frozen=True)
class Params:
    """A log or numbers, and what is known about the training."""

    __pydantic_config__ = {"extra": "forbid", "allow_inf_nan": False, "use_attribute_docstrings": True}

    path: str | None = None
    """The log file on the host."""
    loss: tuple[float, ...] = ()
    """Losses in order, nat; instead of a log."""
    accuracy: tuple[float, ...] = ()
    """Accuracies in order, fractions of 1; instead of a log."""
    draft_vocab_size: int | None = None
    """D, rows of the drafter's lm_head; taken from the log where it says so."""
    target_vocab_size: int | None = None
    """V, the target's vocabulary."""
    mask_density: float | None = None
    """Supervised positions / all positions of a batch, above 0 to 1."""
    ceiling: float | None = None
    """Highest accuracy that a mapping mismatch leaves, as vocab-compare tells; fraction of 1."""
    coverage: float | None = None
    """Share of the training tokens that are in the draft vocabulary; taken from the log where it says so."""
    ttt_steps: int | None = None
    """K, how many steps training unrolls; taken from the log where it shows them."""
    ttt_decay: float | None = None
    """Weight of a step relative to the one before, above 0 to 1."""
    loss_is: Literal["auto", "step", "total"] = "auto"
    """Whether an unnumbered loss is that of one step or a sum over all; auto follows the trainer."""
    start: Literal["auto", "fresh", "warm"] = "auto"
    """Whether training began from a trained drafter; auto follows the log."""
    max_points: int = 200
    """Points of each series in the result, 2 to 1000."""

    def __post_init__(self) -> None:
        """Check that there is one source, and the ranges."""
        if self.path is None and not self.loss and not self.accuracy:
            raise ValueError("give a log (path), or numbers (loss, accuracy)")
        if self.path is not None and (self.loss or self.accuracy):
            raise ValueError("give a log (path) or numbers (loss, accuracy), not both")
        for name in ("mask_density", "ttt_decay", "coverage", "ceiling"):
            value = getattr(self, name)
            if value is not None and not 0 < value <= 1:
                raise ValueError(f"{name} must be above 0 and at most 1")
        if any(not 0 <= value <= 1 for value in self.accuracy):
            raise ValueError("accuracy must be fractions between 0 and 1: 0.03 for 3 %")
        for name in ("draft_vocab_size", "target_vocab_size"):
            value = getattr(self, name)
            if value is not None and not 2 <= value <= 1 << 31:
                raise ValueError(f"{name} must be 2 or more")
        if self.ttt_steps is not None and not 1 <= self.ttt_steps <= 64:
            raise ValueError("ttt_steps must be 1 to 64")
        if not 2 <= self.max_points <= 1000:
            raise ValueError("max_points must be 2 to 1000")


@dataclass(frozen=True)
class DialectFound:
    """One way of printing that occurs in the log."""

    __pydantic_config__ = {"extra": "forbid", "allow_inf_nan": False, "use_attribute_docstrings": True}

    name: str
    """Its name, such as speculators or specforge-ploss."""
    family: str
    """The trainer whose rules hold for the numbers; generic where anybody may print so."""
    lines: int
    """Lines in it."""
    confidence: str
    """high, medium or low."""


@dataclass(frozen=True)
class SeriesFound:
    """One metric over the run."""

    __pydantic_config__ = {"extra": "forbid", "allow_inf_nan": False, "use_attribute_docstrings": True}

    label: str
    """Canonical name with split and step: train/full_acc_0."""
    metric: str
    """loss, acc, full_acc, cond_acc, acceptance_rate, kl_div, lr, grad_norm, accept_length, ..."""
    position: int | None
    """Unrolled step k; None for a value over all of them."""
    split: str | None
    """train, val, summary; None where the log does not say."""
    rank: int | None
    """The rank that printed it; None where the log does not say."""
    family: str
    """The trainer whose rules hold."""
    raw: str
    """Name as printed."""
    count: int
    """Finite points in the log."""
    not_finite: int
    """Points that were NaN or infinite."""
    first: float | None
    """First value."""
    last: float | None
    """Last value."""
    lowest: float | None
    """Smallest value."""
    highest: float | None
    """Largest value."""
    steps: tuple[int, ...]
    """Training step of each point kept; its running number where the log has no steps."""
    values: tuple[float, ...]
    """Value of each point kept, extremes among them."""
    left_out: int
    """Points that are in the log and not in values."""


@dataclass(frozen=True)
class MilestoneFound:
    """Something that happened in the run."""

    __pydantic_config__ = {"extra": "forbid", "allow_inf_nan": False, "use_attribute_docstrings": True}

    kind: str
    """warm-start, mapping-loaded, checkpoint-saved, nccl-error, ..."""
    line: int
    """Line of the log."""
    rank: int | None
    """The rank that printed it; None where the log does not say."""
    text: str
    """The line."""


@dataclass(frozen=True)
class Interpretation:
    """The numbers that the findings stand on."""

    __pydantic_config__ = {"extra": "forbid", "allow_inf_nan": False, "use_attribute_docstrings": True}

    draft_vocab_size: int | None
    """D."""
    ln_d: float | None
    """ln D, nat: what a uniform guess costs per supervised position and step."""
    chance: float | None
    """1/D."""
    loss: str | None
    """Label of the loss that was judged."""
    loss_start: float | None
    """Median of its first five values, nat."""
    loss_end: float | None
    """Median of its last five values, nat."""
    reference_low: float | None
    """What a uniform guess would print, nat, at the least; None where nothing bounds it."""
    reference_high: float | None
    """What a uniform guess would print, nat, at most; None where nothing bounds it."""
    reference_formula: str | None
    """How the reference comes about."""
    missing: tuple[str, ...]
    """What is not known and keeps the reference open."""
    assumed: tuple[str, ...]
    """What was taken for granted."""
    loss_ratio_start: float | None
    """loss_start / reference_high."""
    loss_ratio_end: float | None
    """loss_end / reference_high."""
    accuracy: str | None
    """Label of the accuracy that was judged."""
    accuracy_start: float | None
    """Median of its first five values."""
    accuracy_end: float | None
    """Median of its last five values."""
    accuracy_over_ceiling: float | None
    """accuracy_start / ceiling."""
    coverage: float | None
    """Share of the training tokens that are in the draft vocabulary."""
    serving_accuracy_at_least: float | None
    """accuracy_end - (1 - coverage) where the trainer counts only within the draft vocabulary (speculators)."""
    conditional_accuracies: dict[str, float]
    """Accuracy at step k given that the steps before were right, by k; last values."""
    expected_accept_length: float | None
    """1 + sum of full_acc_k (of products of the accuracies where there is none), last values, tokens."""


@dataclass(frozen=True)
class Result:
    """What the log holds, and what it means."""

    __pydantic_config__ = {"extra": "forbid", "allow_inf_nan": False, "use_attribute_docstrings": True}

    verdict: str
    """confidently-wrong, mapping, another-fault, mask-empty, d2t, untrained, frequencies-only, steps-collapse, healthy, open, ..."""
    sentence: str
    """The verdict in words."""
    source: str
    """log or numbers."""
    path: str | None
    """The log."""
    bytes_read: int
    """Bytes of the log that were read."""
    lines: int
    """Lines read."""
    long_lines: int
    """Lines of which only the first MiB was looked at."""
    metric_lines: int
    """Lines that gave numbers."""
    unread_lines: int
    """Lines that look like metrics and are in no known dialect."""
    unread_samples: tuple[str, ...]
    """The first of them."""
    dialects: tuple[DialectFound, ...]
    """How the log is written, the most frequent first."""
    ranks: tuple[int, ...]
    """Ranks that say so in their lines."""
    series: tuple[SeriesFound, ...]
    """The metrics."""
    points_left_out: int
    """Points of series beyond the first 64."""
    milestones: tuple[MilestoneFound, ...]
    """What happened, the first hundred."""
    milestones_left_out: int
    """How many more there were."""
    interpretation: Interpretation
    """The numbers that the findings stand on."""


def run(params: Params, context: Context) -> Result:
    """Read, judge, tell."""
    from probes.lib import loss_assessment
    from probes.lib.accuracy_reading import SENTENCES
    from probes.lib.loss_reading import Known

    contents = loss_assessment.Contents()
    if params.path is not None:
        _read(params.path, contents, context)
    else:
        contents.add_numbers(params.loss, params.accuracy)
    known = Known(
        draft_vocab_size=params.draft_vocab_size,
        target_vocab_size=params.target_vocab_size,
        mask_density=params.mask_density,
        ceiling=params.ceiling,
        coverage=params.coverage,
        ttt_steps=params.ttt_steps,
        ttt_decay=params.ttt_decay,
        loss_is=params.loss_is,
        warm=None if params.start == "auto" else params.start == "warm",
    )
    assessment = loss_assessment.assess(contents, known)
    for judgement in assessment.judgements:
        context.finding(**judgement._asdict())
    statistics = contents.reader.statistics
    return Result(
        verdict=assessment.verdict,
        sentence=SENTENCES[assessment.verdict],
        source="numbers" if params.path is None else "log",
        path=params.path,
        bytes_read=statistics.bytes,
        lines=statistics.lines,
        long_lines=statistics.long_lines,
        metric_lines=statistics.metric_lines,
        unread_lines=statistics.unread,
        unread_samples=tuple(f"line {where.line}: {where.text}" for where in statistics.unread_samples),
        dialects=tuple(DialectFound(*seen) for seen in contents.reader.dialects()),
        ranks=tuple(sorted(contents.ranks)),
        series=tuple(_series(series, params.max_points) for series in contents.gathered.series.values()),
        points_left_out=contents.gathered.left_out,
        milestones=tuple(
            MilestoneFound(milestone.kind, milestone.where.line, milestone.where.rank, milestone.where.text)
            for milestone in contents.milestones[:MAX_MILESTONES]
        ),
        milestones_left_out=sum(contents.counts.values()) - len(contents.milestones[:MAX_MILESTONES]),
        interpretation=_interpretation(assessment),
    )


def _read(path: str, contents: Contents, context: Context) -> None:
    from probes.lib.files import Damaged, File, Meter, Unreadable

    try:
        with File(path, Meter()) as file:
            _refuse_compressed(file.read(0, min(6, file.size)), path, context)
            _read_all(file, contents, context)
    except Unreadable as error:
        context.unfit(f"cannot read the log: {error}", hint=error.hint or "give one log file")
    except Damaged as error:
        context.finding("unknown", "log-shrank", f"{error}; start again", subject=path)
    contents.finish()


def _read_all(file: File, contents: Contents, context: Context) -> None:
    # What is written from now on is not waited for.
    for offset in range(0, file.size, CHUNK):
        if context.remaining() < RESERVE_S:
            context.finding(
                "unknown", "log-cut", f"the deadline left time for {offset} of {file.size} bytes", subject=file.path, value=offset,
                unit="bytes", threshold=file.size, threshold_source="size of the log", action="raise --timeout",
            )  # fmt: skip
            return
        contents.feed(file.read(offset, min(CHUNK, file.size - offset)))
        context.progress(min(offset + CHUNK, file.size), file.size, unit="bytes", label="reading the log")


def _refuse_compressed(begin: bytes, path: str, context: Context) -> None:
    for magic, tool in _COMPRESSED.items():
        if begin.startswith(magic):
            context.unfit(f"the log {path!r} is compressed", hint=f"unpack it first: {tool} -dk FILE")


_COMPRESSED = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd", b"\xfd7zXZ": "xz", b"BZh": "bzip2"}


def _series(series: Series, most: int) -> SeriesFound:
    points = series.thinned(most)
    key = series.key
    any_point = series.first or series.first_not_finite
    return SeriesFound(
        label=key.label,
        metric=key.metric,
        position=key.position,
        split=key.split,
        rank=key.rank,
        family=key.family,
        raw="" if any_point is None else any_point.raw,
        count=series.count,
        not_finite=series.not_finite,
        first=None if series.first is None else series.first.value,
        last=None if series.last is None else series.last.value,
        lowest=None if series.lowest is None else series.lowest.value,
        highest=None if series.highest is None else series.highest.value,
        steps=tuple(point.ordinal if point.step is None else point.step for point in points),
        values=tuple(point.value for point in points),
        left_out=series.count - len(points),
    )


def _interpretation(assessment: Assessment) -> Interpretation:
    known, loss, accuracy, ref = assessment.known, assessment.loss, assessment.accuracy, assessment.reference
    size = known.draft_vocab_size
    high = None if ref is None else ref.high
    inside = known.coverage is not None and accuracy is not None and accuracy.family == "speculators"
    return Interpretation(
        draft_vocab_size=size,
        ln_d=None if size is None else math.log(size),
        chance=None if size is None else 1 / size,
        loss=None if loss is None else loss.label,
        loss_start=None if loss is None else loss.start,
        loss_end=None if loss is None else loss.end,
        reference_low=None if ref is None else ref.low,
        reference_high=high,
        reference_formula=None if ref is None else ref.formula,
        missing=() if ref is None else ref.missing,
        assumed=() if ref is None else ref.assumed,
        loss_ratio_start=None if loss is None or high is None else loss.start / high,
        loss_ratio_end=None if loss is None or high is None else loss.end / high,
        accuracy=None if accuracy is None else accuracy.label,
        accuracy_start=None if accuracy is None else accuracy.start,
        accuracy_end=None if accuracy is None else accuracy.end,
        accuracy_over_ceiling=None if accuracy is None or known.ceiling is None else accuracy.start / known.ceiling,
        coverage=known.coverage,
        serving_accuracy_at_least=(
            max(0.0, accuracy.end - (1 - (known.coverage or 0.0))) if inside and accuracy is not None else None
        ),
        conditional_accuracies={str(k): value for k, value in sorted(assessment.conditional.items())},
        expected_accept_length=assessment.expected_length,
    )
