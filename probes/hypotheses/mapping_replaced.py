"""The vocabulary mapping was replaced under a trained head: its rows now stand for other tokens.

The drafter was trained with mapping A. Training went on with mapping B, built from other data, while the rows of the head
stayed in A's order. Every row that stands for another token now is confidently wrong: the loss starts above that of a
uniform guess, and the accuracy is at most the share of the text whose row is the same in both.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from probes.lib.files import Meter
    from probes.lib.hypothesis import Answer
    from probes.lib.mappings import Ids
    from probes.lib.sides import Side
    from remote_diag.probe import Context

EFFECTS = ("reads-files",)
HYPOTHESIS = {"cost_s": 1.0, "likelihood": 0.4}

ABOVE_CEILING = 1.5
"""An accuracy beyond this multiple of the ceiling is not held down by it."""
CHEAP = 0.01
"""Share of the text that keeping the old mapping may cost before moving rows is the better way."""
HALF = 0.5
"""A loss below this share of a uniform guess's is no sign of exchanged rows, whatever the ceiling."""


@dataclass(frozen=True)
class Params:
    """Entries of the case."""

    __pydantic_config__ = {"extra": "forbid", "allow_inf_nan": False, "use_attribute_docstrings": True}

    drafter_before: str
    """The drafter that serves above chance (A)."""
    drafter_after: str | None = None
    """The drafter as training has it (B)."""
    mapping: str | None = None
    """The mapping that training uses, where that is not drafter_after's."""
    target: str | None = None
    """The target model."""
    counts: str | None = None
    """Occurrences by token id."""
    trainer: str | None = None
    """The program that trains."""
    observed_loss: float | None = None
    """Loss that training starts with, nat."""
    uniform_loss: float | None = None
    """What a uniform guess would print there, nat."""
    observed_accuracy: float | None = None
    """Accuracy that training starts with, 0 to 1."""
    serving_accuracy: float | None = None
    """Accuracy when served, 0 to 1."""


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
    """Compare the mappings, ask the head which of them it follows, hold the numbers against the ceiling."""
    context.require("numpy")
    from probes.lib.hypothesis import answered

    return Result(**answered(lambda meter: _decide(params, meter)))


def _decide(params: Params, meter: Meter) -> Answer:
    from probes.lib.hypothesis import needs, read_mapping, refuted, supported, trained_ids, undecided

    path = params.mapping or params.drafter_after
    if path is None:
        return needs("drafter_after", "mapping")
    after = read_mapping("B", path, None, meter)
    before = read_mapping("A", params.drafter_before, after.vocab, meter)
    old, new = before.ids, trained_ids(after, params.trainer)
    if old is None or new is None:
        which = before if old is None else after
        return undecided("the mapping of %s is not understood: %s" % (which.name, which.reason))
    kept = _kept_in_part(after, old)
    if kept is not None:
        return refuted(kept)
    from probes.lib.mappings import compare

    relation = compare(old, new)
    if relation.relation == "identical":
        return refuted("all {:,} rows stand for the same token in A and B".format(len(old)))
    facts = ["{:,} of {:,} rows stand for the same token in A and B; {:,} of B's tokens have a row in A".format(
        relation.positional_matches, len(new), relation.shared_targets)]  # fmt: skip
    ceiling, told = _ceiling(old, new, params, meter)
    facts.append(told)
    moved = _head(params, old, new, facts, meter)
    against = _numbers(params, ceiling, facts)
    covered, cheap = _coverage(old, new, params, meter)
    facts += covered
    fix = _fix(params, path, keep=cheap or not _has_head(params.drafter_before, meter))
    bound = "an accuracy of at most %.3g" % ceiling if ceiling is not None else "a low accuracy"
    explains = "%s and a loss above that of a uniform guess" % bound
    more: dict[str, Any] = {"explains": explains, "accuracy": ceiling, "next_command": fix}
    if moved == "tokens":
        return refuted(*facts)
    if against is False:
        return refuted(*facts, explains=explains, accuracy=ceiling)
    if moved == "unknown":
        return undecided(*facts, missing=() if params.target else ("target",), **more)
    return supported(*facts, loss=_loss(params, ceiling), **more)


