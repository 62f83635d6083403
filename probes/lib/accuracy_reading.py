"""What accuracies, unrolled steps and acceptance lengths mean, and which findings contradict each other."""

from __future__ import annotations

from typing import Mapping

from .loss_reading import FREQUENCIES, Judgement, Known, Reference, Track

FREQUENT_TOKEN = (0.04, 0.06)
"""Accuracy of always guessing the most frequent token, an estimate for chat data."""
LEARNT = 0.10
"""From here on an accuracy is clearly more than frequencies."""
HALF = 0.5
"""Below this share of the ceiling a mapping mismatch alone does not explain an accuracy."""
OVER = 1.2
"""Above this multiple of the ceiling the ceiling does not bind."""
NONE = 0.005
"""An accuracy below is none at all: what two decimals print as 0.00."""
COLLAPSE = 0.5
"""A later step that keeps less than this share of step 0's conditional accuracy collapsed."""
ALONE = 1.1
"""A mean acceptance length below accepts next to nothing: 1 is the target's own token."""

_COMPARE = "rdiag vocab-compare OLD_DRAFTER NEW_MAPPING"
_TRIAGE = "rdiag triage CASE.yaml"


def judge_accuracy(track: Track, known: Known) -> Judgement:
    """Return what the level of an accuracy says: against the ceiling when there is one, else against frequencies."""
    if known.ceiling is not None and known.ceiling > 0:
        return _against_ceiling(track, known.ceiling)
    return _against_frequencies(track, known)


def _against_ceiling(track: Track, ceiling: float) -> Judgement:
    ratio = track.start / ceiling
    numbers = (track.label, round(track.start, 6), "accuracy", ceiling, "ceiling given (vocab-compare)", track.evidence)
    if ratio < HALF:
        return Judgement(
            "fail", "accuracy-below-ceiling",
            f"starts at {track.start:.3g}, {ratio:.2f} of the ceiling: the mapping alone would leave more, so there is"
            " another fault besides it", *numbers, _TRIAGE,
        )  # fmt: skip
    if ratio <= OVER:
        return Judgement(
            "fail", "accuracy-at-ceiling",
            f"starts at {track.start:.3g}, {ratio:.2f} of the ceiling: the mapping mismatch explains all of it",
            *numbers, "rdiag vocab-remap SRC --mapping NEW --out DIR, or train on with the old mapping",
        )  # fmt: skip
    return Judgement(
        "ok", "accuracy-above-ceiling",
        f"starts at {track.start:.3g}, {ratio:.2f} times the ceiling: this mapping mismatch is not what holds it", *numbers,
    )  # fmt: skip


def _against_frequencies(track: Track, known: Known) -> Judgement:
    low, high = FREQUENT_TOKEN
    source = "always guessing the most frequent token: about 0.04 to 0.06"
    numbers = (track.label, round(track.end, 6), "accuracy", high, source, _with_resolution(track))
    level = "fail" if known.warm else "degraded"
    fresh = "" if known.warm else "; a fresh drafter begins there, a trained one does not"
    if track.end >= LEARNT:
        return Judgement("ok", "accuracy-above-frequencies", f"reaches {track.end:.3g}: more than frequencies give", *numbers)
    chance = None if known.draft_vocab_size is None else 1 / known.draft_vocab_size
    if chance is not None and track.end + track.resolution <= 10 * chance:
        return Judgement(
            level, "accuracy-at-chance", f"ends at {track.end:.3g}; chance is {chance:.2g}{fresh}", track.label,
            round(track.end, 9), "accuracy", chance, "1 / draft vocabulary size", _with_resolution(track), _TRIAGE,
        )  # fmt: skip
    if track.end < low:
        message = f"ends at {track.end:.3g}, below what one frequent token always guessed would reach{fresh}"
        return Judgement(level, "accuracy-below-frequencies", message, *numbers, _COMPARE)
    message = f"ends at {track.end:.3g}, about what one frequent token always guessed would reach{fresh}"
    return Judgement(level, "accuracy-near-frequencies", message, *numbers, _COMPARE)


def _with_resolution(track: Track) -> tuple[str, ...]:
    if track.resolution < NONE:
        return track.evidence
    return (*track.evidence, f"printed with a resolution of {2 * track.resolution:g}: 0.00 hides anything below {track.resolution:g}")


