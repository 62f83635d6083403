"""The target's final norm is applied twice to the stored hidden states, or never.

Some programs store the state before the output head normed, some not; some trainers apply the norm, some do not. Together
they must apply it once. Otherwise the target's head says something else than the target did, and the drafter is trained on it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from probes.lib.files import Meter
    from probes.lib.hypothesis import Answer
    from remote_diag.probe import Context

EFFECTS = ("reads-files",)
HYPOTHESIS = {"cost_s": 3.0, "likelihood": 0.15}


@dataclass(frozen=True)
class Params:
    """Entries of the case."""

    __pydantic_config__ = {"extra": "forbid", "allow_inf_nan": False, "use_attribute_docstrings": True}

    samples: tuple[str, ...]
    """Files with the hidden states that it is trained on."""
    target: str
    """The target model."""
    trainer: str | None = None
    """The program that trains."""


@dataclass(frozen=True)
class Result:
    """What every hypothesis answers."""

    __pydantic_config__ = {"extra": "forbid", "allow_inf_nan": False, "use_attribute_docstrings": True}

    verdict: Literal["supported", "refuted", "undecided"]
    """Whether it holds."""
    evidence: tuple[str, ...]
    """The numbers that say so."""
    explains: str | None
    """What it would account for, in words."""
    accuracy: float | None
    """Accuracy that training would start with for this cause alone, at most, 0 to 1."""
    loss: float | None
    """Loss that training would start with for this cause alone, nat."""
    next_command: str | None
    """What to type next."""
    missing: tuple[str, ...]
    """Entries of the case that would decide it."""


def run(params: Params, context: Context) -> Result:
    """Feed the target's head with the stored states, normed and as they are, and see which reading predicts the text."""
    context.require("numpy")
    from probes.lib.hypothesis import answered

    return Result(**answered(lambda meter: _decide(params, context, meter)))


def _decide(params: Params, context: Context, meter: Meter) -> Answer:
    from probes.lib.case_samples import predict, read_texts
    from probes.lib.hypothesis import APPLIES_NORM, percent, refuted, supported, undecided
    from probes.lib.samples import CONVENTIONS
    from probes.lib.target import open_target

    with open_target(params.target, meter) as target:
        texts = read_texts(context, params.samples, meter, target.head().columns)
        found = predict(texts, target)
    kind = texts[0].kind
    facts = ["the target's head says the following token in %s of %d places when its norm is applied to the stored states, in %s"
             " when it is not" % (percent(found.best(normed=True)), found.positions, percent(found.best(normed=False)))]  # fmt: skip
    if found.normed is not None:
        facts.append("%s of the states have the size that the norm gives" % percent(found.normed))
    stored = found.stored_normed
    if stored is None:
        return undecided(*facts, "neither reading is clearly the right one: give samples of text that the target wrote itself")
    facts.append("so the stored states are %s" % ("normed already" if stored else "not normed"))
    applies = APPLIES_NORM.get(params.trainer or "")
    if applies is None:
        kept = CONVENTIONS[kind][0]
        applies = None if kept is None else not kept
        if applies is None:
            return undecided(*facts, "whether the trainer norms them is not known", missing=("trainer",))
        facts.append("the format is that of %s: %s" % (kind, CONVENTIONS[kind][1]))
    else:
        facts.append("%s %s the norm" % (params.trainer, "applies" if applies else "does not apply"))
    if stored != applies:
        return refuted(*facts, "the norm is applied exactly once")
    how = "twice" if stored else "never"
    return supported(
        *facts,
        "the norm is applied %s; both readings say the same token in %s of the places" % (how, percent(found.same)),
        explains="a target that says other tokens: an accuracy of at most %.3g" % found.same,
        accuracy=found.same,
        next_command="make the hidden states anew %s the final norm, or tell the trainer that they are %s"
        % (("without", "normed") if stored else ("with", "not normed")),
    )