def _kept_in_part(after: Side, old: Ids) -> str | None:
    """Return why B is no other mapping although one of its two parts is; None when both are others."""
    import numpy as np

    from probes.lib.hypothesis import cast_of, marked_ids

    marked = marked_ids(after)
    ascending = np.sort(old)
    if after.ids is not None and np.array_equal(after.ids, old):
        return "d2t of B gives every row the token that A gives it"
    if marked is not None and np.array_equal(marked, ascending):
        rounded = cast_of(after, old)
        if rounded is not None:
            return "t2d of B marks A's tokens, and its d2t is A's, rounded to %s" % rounded
        if after.ids is None or not np.array_equal(np.sort(after.ids), ascending):
            return "t2d of B marks exactly A's tokens; only its d2t is another"
    return None


def _ceiling(old: Ids, new: Ids, params: Params, meter: Meter) -> tuple[float | None, str]:
    """Return (highest accuracy that the exchange leaves, None where that is not known; how it comes about)."""
    from probes.lib.hypothesis import agreeing, percent, read_counts, share

    rows, tokens = agreeing(old, new)
    text = share(tokens, read_counts(params.counts, meter))
    if text is None:
        part = percent(rows / max(1, len(new)))
        return None, "%s of the rows keep their token; how much of the text that is, and so the ceiling, only counts tell" % part
    told = "%s of the counted text keeps its row" % percent(text)
    if params.serving_accuracy is not None:
        return text * params.serving_accuracy, "%s, times a serving accuracy of %.3g" % (told, params.serving_accuracy)
    return text, told


def _coverage(old: Ids, new: Ids, params: Params, meter: Meter) -> tuple[list[str], bool]:
    """Return what keeping A's mapping for the training would cost, where that is known; and whether it is next to nothing."""
    from probes.lib.hypothesis import percent, read_counts, share

    counts = read_counts(params.counts, meter)
    covered, wanted = share(old, counts), share(new, counts)
    if covered is None or wanted is None:
        return [], False
    cheap = wanted - covered < CHEAP
    told = "A's mapping covers %s of the text, B's %s" % (percent(covered), percent(wanted))
    return [told + ("; keeping A's for this training costs next to nothing" if cheap else "")], cheap


def _head(params: Params, old: Ids, new: Ids, facts: list[str], meter: Meter) -> str:
    """Return what the head in training does: ``rows`` (stayed), ``tokens`` (moved along), ``unknown``."""
    if params.drafter_after is None:
        facts.append("training starts from A's head, whose rows are in A's order")
        return "rows"
    from probes.lib.drafter import open_drafter

    with open_drafter(params.drafter_after, meter) as after:
        if not after.has("lm_head"):
            facts.append("the drafter in training has no head of its own")
            return "unknown"
        told = _against_previous(params, after.matrix("lm_head"), old, new, meter)
        if told is None and params.target is not None:
            told = _against_target(params.target, after.matrix("lm_head"), old, new, meter)
    if told is None:
        facts.append("the head in training follows neither A's nor B's order")
        return "unknown"
    facts.append(told[1])
    return told[0]


