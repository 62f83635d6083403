"""The drafter's head was overwritten: its rows are neither in their places nor with their tokens.

Loaders that match names by their end put the target's head, or random numbers, where the drafter's head belongs; a converter
that takes offsets for token ids picks the wrong rows. The rest of the drafter is sound, and talks to a head it never knew.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from probes.lib.drafter import Drafter
    from probes.lib.files import Meter
    from probes.lib.hypothesis import Answer
    from probes.lib.mappings import Ids
    from probes.lib.matrix import Matrix
    from remote_diag.probe import Context

EFFECTS = ("reads-files",)
HYPOTHESIS = {"cost_s": 1.5, "likelihood": 0.1}


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
    """Look for the rows of the head before in the head after: in place, and by token."""
    context.require("numpy")
    from probes.lib.hypothesis import answered

    return Result(**answered(lambda meter: _decide(params, meter)))


KEPT = 0.5
"""Mean cosine with the row before above which a head is still the one before, trained on; unrelated rows have 0."""
CHANGED = 0.05
"""Share of rows without any likeness to the one before that is no accident."""


def _decide(params: Params, meter: Meter) -> Answer:
    from probes.lib.drafter import open_drafter
    from probes.lib.hypothesis import needs, supported

    with open_drafter(params.drafter_after, meter) as after:
        if not after.has("lm_head"):
            if params.drafter_before is None:
                return needs("drafter_before")
            with open_drafter(params.drafter_before, meter) as before:
                if not before.has("lm_head"):
                    from probes.lib.hypothesis import refuted

                    return refuted("neither drafter has a head of its own: the target's is used in both")
            return supported(
                "the drafter before has a head of its own, the one after has none",
                explains="a loss and an accuracy at chance: the target's head takes its place",
            )
        if params.drafter_before is None:
            return needs("drafter_before")
        with open_drafter(params.drafter_before, meter) as before:
            if not before.has("lm_head"):
                return needs("drafter_before")
            return _compare(params, before, after, meter)


def _compare(params: Params, before: Drafter, after: Drafter, meter: Meter) -> Answer:
    import numpy as np

    from probes.lib.hypothesis import command, read_mapping, refuted, supported, undecided
    from probes.lib.mappings import find_rows

    old, new = before.matrix("lm_head"), after.matrix("lm_head")
    if old.columns != new.columns:
        return supported("the head was %d wide and is %d" % (old.columns, new.columns))
    places = np.arange(new.rows)
    candidates = {"in its place": np.where(places < old.rows, places, -1)}
    mine, theirs = read_mapping("A", before.path, None, meter), read_mapping("B", after.path, None, meter)
    if mine.ids is not None and theirs.ids is not None and not np.array_equal(mine.ids, theirs.ids):
        moved = np.full(new.rows, -1, np.int64)
        moved[: len(theirs.ids)] = find_rows(theirs.ids, mine.ids)[: new.rows]
        candidates["with its token"] = moved
    told, kept = [], False
    for name, rows in candidates.items():
        cosines, equal = _likeness(new, old, rows)
        if not len(cosines):
            continue
        far = float((cosines < KEPT).mean())
        told.append("%s, a row equals the one before in %.1f %% of {:,} rows; mean cosine %.3f, %.1f %% unlike it".format(len(cosines))
                    % (name, 100 * equal, float(cosines.mean()), 100 * far))  # fmt: skip
        kept = kept or far < CHANGED
    if not told:
        return undecided("no row of the two heads can be compared")
    if kept:
        return refuted(*told)
    lost = _lost(new)
    told += ["{:,} of its sampled rows hold NaN: the head was never loaded".format(lost)] if lost else _whose(params, new, meter)
    return supported(
        *told,
        explains="a loss near or above that of a uniform guess: the body talks to a head it never knew",
        accuracy=0.0,
        next_command=command("rdiag", "drafter-check", after.path, *(["--target", params.target] if params.target else []))
        + ", and put the rows of %s back" % before.path,
    )


def _likeness(new: Matrix, old: Matrix, rows: Ids) -> tuple[NDArray[Any], float]:
    """Return (cosine of each sampled row with the one before, both without the mean row; share of equal rows)."""
    import numpy as np

    from probes.lib.floats import cast, same_rows, widen

    known = np.flatnonzero(rows >= 0)
    known = known[np.unique(np.linspace(0, max(0, len(known) - 1), 1024).astype(np.int64))] if len(known) else known
    mine, theirs = new.take_bits(known), old.take_bits(rows[known])
    if not len(known):
        return np.zeros(0), 0.0
    equal = float(same_rows(mine, cast(theirs, old.dtype, new.dtype)).mean())
    a, b = widen(mine, new.dtype).astype(np.float64), widen(theirs, old.dtype).astype(np.float64)
    with np.errstate(invalid="ignore", divide="ignore"):
        a, b = a - _mean(a), b - _mean(b)
        cosines = (a * b).sum(axis=1) / np.sqrt((a * a).sum(axis=1) * (b * b).sum(axis=1))
    return np.where(np.isfinite(cosines), cosines, 0.0), equal


def _mean(rows: NDArray[Any]) -> NDArray[Any]:
    """Return the mean of the rows that are finite; zeros where none is."""
    import numpy as np

    finite = rows[np.isfinite(rows).all(axis=1)]
    mean: NDArray[Any] = finite.mean(axis=0) if len(finite) else np.zeros(rows.shape[1])
    return mean


def _lost(head: Matrix) -> int:
    """Return how many of the sampled rows hold a NaN or an infinity, as those do that nothing was loaded into."""
    import numpy as np

    rows = head.take(np.unique(np.linspace(0, max(0, head.rows - 1), 1024).astype(np.int64)))
    return int((~np.isfinite(rows).all(axis=1)).sum())


def _whose(params: Params, head: Matrix, meter: Meter) -> list[str]:
    """Return what the rows are instead, where the target's head tells."""
    import numpy as np

    from probes.lib.head_match import find_copies
    from probes.lib.target import open_target

    if params.target is None:
        return []
    with open_target(params.target, meter) as target:
        found = find_copies(head, target.head())
    copies = found[found >= 0]
    if len(copies) < head.rows // 2:
        return ["{:,} of {:,} rows are copies of rows of the target: the head is neither the drafter's nor the target's".format(
            len(copies), head.rows)]  # fmt: skip
    first = " (its first ones, in order)" if np.array_equal(found, np.arange(head.rows)) else ""
    repeated = len(copies) - len(np.unique(copies))
    told = ["{:,} of {:,} rows are copies of rows of the target{}".format(len(copies), head.rows, first)]
    return told + (["{:,} of them repeat another: offsets were taken for token ids".format(repeated)] if repeated > head.rows // 20 else [])
