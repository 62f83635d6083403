"""The drafter's embedding was replaced: the tokens that it is given mean nothing to it.

Some trainers leave the embedding out of checkpoints, some export a random one, servers put the target's in its place. A
drafter whose own embedding differs from the target's loses it without a word.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from probes.lib.files import Meter
    from probes.lib.hypothesis import Answer
    from probes.lib.matrix import Matrix
    from remote_diag.probe import Context

EFFECTS = ("reads-files",)
HYPOTHESIS = {"cost_s": 1.0, "likelihood": 0.06}


@dataclass(frozen=True)
class Params:
    """Entries of the case."""

    __pydantic_config__ = {"extra": "forbid", "allow_inf_nan": False, "use_attribute_docstrings": True}

    drafter_after: str
    """The drafter as training has it (B)."""
    drafter_before: str | None = None
    """The drafter that serves above chance (A)."""
    target: str | None = None
    """The target model."""


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
    """Hold the embedding after against the one before, and against the target's."""
    context.require("numpy")
    from probes.lib.hypothesis import answered

    return Result(**answered(lambda meter: _decide(params, meter)))


KEPT = 0.5
"""Cosine of a row with the one before above which it is the same, trained on; unrelated ones have 0."""
CHANGED = 0.05
"""Share of rows without any likeness that is no accident."""


def _decide(params: Params, meter: Meter) -> Answer:
    from probes.lib.drafter import open_drafter
    from probes.lib.hypothesis import needs, refuted

    with open_drafter(params.drafter_after, meter) as after:
        own = after.matrix("embed") if after.has("embed") else None
        if params.drafter_before is not None:
            with open_drafter(params.drafter_before, meter) as before:
                old = before.matrix("embed") if before.has("embed") else None
                if own is not None and old is not None:
                    return _judge(params, own, old, "the one before")
                if own is None and old is None:
                    return refuted("neither drafter has an embedding of its own: both use the target's")
                return _against_target(params, own or old, "after" if own is not None else "before", meter)
        if own is None:
            return refuted("the drafter in training has no embedding of its own: it uses the target's")
        if params.target is None:
            return needs("drafter_before", "target")
        return _against_target(params, own, "after", meter)


def _against_target(params: Params, own: Matrix | None, which: str, meter: Meter) -> Answer:
    """Judge the one embedding that there is: the other drafter uses the target's."""
    from probes.lib.hypothesis import needs, undecided
    from probes.lib.target import open_target

    if params.target is None or own is None:
        return needs("target")
    with open_target(params.target, meter) as target:
        theirs = target.embedding()
        if theirs.columns != own.columns:
            return undecided("the drafter's embedding is %d wide, the target's %d" % (own.columns, theirs.columns))
        return _judge(params, own, theirs, "the target's, which the drafter %s has" % ("before" if which == "after" else "after"))


def _judge(params: Params, own: Matrix, other: Matrix, name: str) -> Answer:
    import numpy as np

    from probes.lib.floats import cast, same_rows, widen
    from probes.lib.hypothesis import command, refuted, supported

    if own.columns != other.columns:
        return supported("the embedding is %d wide, %s %d" % (own.columns, name, other.columns))
    rows = np.unique(np.linspace(0, max(0, min(own.rows, other.rows) - 1), 1024).astype(np.int64))
    mine, theirs = own.take_bits(rows), other.take_bits(rows)
    equal = float(same_rows(mine, cast(theirs, other.dtype, own.dtype)).mean())
    a, b = widen(mine, own.dtype).astype(np.float64), widen(theirs, other.dtype).astype(np.float64)
    with np.errstate(invalid="ignore", divide="ignore"):
        cosines = (a * b).sum(axis=1) / np.sqrt((a * a).sum(axis=1) * (b * b).sum(axis=1))
    # Rows that are zero in both are the same as well.
    cosines = np.where((a == b).all(axis=1), 1.0, np.nan_to_num(cosines))
    far = float((cosines < KEPT).mean())
    fact = "%.1f %% of {:,} sampled rows equal %s; mean cosine %.3f, %.1f %% unlike it".format(len(rows)) % (
        100 * equal, name, float(cosines.mean()), 100 * far)  # fmt: skip
    if far <= CHANGED:
        return refuted(fact)
    return supported(
        fact,
        "standard deviation %.4g, that of %s %.4g" % (float(a.std()), name, float(b.std())),
        explains="a loss and an accuracy near those of token frequencies: the drafter does not see the last token",
        next_command=command("rdiag", "drafter-check", params.drafter_after, *(["--target", params.target] if params.target else [])),
    )
