"""No token counts in the loss: the masks are empty.

A chat template that does not match the conversations marks nothing as the assistant's. Loss and accuracy are then 0 from
beginning to end, or those of the few conversations that were marked.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from probes.lib.files import Meter
    from probes.lib.hypothesis import Answer
    from remote_diag.probe import Context

EFFECTS = ("reads-files",)
HYPOTHESIS = {"cost_s": 0.8, "likelihood": 0.08}

MANY = 0.5
"""Share of files without a counting token from which on it is no accident."""


@dataclass(frozen=True)
class Params:
    """Entries of the case."""

    __pydantic_config__ = {"extra": "forbid", "allow_inf_nan": False, "use_attribute_docstrings": True}

    samples: tuple[str, ...] = ()
    """Files with the hidden states that it is trained on."""
    target: str | None = None
    """The target model."""
    observed_loss: float | None = None
    """Loss that training starts with, nat."""
    observed_accuracy: float | None = None
    """Accuracy that training starts with, 0 to 1."""
    loss_verdict: str | None = None
    """Verdict of loss-check on the numbers."""


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
    """Count what the masks of the samples mark; an empty mask makes a loss of 0."""
    context.require("numpy")
    from probes.lib.hypothesis import answered

    return Result(**answered(lambda meter: _decide(params, context, meter)))


def _decide(params: Params, context: Context, meter: Meter) -> Answer:
    from probes.lib.hypothesis import needs, refuted, undecided

    facts: list[str] = []
    numbers = None
    if params.observed_loss is not None:
        numbers = params.observed_loss == 0 and not params.observed_accuracy
        facts.append("the loss starts at %.3g; over an empty mask it is 0" % params.observed_loss)
    if not params.samples:
        if numbers is None:
            return needs("samples", "log")
        return _supported(facts) if numbers else refuted(*facts)
    from probes.lib.case_samples import read_masks
    from probes.lib.target import open_target

    width = None
    if params.target is not None:
        with open_target(params.target, meter) as target:
            width = target.head().columns
    masks = read_masks(context, params.samples, meter, width)
    with_mask = masks.files - masks.without
    if not with_mask:
        facts.append("the samples hold no masks; they are in the dataset")
        if numbers is None:
            return undecided(*facts, missing=("log",))
        return _supported(facts) if numbers else refuted(*facts)
    facts.append("{:,} of {:,} tokens count, in {} of {} files".format(masks.counted, masks.tokens, with_mask - masks.empty, with_mask))
    if masks.empty == with_mask:
        return _supported(facts)
    if masks.empty > with_mask * MANY:
        return undecided(*facts, "many files are empty, not all of them")
    return refuted(*facts)


def _supported(facts: list[str]) -> Answer:
    from probes.lib.hypothesis import supported

    return supported(
        *facts,
        explains="a loss and an accuracy of 0 from beginning to end: nothing is learnt",
        accuracy=0.0,
        loss=0.0,
        next_command="prepare the data again with the chat template that its conversations are written in",
    )
