"""What the verdicts of all hypotheses add up to: their rank, the cause, findings and status. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from .findings import Finding

Verdict = Literal["supported", "refuted", "undecided"]
VERDICTS: tuple[Verdict, ...] = get_args(Verdict)
_RANKS = {"supported": 0, "undecided": 1, "refuted": 2}
_FIT = 2.0
"""An observed accuracy within this factor of what a cause would leave is explained by it."""
_TINY = 1e-3
"""Accuracies below count as this much where they are compared."""


@dataclass(frozen=True)
class Explains:
    """What a hypothesis would account for, beside what was observed."""

    text: str | None
    """In words."""
    accuracy: float | None
    """Accuracy that training would start with for this cause alone, 0 to 1: its ceiling."""
    observed_accuracy: float | None
    """Accuracy that training started with, 0 to 1."""
    loss: float | None
    """Loss that training would start with for this cause alone, nat."""
    observed_loss: float | None
    """Loss that training started with, nat."""

    @property
    def accuracy_ratio(self) -> float | None:
        """Observed over explained accuracy; None where either is unknown."""
        if self.accuracy is None or self.observed_accuracy is None:
            return None
        return max(self.observed_accuracy, _TINY) / max(self.accuracy, _TINY)


@dataclass(frozen=True)
class Judged:
    """One hypothesis and what came of it."""

    id: str
    claim: str
    """What it says, one sentence."""
    verdict: Verdict
    evidence: tuple[str, ...]
    """The numbers that say so; for an undecided one, why it is."""
    explains: Explains
    next_command: str | None
    """What to type next; None where there is nothing to do."""
    missing: tuple[str, ...]
    """Entries of the case that would decide it."""
    likelihood: float
    """How often this is the cause, before anything was looked at."""
    seconds: float
    """What looking took."""


@dataclass(frozen=True)
class Contradiction:
    """What does not fit together: the drafter serves above chance, and trains at chance."""

    exists: bool | None
    """None where the case has too few numbers to tell."""
    text: str
    """In one sentence, with the numbers."""
    serving_accept_length: float | None
    """Mean acceptance length of the drafter when served, tokens; 1 is the target's own."""
    serving_accuracy: float | None
    """Share of its first drafted tokens that are accepted when served, 0 to 1."""
    training_loss: float | None
    """Loss that training starts with, nat."""
    uniform_loss: float | None
    """What a uniform guess would print there, nat."""
    training_accuracy: float | None
    """Accuracy that training starts with, 0 to 1."""
    chance: float | None
    """Accuracy of a uniform guess, 1 / draft vocabulary."""


def rank(judged: Sequence[Judged]) -> list[Judged]:
    """Return hypotheses: supported ones first, the best explanation of what was observed before others; refuted last."""
    return sorted(judged, key=lambda one: (_RANKS[one.verdict], _misfit(one.explains), -one.likelihood, one.id))


def _misfit(explains: Explains) -> float:
    ratio = explains.accuracy_ratio
    if ratio is not None:
        return abs(math.log(ratio))
    # What cannot be held against the numbers comes after what fits them, and before what misses them widely.
    return math.log(_FIT)


def cause(judged: Sequence[Judged]) -> str | None:
    """Return the id of the one that is supported; None when none is, or several are."""
    supported = [one.id for one in judged if one.verdict == "supported"]
    return supported[0] if len(supported) == 1 else None


def contradiction(
    *,
    serving_accept_length: float | None,
    serving_accuracy: float | None,
    training_loss: float | None,
    uniform_loss: float | None,
    training_accuracy: float | None,
    draft_vocab_size: int | None,
) -> Contradiction:
    """Return what serving and training say of the same drafter."""
    chance = None if draft_vocab_size is None else 1 / draft_vocab_size
    serves = _serves(serving_accept_length, serving_accuracy)
    trains = _trains(training_loss, uniform_loss, training_accuracy, chance)
    exists = None if serves is None or trains is None else serves and not trains
    # The loss can be that of a guess beside an accuracy that is not.
    by_loss = trains is False and _trains(None, None, training_accuracy, chance) is True
    numbers = (("loss", training_loss, uniform_loss), ("accuracy", training_accuracy, chance))
    parts = [
        _told("serves", serves, (("acceptance length", serving_accept_length, None), ("accuracy", serving_accuracy, chance))),
        _told("trains" if not by_loss else "trains with a loss", trains, numbers),
    ]
    joined = "; ".join(parts) if not exists else ", yet ".join(parts)
    return Contradiction(
        exists, joined, serving_accept_length, serving_accuracy, training_loss, uniform_loss, training_accuracy, chance
    )


def _serves(length: float | None, accuracy: float | None) -> bool | None:
    """Whether the drafter is clearly above chance when served."""
    told = [value > limit for value, limit in ((length, 1.1), (accuracy, 0.1)) if value is not None]
    return any(told) if told else None


def _trains(loss: float | None, uniform: float | None, accuracy: float | None, chance: float | None) -> bool | None:
    """Whether it is where a drafter that serves should be when training starts."""
    if loss is not None and uniform is not None and loss > 0.95 * uniform:
        return False
    if accuracy is not None:
        return accuracy >= max(0.1, 10 * (chance or 0))
    return None if loss is None or uniform is None else True


def _told(verb: str, good: bool | None, numbers: Sequence[tuple[str, float | None, float | None]]) -> str:
    known = [
        f"{label} {value:.3g}" + ("" if chance is None else f" ({chance:.3g} is a uniform guess)")
        for label, value, chance in numbers
        if value is not None
    ]
    where = {True: f"{verb} above chance", False: f"{verb} no better than chance", None: f"how it {verb} is not known"}[good]
    return f"{where}: {', '.join(known)}" if known else where


def findings(judged: Sequence[Judged], against: Contradiction) -> list[Finding]:
    """Return one finding a hypothesis, and one for a contradiction that none of them explains."""
    found = [_finding(one) for one in judged]
    supported = [one for one in judged if one.verdict == "supported"]
    if not supported and all(one.verdict == "refuted" for one in judged) and against.exists is not False:
        found.append(
            Finding(
                "unknown",
                "no-cause-found",
                f"none of {len(judged)} hypotheses is the cause; {against.text}" if judged else "there are no hypotheses",
                action="write one of your own: one more probe file in ./probes/hypotheses",
            )
        )
    return found


def _finding(one: Judged) -> Finding:
    level: Literal["fail", "unknown", "ok"] = {"supported": "fail", "undecided": "unknown"}.get(one.verdict, "ok")  # type: ignore[assignment]
    explains = one.explains
    return Finding(
        level,
        one.id,
        f"{one.claim}: {one.verdict}",
        value=explains.observed_accuracy if explains.accuracy is not None else None,
        unit="accuracy" if explains.accuracy is not None and explains.observed_accuracy is not None else None,
        threshold=explains.accuracy if explains.observed_accuracy is not None else None,
        threshold_source=None if explains.accuracy is None else "what this cause alone would leave",
        evidence=one.evidence,
        action=one.next_command if one.verdict == "supported" else None,
    )
