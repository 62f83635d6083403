"""t2d and d2t of one checkpoint stand for different tokens: training and serving disagree.

Training cuts the target's head with t2d, serving and some accuracies translate with d2t. When one of the two was replaced,
or never loaded, each is fine on its own and together they are wrong.
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
HYPOTHESIS = {"cost_s": 0.5, "likelihood": 0.15}


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
    """Hold the tokens of d2t against those that t2d marks."""
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
    import numpy as np

    from probes.lib.hypothesis import cast_of, marked_ids, read_mapping, refuted, undecided

    side = read_mapping("B", path, None, meter)
    if side.stored is None:
        return undecided(side.reason)
    if side.t2d is None and side.t2d_problem is None and side.encoding not in ("uninitialised", "absolute"):
        return refuted("there is no t2d that could disagree")
    old = None
    if params.drafter_before is not None and path != params.drafter_before:
        old = read_mapping("A", params.drafter_before, side.vocab, meter).ids
    marked = marked_ids(side)
    if side.encoding == "uninitialised":
        return _never_loaded(params, side)
    if side.encoding == "absolute" and side.stored.claimed is None:
        return _absolute(side)
    rounded = cast_of(side, marked) or cast_of(side, old)
    if rounded is not None or (side.encoding == "corrupt" and "rounded" in side.reason):
        return refuted("they differ exactly as rounding d2t to %s makes them differ" % (rounded or "a short float"))
    if side.t2d is None or (marked is None and side.t2d.kind == "mask"):
        told = side.t2d_problem or "t2d marks {:,} tokens, d2t has {:,} rows".format(side.t2d.selected or 0, side.rows or 0)  # type: ignore[union-attr]
        return _supported(params, side, old, told, meter)
    if side.ids is None:
        return _supported(params, side, old, "t2d marks {:,} tokens; {}".format(side.t2d.selected or 0, side.reason), meter)
    if not side.t2d.agrees(side.ids):
        hits = int(side.t2d.holds(side.ids).sum())
        return _supported(params, side, old, "t2d marks {:,} of the {:,} tokens of d2t".format(hits, len(side.ids)), meter)
    if side.t2d.kind == "mask" and not np.array_equal(np.flatnonzero(side.t2d.values), side.ids):
        return refuted("they stand for the same {:,} tokens, in another order".format(len(side.ids)))
    return refuted("t2d marks exactly the {:,} tokens of d2t".format(len(side.ids)))


def _never_loaded(params: Params, side: Side) -> Answer:
    from probes.lib.hypothesis import supported

    where = params.drafter_before or "the checkpoint that serves"
    return supported(
        side.reason,
        explains="an accuracy and an acceptance near zero: rows are translated into the tokens of their numbers",
        next_command="write the d2t and t2d of %s into the checkpoint, or give the trainer its mapping: rdiag vocab-keep" % where,
    )


def _absolute(side: Side) -> Answer:
    from probes.lib.hypothesis import supported

    return supported(
        side.reason,
        "d2t holds token ids, and every trainer and server adds the number of the row to them",
        explains="a normal loss beside an accuracy near zero where predictions are translated with d2t; no acceptance when served",
        next_command="write d2t anew as offsets, as int64: the token id of each row less the number of the row",
    )


def _supported(params: Params, side: Side, old: Ids | None, told: str, meter: Meter) -> Answer:
    import numpy as np

    from probes.lib.hypothesis import agreeing, marked_ids, percent, read_counts, share, supported

    facts, accuracy = [told], None
    marked = marked_ids(side)
    if marked is not None and side.ids is not None:
        rows, tokens = agreeing(side.ids, marked)
        text = share(tokens, read_counts(params.counts, meter))
        accuracy = rows / max(1, len(marked)) if text is None else text
        facts.append("{:,} of {:,} rows stand for the same token in both, {} of the {}".format(
            rows, len(marked), percent(accuracy), "rows" if text is None else "counted text"))  # fmt: skip
    broken = "one of the two"
    if old is not None:
        d2t = side.ids is not None and np.array_equal(side.ids, old)
        t2d = marked is not None and np.array_equal(marked, np.sort(old))
        if d2t != t2d:
            broken = "t2d" if d2t else "d2t"
            facts.append("%s is still that of A, %s is not" % ("d2t" if d2t else "t2d", broken))
    write = "t2d" if broken == "t2d" else "d2t"
    return supported(
        *facts,
        explains="a loss above that of a uniform guess where t2d is the wrong one; a normal loss beside a low accuracy, and a"
        " low acceptance when served, where d2t is",
        accuracy=accuracy,
        next_command="write %s anew from the other one (rdiag verifier-head tells which one the head follows)" % write,
    )