def judge_emptiness(losses: list[Track], accuracies: list[Track]) -> Judgement | None:
    """Return the finding for a loss and an accuracy that are zero from beginning to end; None when they are not."""
    if not losses or not accuracies or any(track.highest != 0 or track.lowest != 0 for track in (*losses, *accuracies)):
        return None
    return Judgement(
        "fail", "mask-empty", "loss and accuracy are 0 from beginning to end: no position is supervised, the loss mask is empty",
        losses[0].label, 0.0, "nat", evidence=(*losses[0].evidence, *accuracies[0].evidence),
        action="check the chat template and loss_mask of the data: rdiag hidden-states SAMPLE...",
    )  # fmt: skip


def judge_contradiction(loss: Track, accuracy: Track, ref: Reference | None) -> Judgement | None:
    """Return the finding for a loss that learns beside an accuracy that stays at nothing; None when that is not so."""
    if accuracy.highest > NONE or loss.highest == 0:
        return None
    fell = loss.count >= 3 and loss.end < 0.7 * loss.start
    # Known to be low, whatever is missing: below even the smallest possible reference.
    low = ref is not None and ref.low is not None and loss.end < FREQUENCIES * ref.low
    if not fell and not low:
        return None
    through = (
        "there the accuracy passes through d2t, the loss does not: d2t is broken, t2d is fine"
        if accuracy.family == "specforge"
        else "loss and accuracy are taken in different vocabularies or orders"
    )
    return Judgement(
        "fail", "accuracy-zero-loss-normal", f"never exceeds {accuracy.highest:.3g}, although {loss.label} is at"
        f" {loss.end:.3g} and learning: {through}",
        accuracy.label, round(accuracy.highest, 6), "accuracy", NONE, "what two decimals print as 0.00",
        (*loss.evidence, *accuracy.evidence), "rdiag drafter-check CKPT --target MODEL",
    )  # fmt: skip


def conditional_accuracies(by_metric: Mapping[str, Mapping[int, Track]]) -> tuple[str, dict[int, float]] | None:
    """Return (metric, accuracy at step k given that all before were right), by k; None where the log has no steps."""
    if len(by_metric.get("cond_acc", {})) > 1:
        return "cond_acc", {k: track.end for k, track in by_metric["cond_acc"].items()}
    full = by_metric.get("full_acc", {})
    if len(full) > 1:
        ratios = {0: full[0].end} if 0 in full else {}
        ratios.update({k: full[k].end / full[k - 1].end for k in full if k - 1 in full and full[k - 1].end > 0})
        return "full_acc", ratios
    plain = by_metric.get("acc", {})
    return ("acc", {k: track.end for k, track in plain.items()}) if len(plain) > 1 else None


def judge_steps(metric: str, conditional: Mapping[int, float], evidence: tuple[str, ...]) -> Judgement | None:
    """Return whether the later steps hold what step 0 promises; None when step 0 itself is no better than frequencies."""
    first = conditional.get(0)
    later = {k: value for k, value in conditional.items() if k > 0}
    if first is None or first < LEARNT or not later:
        return None
    worst = min(later, key=lambda k: later[k])
    shape = ", ".join(f"{k}: {conditional[k]:.3g}" for k in sorted(conditional))
    numbers = (metric, round(later[worst] / first, 6), "share of step 0", COLLAPSE, "half of step 0", (f"by step {shape}", *evidence))
    if later[worst] < COLLAPSE * first:
        return Judgement(
            "degraded", "steps-collapse",
            f"step 0 is right {first:.0%} of the time, step {worst} only {later[worst]:.0%}: the state that a step hands to the next one"
            " follows another convention (norm_output, norm_before_residual)", *numbers, "rdiag replay CKPT SAMPLE...",
        )  # fmt: skip
    return Judgement("ok", "steps-regular", f"later steps keep at least {later[worst] / first:.0%} of step 0's accuracy", *numbers)


def expected_length(by_metric: Mapping[str, Mapping[int, Track]]) -> float | None:
    """Return the expected acceptance length, 1 + sum of full_acc_k; products of conditional ones where that is missing."""
    full = by_metric.get("full_acc", {})
    if full:
        return 1 + sum(track.end for track in full.values())
    chain = by_metric.get("cond_acc") or by_metric.get("acc") or {}
    if not chain:
        return None
    length, product = 1.0, 1.0
    for k in range(len(chain)):
        if k not in chain:
            return None
        product *= chain[k].end
        length += product
    return length


