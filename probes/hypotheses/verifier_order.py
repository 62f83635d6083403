"""The rows of the target's head that the loss compares with are in another order than the drafter's rows.

Trainers cut the target's head with t2d, which puts its rows in ascending order of token ids. A drafter whose rows are in
another order (of frequency, as ModelOpt and NeMo write them), or a cut that was made with another mask, is trained towards
other tokens, row by row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from probes.lib.drafter import Drafter
    from probes.lib.files import Meter
    from probes.lib.hypothesis import Answer
    from probes.lib.mappings import Ids
    from probes.lib.sides import Side
    from remote_diag.probe import Context

EFFECTS = ("reads-files",)
HYPOTHESIS = {"cost_s": 2.0, "likelihood": 0.1}


@dataclass(frozen=True)
class Params:
    """Entries of the case."""

    __pydantic_config__ = {"extra": "forbid", "allow_inf_nan": False, "use_attribute_docstrings": True}

    target: str
    """The target model."""
    drafter_after: str | None = None
    """The drafter as training has it (B)."""
    mapping: str | None = None
    """The mapping that training uses, where that is not drafter_after's."""
    drafter_before: str | None = None
    """The drafter that serves above chance (A)."""
    counts: str | None = None
    """Occurrences by token id."""
    trainer: str | None = None
    """The program that trains."""
    observed_loss: float | None = None
    """Loss that training starts with, nat."""
    uniform_loss: float | None = None
    """What a uniform guess would print there, nat."""


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
    """Look at the head in the loss where it is stored, else at the order that t2d gives."""
    context.require("numpy")
    from probes.lib.hypothesis import answered

    return Result(**answered(lambda meter: _decide(params, meter)))


def _decide(params: Params, meter: Meter) -> Answer:
    from probes.lib.drafter import open_drafter
    from probes.lib.files import Absent
    from probes.lib.hypothesis import needs, read_mapping, trained_ids, undecided

    path = params.drafter_after or params.drafter_before
    if path is None:
        return needs("drafter_after")
    side = read_mapping("B", params.mapping or path, None, meter)
    wanted = trained_ids(side, params.trainer)
    if wanted is None:
        return undecided("the mapping in training is not understood: %s" % side.reason)
    try:
        with open_drafter(path, meter) as drafter:
            if drafter.has("verifier_lm_head"):
                return _stored(params, drafter, wanted, meter)
    except Absent:
        if params.mapping is None:
            raise
    answer = _by_construction(params, side)
    if params.drafter_after is None and params.mapping is None and answer.verdict == "refuted":
        return undecided(*answer.evidence, "that is the drafter before; of the one in training nothing is known",
                         missing=("drafter_after", "mapping"))  # fmt: skip
    return answer


def _stored(params: Params, drafter: Drafter, wanted: Ids, meter: Meter) -> Answer:
    """Judge the head in the loss by its own rows."""
    from probes.lib.head_match import exact_rows, find_copies
    from probes.lib.hypothesis import agreeing, command, percent, read_counts, refuted, share, supported
    from probes.lib.target import open_target

    head = drafter.matrix("verifier_lm_head")
    if head.rows != len(wanted):
        return supported(
            "the head in the loss has {:,} rows, the mapping {:,}".format(head.rows, len(wanted)),
            explains="a loss above that of a uniform guess",
        )
    with open_target(params.target, meter) as target:
        theirs = target.head()
        equal = int(exact_rows(head, theirs, wanted).sum())
        if equal == head.rows:
            return refuted("all {:,} rows of the head in the loss are the target's rows of the mapping, bit for bit".format(equal))
        found = find_copies(head, theirs)
    copies = int((found >= 0).sum())
    rows, tokens = agreeing(found, wanted)
    text = share(tokens, read_counts(params.counts, meter))
    accuracy = rows / head.rows if text is None else text
    facts = [
        "{:,} of {:,} rows of the head in the loss are the target's rows of the mapping".format(equal, head.rows),
        "{:,} are copies of other rows of the target: {} of the {} is compared with its own token".format(
            copies - equal, percent(accuracy), "rows" if text is None else "counted text"),
    ]  # fmt: skip
    return supported(
        *facts,
        explains="a loss above that of a uniform guess, and an accuracy of at most %.3g" % accuracy,
        accuracy=accuracy,
        loss=params.uniform_loss if accuracy < 0.4 else None,
        next_command=command("rdiag", "verifier-head", drafter.path, "--target", params.target),
    )


def _by_construction(params: Params, side: Side) -> Answer:
    """Judge by the order of the mapping, where the head in the loss is not stored."""
    from probes.lib.hypothesis import CUTS_WITH_T2D, marked_ids, refuted, supported, undecided
    from probes.lib.mappings import is_ascending

    marked = marked_ids(side)
    if side.ids is None or is_ascending(side.ids) or marked is None or not side.t2d or not side.t2d.agrees(side.ids):
        return refuted("the rows are in ascending order of token ids, as a cut with t2d puts them; the cut itself is not stored")
    cuts = CUTS_WITH_T2D.get(params.trainer or "")
    same = int((side.ids == marked).sum())
    fact = "the rows are not in ascending order: {:,} of {:,} are where a cut with t2d puts them".format(same, len(marked))
    if cuts is False:
        return refuted(fact, "%s gathers by token id, whatever the order" % params.trainer)
    high = params.observed_loss is not None and params.uniform_loss is not None and params.observed_loss > params.uniform_loss
    more = {"explains": "a loss above that of a uniform guess", "accuracy": same / len(marked)}
    action = "train with d2t and t2d in ascending order, the head's rows moved along: rdiag vocab-remap"
    if cuts or high:
        why = "%s cuts with t2d" % params.trainer if cuts else "the loss starts above that of a uniform guess"
        return supported(fact, why, next_command=action, **more)
    return undecided(fact, "it matters where the trainer cuts with t2d", missing=("trainer",), next_command=action, **more)
