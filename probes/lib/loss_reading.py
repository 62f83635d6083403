"""What a training loss and accuracy mean: held against the guess that knows nothing, and against known ceilings.

A uniform guess over D tokens costs exactly ln D. How that shows in a printed loss depends on the trainer: over which
positions it is averaged, and how the unrolled steps k = 0..K-1 are weighted and summed.

* speculators: KL divergence, mean over the supervised positions; ``loss_k`` is already times decay^k, ``loss`` is the
  sum over k.
* SpecForge, SafeAI, AngelSlim: cross-entropy, summed over the supervised positions and divided by all of them, so that
  the mask density scales it; totals weight step k by 0.8^k, the progress bar shows the plain mean over k.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

ABOVE = 1.1
"""A loss of more than 1.1 times the uniform guess is above it: the tenth allows for noise of the first batches."""
BELOW = 0.9
"""Less than this share of the uniform guess is below it."""
FREQUENCIES = 0.75
"""About this share of ln D is what token frequencies alone give: 6.5 to 7.5 of 10.4."""
STEP_WEIGHT = 0.8
"""Weight ratio of consecutive steps in the totals of SafeAI, SpecForge and AngelSlim."""
SPECULATORS_DECAY = 1.0
"""Default of speculators' --ttt-step-loss-decay."""
_WEIGHTED = frozenset({"specforge", "safeai", "angelslim"})


@dataclass(frozen=True)
class Known:
    """What is known besides the log."""

    draft_vocab_size: int | None = None
    """D."""
    target_vocab_size: int | None = None
    """V."""
    mask_density: float | None = None
    """Share of all positions that are supervised."""
    ceiling: float | None = None
    """Highest accuracy that a drafter can have whose rows follow another mapping."""
    coverage: float | None = None
    """Share of the training tokens that are in the draft vocabulary."""
    ttt_steps: int | None = None
    """K."""
    ttt_decay: float | None = None
    """Weight ratio of consecutive steps."""
    loss_is: str = "auto"
    """``step`` for the loss of one step, ``total`` for a sum over the steps, ``auto`` where the log has to tell."""
    warm: bool | None = None
    """Whether training began from a trained drafter; None where nobody said."""


@dataclass(frozen=True)
class Track:
    """One series in the numbers that matter here."""

    label: str
    family: str
    """``specforge``, ``speculators``, ..., ``generic``, ``numbers``."""
    dialect: str
    position: int | None
    start: float
    """Median of the first points."""
    end: float
    """Median of the last points."""
    lowest: float
    highest: float
    count: int
    resolution: float
    """Half a unit of the last printed digit."""
    evidence: tuple[str, ...]
    """The first and the last line, with their numbers."""


class Reference(NamedTuple):
    """What a uniform guess would print as the loss."""

    low: float | None
    """With the smallest values of what is unknown; None where nothing bounds it."""
    high: float | None
    """With the largest values; None where nothing bounds it."""
    formula: str
    missing: tuple[str, ...]
    """What would have to be known for ``low`` to equal ``high``."""
    assumed: tuple[str, ...]
    """What was taken for granted."""

    @property
    def exact(self) -> bool:
        """Whether nothing is missing."""
        return self.low is not None and self.low == self.high


class Judgement(NamedTuple):
    """One finding."""

    level: str
    code: str
    message: str
    subject: str | None = None
    value: float | None = None
    unit: str | None = None
    threshold: float | None = None
    threshold_source: str | None = None
    evidence: tuple[str, ...] = ()
    action: str | None = None


class _Span(NamedTuple):
    low: float | None
    high: float | None
    text: str
    missing: tuple[str, ...] = ()
    assumed: tuple[str, ...] = ()