def judge_length(track: Track, rates: Mapping[int, Track]) -> Judgement:
    """Return what a server's mean acceptance length says."""
    first = rates[0].end if 0 in rates else None
    shown = "" if first is None else f"; {first:.1%} at the first position"
    numbers = (track.label, round(track.end, 6), "tokens", ALONE, "1 is the target's own token, nothing drafted accepted", track.evidence)
    if track.end < 1 or track.end >= ALONE:
        level = "unknown" if track.end < 1 else "ok"
        why = " is no acceptance length: at least 1 is expected" if track.end < 1 else ""
        return Judgement(level, "accept-length", f"mean acceptance length {track.end:.3g}{why}{shown}", *numbers)
    cause = "layer names the server does not know, or wrong aux layer ids"
    if first is not None and first >= 0.05:
        cause = "aux layer ids that are off by one"
    return Judgement(
        "fail", "accept-length-one", f"mean acceptance length {track.end:.3g}{shown}: as with {cause}", *numbers,
        "rdiag drafter-check CKPT --target MODEL",
    )  # fmt: skip


def judge_trend(accuracy: Track) -> Judgement | None:
    """Return the finding for an accuracy that was there at the start and got lost; None when it was not."""
    if accuracy.count < 10 or accuracy.start < LEARNT or accuracy.end >= HALF * accuracy.start:
        return None
    return Judgement(
        "degraded", "accuracy-lost",
        f"fell from {accuracy.start:.3g} to {accuracy.end:.3g}: a warm start that training destroys",
        accuracy.label, round(accuracy.end, 6), "accuracy", round(HALF * accuracy.start, 6), "half of the start", accuracy.evidence,
        "lower the learning rate, lengthen the warm-up",
    )  # fmt: skip


VERDICTS = (
    ("mask-empty", ("mask-empty",)),
    ("not-finite", ("loss-not-finite",)),
    ("another-fault", ("accuracy-below-ceiling",)),
    ("mapping", ("loss-above-uniform", "accuracy-at-ceiling")),
    ("confidently-wrong", ("loss-above-uniform",)),
    ("mapping", ("accuracy-at-ceiling",)),
    ("d2t", ("accuracy-zero-loss-normal",)),
    ("diverging", ("loss-diverges",)),
    ("not-served", ("accept-length-one",)),
    ("untrained", ("loss-at-uniform",)),
    ("untrained", ("accuracy-at-chance",)),
    ("frequencies-only", ("loss-near-frequencies",)),
    ("frequencies-only", ("accuracy-near-frequencies",)),
    ("frequencies-only", ("accuracy-below-frequencies",)),
    ("losing", ("accuracy-lost",)),
    ("steps-collapse", ("steps-collapse",)),
)
"""Verdict -> the findings that it takes; the first whose findings are all there holds."""

SENTENCES = {
    "mask-empty": "nothing is supervised: loss and accuracy are 0 throughout",
    "not-finite": "the numbers became NaN or infinite",
    "another-fault": "worse than the mapping mismatch explains: there is another fault besides it",
    "mapping": "what a mapping mismatch predicts, neither less nor more",
    "confidently-wrong": "confidently wrong, not untrained: rows or targets are permuted or shifted",
    "d2t": "it learns, but what it learns is scored in another order: d2t is suspect",
    "diverging": "training makes it confidently wrong",
    "not-served": "the server accepts next to nothing of what is drafted",
    "untrained": "no better than knowing nothing",
    "frequencies-only": "it knows how frequent tokens are, and not much else",
    "losing": "training destroys what the drafter could do",
    "steps-collapse": "the first step is sound, the later ones collapse",
    "healthy": "loss and accuracy are those of a drafter that learns",
    "open": "the numbers leave open what they mean",
}
"""Verdict -> one sentence for people."""


def verdict(judgements: list[Judgement]) -> str:
    """Return the verdict that the findings add up to."""
    bad = {judgement.code for judgement in judgements if judgement.level in {"fail", "degraded"}}
    for name, needed in VERDICTS:
        if set(needed) <= bad:
            return name
    good = {judgement.code for judgement in judgements if judgement.level == "ok"}
    unknown = any(judgement.level == "unknown" for judgement in judgements)
    learns = good & {"loss-below-uniform", "accuracy-above-frequencies", "accuracy-above-ceiling", "accept-length"}
    return "healthy" if learns and not unknown and not bad else "open"


