"""What the hypotheses of ``rdiag triage`` share: how one answers, and how the two drafters of a case are opened.

A hypothesis decides in a function that returns an :class:`Answer`; :func:`answered` turns files that cannot be read into
an undecided one.
"""

from __future__ import annotations

import shlex
from dataclasses import asdict, dataclass

from .files import Damaged, Meter, Unreadable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable

    import numpy as np
    from numpy.typing import NDArray

    from .mappings import Ids
    from .sides import Side

CUTS_WITH_T2D = {"speculators": True, "speculators-0.3": True, "specforge": True, "safeai": True, "angelslim": True,
                 "torchspec": True, "modelopt": False, "nemo": False}  # fmt: skip
"""Trainer -> whether it cuts the target's head with t2d, in ascending order; the others gather by token id."""
APPLIES_NORM = {"speculators": True, "speculators-0.3": False, "specforge": False, "angelslim": False, "safeai": False}
"""Trainer -> whether it applies the target's final norm to the stored final state before the target's head."""


@dataclass(frozen=True)
class Answer:
    """What a hypothesis answers; the fields of its ``Result``."""

    verdict: str
    """``supported``, ``refuted`` or ``undecided``."""
    evidence: tuple[str, ...]
    explains: str | None = None
    accuracy: float | None = None
    loss: float | None = None
    next_command: str | None = None
    missing: tuple[str, ...] = ()


def supported(*evidence: str, **more: Any) -> Answer:
    """Return the answer that the hypothesis holds."""
    return Answer("supported", evidence, **more)


def refuted(*evidence: str, **more: Any) -> Answer:
    """Return the answer that it does not."""
    return Answer("refuted", evidence, **more)


def undecided(*evidence: str, **more: Any) -> Answer:
    """Return the answer that nobody can tell; ``missing`` names the entries of the case that would decide it."""
    return Answer("undecided", evidence, **more)


def answered(decide: Callable[[Meter], Answer]) -> dict[str, Any]:
    """Return what ``decide`` answers as keywords of a ``Result``; what it cannot read leaves it undecided."""
    try:
        answer = decide(Meter())
    except (Unreadable, Damaged) as error:
        hint = getattr(error, "hint", None)
        answer = undecided(str(error), *([hint] if hint else []))
    return {**asdict(answer), "evidence": answer.evidence, "missing": answer.missing}


def needs(*alternatives: str) -> Answer:
    """Return the undecided answer of a hypothesis that needs one of several entries of the case."""
    return undecided("the case does not say: %s" % " or ".join(alternatives), missing=alternatives)


def command(*words: str) -> str:
    """Return a command to type, its words quoted where that is needed."""
    return " ".join(word if word.isupper() else shlex.quote(word) for word in words)


def read_mapping(name: str, path: str, vocab: int | None, meter: Meter) -> Side:
    """Return the mapping at ``path``, understood as far as possible; raise Unreadable when there is none.

    Where a d2t may hold offsets as well as ids, it is taken for offsets, as every server takes it.
    """
    from .sides import read_side, understand

    side = read_side(name, path)
    meter.bytes += side.meter.bytes
    understand(side, vocab, None)
    if side.encoding == "ambiguous" and side.stored is not None and side.stored.d2t.any():
        understand(side, vocab, "offset")
    return side


def marked_ids(side: Side) -> Ids | None:
    """Return the tokens that t2d marks, ascending; None where it is no mask or marks not one a row."""
    import numpy as np

    if side.t2d is None or side.t2d.kind != "mask" or side.t2d.selected != side.rows:
        return None
    return np.flatnonzero(side.t2d.values)


def trained_ids(side: Side, trainer: str | None) -> Ids | None:
    """Return the token of each row as a trainer takes it; None where that is not known."""
    marked = marked_ids(side)
    return marked if marked is not None and CUTS_WITH_T2D.get(trainer or "", True) else side.ids


def cast_of(side: Side, right: Ids | None) -> str | None:
    """Return the float type whose rounding makes the stored d2t of ``side`` out of that of ``right``; None for none."""
    import numpy as np

    from .floats import narrow, widen

    if side.stored is None or right is None or side.stored.d2t_name is None or len(right) != len(side.stored.d2t):
        return None
    stored = side.stored.d2t.astype(np.float64)
    offsets = right - np.arange(len(right))
    if np.array_equal(stored, offsets.astype(np.float64)):
        return None
    for dtype in ("bfloat16", "float16", "float32"):
        rounded = widen(narrow(offsets.astype(np.float32), dtype), dtype).astype(np.float64)
        if np.array_equal(stored, rounded):
            return dtype
    return None


def share(ids: Ids, counts: NDArray[Any] | None) -> float | None:
    """Return the share of a counted text that these tokens make up; None without counts."""
    import numpy as np

    if counts is None:
        return None
    total = float(counts.sum(dtype="f8"))
    if not total > 0:
        return None
    return min(1.0, float(counts[ids[(ids >= 0) & (ids < len(counts))]].astype(np.float64).sum()) / total)


def agreeing(a: Ids, b: Ids) -> tuple[int, Ids]:
    """Return (rows on which two mappings agree, the tokens of these rows)."""
    rows = min(len(a), len(b))
    same: NDArray[np.bool_] = a[:rows] == b[:rows]
    return int(same.sum()), a[:rows][same]


def read_counts(path: str | None, meter: Meter) -> NDArray[Any] | None:
    """Return occurrences by token id; None where the case has none."""
    from . import vocabulary

    return None if path is None else vocabulary.read_counts(path, meter)[0]


def percent(share: float) -> str:
    """Return a share as text."""
    return "%.1f %%" % (100 * share)