def reference(track: Track, known: Known, steps_seen: int | None) -> Reference | None:
    """Return what a uniform guess would print where ``track`` is printed; None when no vocabulary size is known.

    Args:
        track: a loss.
        known: what else is known.
        steps_seen: number of different positions k in the log; None when there are none.
    """
    vocabulary = _vocabulary(known)
    if vocabulary is None:
        return None
    spans = (vocabulary, _density(track, known), _weight(track, known, steps_seen))
    low: float | None = 1.0
    high: float | None = 1.0
    for span in spans:
        low = None if low is None or span.low is None else low * span.low
        high = None if high is None or span.high is None else high * span.high
    return Reference(
        low,
        high,
        " x ".join(span.text for span in spans if span.text),
        tuple(item for span in spans for item in span.missing),
        tuple(item for span in spans for item in span.assumed),
    )


def _vocabulary(known: Known) -> _Span | None:
    if known.draft_vocab_size is not None:
        value = math.log(known.draft_vocab_size)
        return _Span(value, value, f"ln {known.draft_vocab_size}")
    if known.target_vocab_size is not None:
        # The draft vocabulary is no larger.
        return _Span(None, math.log(known.target_vocab_size), f"ln {known.target_vocab_size}", ("draft vocabulary size",))
    return None


def _density(track: Track, known: Known) -> _Span:
    density = known.mask_density
    if track.family == "speculators":
        return _Span(1.0, 1.0, "")
    if track.family in _WEIGHTED:
        if density is None:
            return _Span(None, 1.0, "mask density (at most 1)", ("mask density",))
        return _Span(density, density, f"mask density {density:g}")
    # Another trainer may average over the supervised positions or over all.
    return _Span(density, 1.0, "", ("over which positions the loss is averaged",))


def _weight(track: Track, known: Known, steps_seen: int | None) -> _Span:
    position = track.position
    if position == 0 or (position is not None and track.family != "speculators"):
        return _Span(1.0, 1.0, "")
    if track.family == "speculators":
        decay = SPECULATORS_DECAY if known.ttt_decay is None else known.ttt_decay
        assumed = (f"decay {decay:g}, the default of speculators",) if known.ttt_decay is None else ()
        if position is not None:
            return _Span(decay**position, decay**position, f"{decay:g}^{position}", (), assumed)
        return _sum(decay, known.ttt_steps or steps_seen, assumed)
    if track.dialect == "specforge-progress":
        return _Span(1.0, 1.0, "")
    if track.family in _WEIGHTED:
        decay = STEP_WEIGHT if known.ttt_decay is None else known.ttt_decay
        return _sum(decay, known.ttt_steps or steps_seen, ())
    if known.loss_is == "total":
        if known.ttt_decay is not None or known.ttt_steps is None:
            return _sum(1.0 if known.ttt_decay is None else known.ttt_decay, known.ttt_steps, ())
        return _Span(1.0, float(known.ttt_steps), f"{known.ttt_steps} steps", ("decay of the steps",))
    if known.loss_is == "step":
        return _Span(1.0, 1.0, "")
    return _Span(1.0, 1.0, "", (), ("the loss is that of one step, not a sum over several",))


def _sum(decay: float, steps: int | None, assumed: tuple[str, ...]) -> _Span:
    if steps is not None:
        total = sum(decay**k for k in range(steps))
        return _Span(total, total, f"sum of {decay:g}^k over {steps} steps = {total:.3g}", (), assumed)
    high = 1 / (1 - decay) if decay < 1 else None
    return _Span(1.0, high, f"sum of {decay:g}^k over the steps", ("number of steps",), assumed)


def judge_loss(track: Track, ref: Reference | None, known: Known) -> Judgement:
    """Return what the level of a loss says."""
    if ref is None:
        return Judgement(
            "unknown", "draft-vocab-size-unknown", "cannot be held against ln D: the draft vocabulary size is not known",
            track.label, round(track.start, 6), "nat", evidence=track.evidence,
            action="give --draft-vocab-size (draft_vocab_size of the drafter's config.json)",
        )  # fmt: skip
    source = f"uniform guess: {ref.formula}"
    assumed = tuple(f"assumed: {item}" for item in ref.assumed)
    evidence = (*track.evidence, *assumed)
    if ref.high is not None and track.start > ABOVE * ref.high:
        return _above(track, ref.high, source, evidence, known)
    if not ref.exact:
        return _open(track, ref, source, evidence)
    high = ref.high or 1.0
    return _at_or_below(track, high, source, evidence, known)