def _against_previous(params: Params, head: Any, old: Ids, new: Ids, meter: Meter) -> tuple[str, str] | None:
    import numpy as np

    from probes.lib.drafter import open_drafter
    from probes.lib.head_match import Hypothesis, judge
    from probes.lib.mappings import find_rows

    with open_drafter(params.drafter_before, meter) as before:
        if not before.has("lm_head"):
            return None
        previous = before.matrix("lm_head")
        stayed = np.arange(head.rows)
        stayed[stayed >= previous.rows] = -1
        moved = np.full(head.rows, -1, np.int64)
        count = min(head.rows, len(new))
        moved[:count] = find_rows(new[:count], old)
        found = judge(head, previous, [Hypothesis("rows", "", stayed), Hypothesis("tokens", "", moved)])
    if found.follows is None:
        return None
    words = {"rows": "kept A's rows in their places", "tokens": "has A's rows moved along with their tokens"}[found.follows]
    margin = "" if found.margin is None else ", ahead by %.2f on %d rows that differ" % (found.margin, found.rows_compared)
    return found.follows, "the head in training %s (%s%s)" % (words, found.method, margin)


def _against_target(path: str, head: Any, old: Ids, new: Ids, meter: Meter) -> tuple[str, str] | None:
    from probes.lib.head_match import Hypothesis, judge
    from probes.lib.target import open_target

    def filled(ids: Ids) -> Any:
        import numpy as np

        rows = np.full(head.rows, -1, np.int64)
        rows[: min(head.rows, len(ids))] = ids[: head.rows]
        return rows

    with open_target(path, meter) as target:
        guesses = [Hypothesis("rows", "A", filled(old)), Hypothesis("tokens", "B", filled(new))]
        found = judge(head, target.head(), guesses)
    if found.follows is None:
        return None
    name = {"rows": "A", "tokens": "B"}[found.follows]
    return found.follows, "the head in training follows %s, held against the target's rows (%s)" % (name, found.method)


def _numbers(params: Params, ceiling: float | None, facts: list[str]) -> bool | None:
    """Return whether what training printed fits; None where it printed nothing that would tell."""
    fits: list[bool] = []
    if params.observed_loss is not None and params.uniform_loss is not None:
        above = params.observed_loss > params.uniform_loss
        facts.append("the loss starts at %.3g, a uniform guess costs %.3g" % (params.observed_loss, params.uniform_loss))
        # Where half of the text keeps its row, the rest does not lift the mean above a uniform guess.
        if ceiling is not None or params.observed_loss < HALF * params.uniform_loss:
            fits.append(above or (ceiling is not None and ceiling > 0.4))
    if params.observed_accuracy is not None and ceiling is not None:
        observed = params.observed_accuracy
        facts.append("the accuracy starts at %.3g, the exchange leaves at most %.3g" % (observed, ceiling))
        fits.append(observed <= max(ABOVE_CEILING * ceiling, ceiling + 0.05))
        if fits[-1] and observed < 0.5 * ceiling and params.serving_accuracy is not None:
            facts.append("that is less than half of the ceiling: something else may be wrong besides")
    return all(fits) if fits else None


def _loss(params: Params, ceiling: float | None) -> float | None:
    """Return the least loss that a mapping like this makes a drafter start with, nat; None where that is not bounded."""
    if params.uniform_loss is None or ceiling is None or ceiling > 0.4 or not math.isfinite(params.uniform_loss):
        return None
    return params.uniform_loss


def _has_head(path: str, meter: Meter) -> bool:
    """Return whether there are rows to move: a mapping alone has none."""
    from probes.lib.drafter import open_drafter
    from probes.lib.files import Absent

    try:
        with open_drafter(path, meter) as drafter:
            return drafter.has("lm_head")
    except Absent:
        return False


def _fix(params: Params, path: str, *, keep: bool) -> str:
    """Return the command that keeps A's mapping where that is free or all there is, else the one that moves the rows."""
    from probes.lib.hypothesis import command

    if keep:
        out = params.drafter_before.rstrip("/") + "-mapping"
        counts = ["--counts", params.counts] if params.counts else []
        return command("rdiag", "vocab-keep", params.drafter_before, "--out", out, "--mapping", path, *counts)
    fill = ["--verifier", params.target] if params.target else ["--missing", "mean"]
    out = params.drafter_before.rstrip("/") + "-remapped"
    return command("rdiag", "vocab-remap", params.drafter_before, "--mapping", path, "--out", out, *fill)
