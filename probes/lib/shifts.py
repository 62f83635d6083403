"""How the rows of one mapping lie in another: how far each shared token moved, and where tokens were put in or left out.

One token that is put in early moves every later row by one. That is why two mappings can share nearly all tokens and
hardly any row; the blocks and the shifts show it.
"""

from __future__ import annotations

from dataclasses import dataclass

from .mappings import find_rows

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from numpy.typing import NDArray

    from .mappings import Ids


@dataclass(frozen=True)
class Bin:
    """Shared tokens that moved by about as many rows."""

    low: int
    """Smallest shift, in rows: place in B less place in A."""
    high: int
    """Largest shift."""
    tokens: int
    share: float | None
    """Of the counted tokens, 0 to 1; None without counts."""


@dataclass(frozen=True)
class Shifts:
    """How the shared tokens moved."""

    bins: tuple[Bin, ...]
    """From the furthest back to the furthest on; empty ones are left out."""
    median: int | None
    """Half of the shared tokens moved by at most as many rows, in either direction; None when nothing is shared."""
    p95: int | None
    """So did 95 of 100."""
    suffix: int
    """Rows after the last that differs, counted from the end of each."""
    inserted: int
    """Stretches of rows in B whose tokens A lacks."""
    deleted: int
    """Stretches of rows in A whose tokens B lacks."""


@dataclass(frozen=True)
class Curves:
    """Few points that stand for the whole picture."""

    rows: tuple[int, ...]
    """Rows, evenly spread."""
    a: tuple[int | None, ...]
    """Their tokens in A; None where it has no such row."""
    b: tuple[int | None, ...]
    tokens: tuple[int, ...]
    """Target ids in the middle of equally wide ranges of them."""
    low: tuple[int | None, ...]
    """Smallest shift of a shared token in that range; None where there is none."""
    high: tuple[int | None, ...]
    """Largest shift there."""


def shifts(a: Ids, b: Ids, counts: NDArray[Any] | None) -> Shifts:
    """Return how the rows of ``a`` lie in ``b``; ``counts`` by token id."""
    import numpy as np

    place = find_rows(a, b)
    known = place >= 0
    moved = place[known] - np.flatnonzero(known)
    far = np.sort(np.abs(moved))
    return Shifts(
        bins=_bins(moved, a[known], counts),
        median=_quantile(far, 0.5),
        p95=_quantile(far, 0.95),
        suffix=_suffix(a, b),
        inserted=_stretches(find_rows(b, a) < 0),
        deleted=_stretches(~known),
    )


def curves(a: Ids, b: Ids, vocab: int, points: int) -> Curves:
    """Return at most ``points`` rows, and as many ranges of the ``vocab`` target ids (more where there are larger ids)."""
    import numpy as np

    vocab = max(vocab, 1 + int(max(a.max(), b.max())))
    longest = max(len(a), len(b))
    rows = np.unique(np.linspace(0, longest - 1, min(points, longest)).astype(np.int64))
    place = find_rows(a, b)
    known = np.flatnonzero(place >= 0)
    ranges = min(points, vocab)
    which = a[known] * ranges // vocab
    low, high = np.full(ranges, np.iinfo(np.int64).max), np.full(ranges, np.iinfo(np.int64).min)
    np.minimum.at(low, which, place[known] - known)
    np.maximum.at(high, which, place[known] - known)
    filled = low <= high
    middles = (2 * np.arange(ranges) + 1) * vocab // (2 * ranges)
    return Curves(
        tuple(rows.tolist()), _targets(a, rows), _targets(b, rows), tuple(middles.tolist()),
        *(tuple(int(value) if is_filled else None for value, is_filled in zip(side, filled)) for side in (low, high)),
    )  # fmt: skip


def heaviest(ids: Ids, other: Ids, counts: NDArray[Any] | None, count: int) -> Ids:
    """Return the rows of ``ids`` whose tokens ``other`` lacks: the ``count`` most frequent, or the first without counts."""
    import numpy as np

    rows = np.flatnonzero(find_rows(ids, other) < 0)
    if counts is not None:
        rows = rows[np.argsort(-weights(ids[rows], counts), kind="stable")]
    return rows[:count]


def weights(ids: Ids, counts: NDArray[Any]) -> NDArray[Any]:
    """Return how often each of ``ids`` was counted; 0 beyond the end of ``counts``."""
    import numpy as np

    inside = ids < len(counts)
    found: NDArray[Any] = np.zeros(len(ids))
    found[inside] = counts[ids[inside]]
    return found


def _bins(moved: Ids, tokens: Ids, counts: NDArray[Any] | None) -> tuple[Bin, ...]:
    """Return bins whose width doubles with the distance: 0, 1, 2 to 3, 4 to 7, on both sides."""
    import numpy as np

    far = np.abs(moved)
    # frexp: 0 -> 0, 1 -> 1, 2 and 3 -> 2, 4 to 7 -> 3, exactly for all that a row number can be.
    kind = np.sign(moved) * np.frexp(far.astype(np.float64))[1]
    mass = None if counts is None else weights(tokens, counts)
    total = 0.0 if counts is None else float(counts.sum(dtype="f8"))
    bins = []
    for which in np.unique(kind).tolist():
        inside = kind == which
        edge = (1 << abs(which)) >> 1, max(0, (1 << abs(which)) - 1)
        low, high = edge if which >= 0 else (-edge[1], -edge[0])
        share = float(mass[inside].sum()) / total if mass is not None and total > 0 else None
        bins.append(Bin(low, high, int(inside.sum()), share))
    return tuple(bins)


def _quantile(ordered: Ids, share: float) -> int | None:
    """Return the smallest value that ``share`` of all do not exceed."""
    if not len(ordered):
        return None
    return int(ordered[max(0, -int(-share * len(ordered) // 1) - 1)])


def _suffix(a: Ids, b: Ids) -> int:
    import numpy as np

    count = min(len(a), len(b))
    same = a[len(a) - count :][::-1] == b[len(b) - count :][::-1]
    return count if same.all() else int(np.argmin(same))


def _stretches(alone: NDArray[Any]) -> int:
    """Return how many stretches of true values there are."""
    import numpy as np

    return int(np.diff(np.concatenate([[False], alone]).astype(np.int8)).clip(0).sum())


def _targets(ids: Ids, rows: Ids) -> tuple[int | None, ...]:
    inside = rows[rows < len(ids)]
    return (*ids[inside].tolist(), *[None] * (len(rows) - len(inside)))