def _above(track: Track, high: float, source: str, evidence: tuple[str, ...], known: Known) -> Judgement:
    ratio = track.start / high
    lines = list(evidence)
    if track.family not in _WEIGHTED and track.family != "speculators" and known.loss_is == "auto" and track.position is None:
        several = ", ".join(f"{steps} steps {ratio / steps:.2f}" for steps in (2, 3, 7))
        lines.append(f"were it a sum over equally weighted steps, the ratio would be: {several}")
    end = " and still does" if track.end > ABOVE * high else f", and fell to {track.end:.3g}"
    return Judgement(
        "fail", "loss-above-uniform",
        f"starts at {track.start:.3g}, {ratio:.2f} times what a uniform guess costs{end}: the drafter is confidently"
        " wrong, as when head rows or targets are permuted or shifted; an untrained or warming-up one cannot be",
        track.label, round(track.start, 6), "nat", round(high, 6), source, tuple(lines),
        "compare the mappings: rdiag vocab-compare OLD_DRAFTER NEW_MAPPING; then the rows: rdiag verifier-head CKPT --target MODEL",
    )  # fmt: skip


def _open(track: Track, ref: Reference, source: str, evidence: tuple[str, ...]) -> Judgement:
    missing = " and ".join(ref.missing)
    lines = list(evidence)
    if "mask density" in ref.missing and ref.high:
        share = track.start / ref.high
        lines.append(f"a uniform guess would print this at a mask density of {share:.2g}; below that it would be confidently wrong")
    bound = "" if ref.high is None else f" It is not above the largest possible reference, {ref.high:.3g}."
    return Judgement(
        "unknown", "loss-reference-open",
        f"starts at {track.start:.3g}; without the {missing} it may be a healthy, an untrained or a confidently wrong"
        f" drafter.{bound}",
        track.label, round(track.start, 6), "nat", None if ref.high is None else round(ref.high, 6), source, tuple(lines),
        "give --mask-density (supervised tokens / all tokens of a batch, padding included), --ttt-steps, --ttt-decay or --loss-is",
    )  # fmt: skip


def _at_or_below(track: Track, high: float, source: str, evidence: tuple[str, ...], known: Known) -> Judgement:
    start, end = track.start / high, track.end / high
    numbers = (track.label, round(track.start, 6), "nat", round(high, 6), source, evidence)
    shape = f"goes from {start:.2f} to {end:.2f} times what a uniform guess costs"
    if end > ABOVE:
        return Judgement("fail", "loss-diverges", f"{shape}: training made it confidently wrong", *numbers,
                         "lower the learning rate, and look at the gradient norm around the lowest loss")  # fmt: skip
    if start >= BELOW and (known.warm or end >= BELOW):
        why = "a warm start that begins there brought nothing along" if known.warm else "nothing was learnt, or nothing was loaded"
        return Judgement("fail" if known.warm else "degraded", "loss-at-uniform", f"{shape}: {why}", *numbers,
                         "rdiag drafter-check CKPT --target MODEL")  # fmt: skip
    if end >= 0.6 and track.count >= 2:
        return Judgement("degraded", "loss-near-frequencies",
                         f"{shape}; token frequencies alone, without any context, give about 0.6 to {FREQUENCIES}", *numbers,
                         "rdiag hidden-states SAMPLE... --target MODEL")  # fmt: skip
    return Judgement("ok", "loss-below-uniform", f"{shape}: it knows more than token frequencies", *numbers)
