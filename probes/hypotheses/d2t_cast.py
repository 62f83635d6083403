"""d2t was cast to a short float and back: most draft rows are translated into neighbouring tokens.

A conversion that casts every tensor rounds the offsets in d2t. The rows stay unique and in range, so nothing complains, and
training that cuts the target's head with t2d does not notice. Whatever translates with d2t scores the wrong tokens: the
server, and the accuracies of SpecForge.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from probes.lib.files import Meter
    from probes.lib.hypothesis import Answer
    from probes.lib.mappings import Ids
    from probes.lib.sides import Side
    from remote_diag.probe import Context

EFFECTS = ("reads-files",)
HYPOTHESIS = {"cost_s": 0.5, "likelihood": 0.1}


@dataclass(frozen=True)
class Params:
    """Entries of the case."""

    __pydantic_config__ = {"extra": "forbid", "allow_inf_nan": False, "use_attribute_docstrings": True}

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
    """Round the right d2t as each float type does, and compare."""
    context.require("numpy")
    from probes.lib.hypothesis import answered

    return Result(**answered(lambda meter: _decide(params, meter)))


def _decide(params: Params, meter: Meter) -> Answer:
    from probes.lib.hypothesis import needs, undecided

    path = params.mapping or params.drafter_after or params.drafter_before
    if path is None:
        return needs("drafter_after", "mapping", "drafter_before")
    answer = _judge(params, path, meter)
    if path == params.drafter_before and answer.verdict == "refuted":
        return undecided(*answer.evidence, "that is the drafter before; of the one in training nothing is known",
                         missing=("drafter_after", "mapping"))  # fmt: skip
    return answer


def _judge(params: Params, path: str, meter: Meter) -> Answer:
    from probes.lib.hypothesis import cast_of, marked_ids, read_mapping, refuted, undecided

    after = read_mapping("B", path, None, meter)
    if after.stored is None:
        return undecided(after.reason)
    if after.stored.d2t_name is None:
        return refuted("there is no d2t that could have been rounded")
    right = {"t2d": marked_ids(after)}
    if params.drafter_before is not None and path != params.drafter_before:
        right["A"] = read_mapping("A", params.drafter_before, after.vocab, meter).ids
    for name, ids in right.items():
        rounded = cast_of(after, ids)
        if ids is not None and rounded is not None:
            return _supported(params, after, ids, "d2t is exactly that of %s, rounded to %s" % (name, rounded), meter)
    if after.encoding == "corrupt" and "rounded" in after.reason:
        return _supported(params, after, None, after.reason, meter)
    if after.ids is None:
        return undecided(after.reason) if after.encoding == "ambiguous" else refuted("not rounded: %s" % after.reason)
    facts = ["d2t is stored as %s and gives {:,} different tokens".format(len(after.ids)) % after.stored.d2t_dtype]
    if after.t2d is None and right.get("A") is None:
        from probes.lib.mappings import rounded_like

        if int(abs(after.stored.d2t.astype("f8")).max()) <= 256:
            return refuted(*facts, "none of its offsets is above 256, so no float type rounds them")
        if rounded_like(after.stored.d2t.astype("i8")) is None:
            return refuted(*facts, "its offsets have more digits than a short float holds")
        return undecided(*facts, "nothing beside it tells which tokens are right", missing=("drafter_before",))
    return refuted(*facts, "it is not a rounded copy of %s" % " or of ".join(name for name, ids in right.items() if ids is not None))


def _supported(params: Params, after: Side, ids: Ids | None, told: str, meter: Meter) -> Answer:
    import numpy as np

    from probes.lib.hypothesis import percent, read_counts, share, supported

    stored = after.stored
    facts, accuracy = [told], None
    if stored is not None and ids is not None:
        with np.errstate(invalid="ignore"):
            same = stored.d2t.astype(np.float64) == (ids - np.arange(len(ids))).astype(np.float64)
        text = share(ids[same], read_counts(params.counts, meter))
        accuracy = float(same.mean()) if text is None else text
        facts.append("{:,} of {:,} rows still lead to their token, {}".format(
            int(same.sum()), len(ids), "%s of the rows" % percent(accuracy) if text is None else "%s of the text" % percent(text)))  # fmt: skip
    if params.trainer == "speculators":
        facts.append("speculators trains with t2d alone and does not notice; the server will")
    return supported(
        *facts,
        explains="a normal loss beside a low accuracy where predictions are translated with d2t; a low acceptance when served",
        accuracy=accuracy,
        next_command="take d2t from where it was int64, or write it anew: d2t = nonzero(t2d) - arange(D), as int64",
    )
