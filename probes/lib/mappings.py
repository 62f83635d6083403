"""Draft vocabularies as arrays: which encoding a stored d2t has, whether t2d agrees with it, and how two of them differ.

Draft row i stands for target token ``ids[i]``. Trainers store offsets, ``d2t[i] = ids[i] - i``, or the ids themselves;
no field says which. t2d marks the target tokens that are in the draft vocabulary: a mask, or the row of each token.
Everything here is whole-array numpy; 163,840 tokens and 32,000 rows take a few milliseconds.
"""

from __future__ import annotations

from dataclasses import dataclass

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    import numpy as np
    from numpy.typing import NDArray

    Ids = NDArray[np.int64]
    Bools = NDArray[np.bool_]

_LARGEST = 1 << 31
"""Beyond any vocabulary; keeps every sum far from overflow."""
_CERTAIN_BITS = 64
"""So many bits that are zero in a row are no coincidence."""
_SIGNIFICANT_BITS = {"bfloat16": 8, "float16": 11}


@dataclass(frozen=True)
class Membership:
    """t2d, understood: which target tokens have a draft row."""

    kind: str
    """``mask`` (true where the token has a row) or ``index-map`` (the row of each token)."""
    values: NDArray[Any]
    """bool for a mask, int64 for an index map; one value a target token."""

    @property
    def selected(self) -> int | None:
        """How many tokens have a row; None for an index map, which has no agreed value for "none"."""
        return int(self.values.sum()) if self.kind == "mask" else None

    def holds(self, ids: Ids) -> Bools:
        """Return for each draft row whether t2d says the same: its token is marked, or leads back to the row."""
        import numpy as np

        inside = (ids >= 0) & (ids < len(self.values))
        found = self.values[np.where(inside, ids, 0)] if len(self.values) else np.zeros(len(ids), bool)
        agrees: Bools = inside & (found if self.kind == "mask" else found == np.arange(len(ids)))
        return agrees

    def agrees(self, ids: Ids) -> bool:
        """Whether t2d stands for exactly these tokens, in whatever order."""
        return self.selected in (None, len(ids)) and bool(self.holds(ids).all())

    def in_order(self, ids: Ids) -> bool:
        """Whether t2d stands for exactly these rows in exactly this order, as ``lm_head[t2d]`` takes them."""
        import numpy as np

        if self.kind == "index-map":
            return bool(self.holds(ids).all())
        return bool(np.array_equal(np.flatnonzero(self.values), ids))


@dataclass(frozen=True)
class Mapping:
    """d2t, understood."""

    encoding: str
    """``offset``, ``absolute``, ``ambiguous``, ``uninitialised`` or ``corrupt``."""
    ids: Ids | None
    """Target token of each draft row, all different; None unless ``offset`` or ``absolute``."""
    reason: str
    """How that was decided."""


@dataclass(frozen=True)
class Comparison:
    """How the draft rows of A and B relate. Rows are compared up to the shorter of the two."""

    positional_matches: int
    """Rows that stand for the same token in both."""
    shared_targets: int
    """Tokens that have a row in both."""
    common_prefix: int
    """Rows before the first that differs."""
    rows_without_source: int
    """Rows of B whose token has no row in A."""
    order_preserved: bool
    """Whether the shared tokens come in the same order in both."""
    max_shift: int | None
    """Largest distance between the rows of a shared token; None when nothing is shared."""
    relation: str
    """``identical``, ``permutation``, ``subset`` (A's tokens are some of B's), ``superset`` or ``different``."""


@dataclass(frozen=True)
class Shares:
    """Shares of all counted tokens, 0 to 1."""

    positional: float
    """Of tokens whose row is the same in both."""
    shared: float
    """Of tokens that have a row in both."""
    coverage_a: float
    """Of tokens that have a row in A."""
    coverage_b: float
    """Of tokens that have a row in B."""


def understand_t2d(values: NDArray[Any]) -> Membership:
    """Return what a stored t2d means; raise ValueError, in words, when it means nothing."""
    import numpy as np

    if values.dtype.kind == "b":
        return Membership("mask", values)
    whole = _whole_numbers(values)
    if whole.size == 0:
        raise ValueError("it is empty")
    low, high = int(whole.min()), int(whole.max())
    if low >= 0 and high <= 1:
        return Membership("mask", whole.astype(np.bool_))
    return Membership("index-map", whole)


def understand_d2t(
    stored: NDArray[Any], vocab: int | None, t2d: Membership | None = None, claimed: str | None = None
) -> Mapping:
    """Return the tokens that a stored d2t stands for, or why nobody can tell.

    Args:
        stored: one number a draft row, of any type.
        vocab: size of the target vocabulary; None when unknown.
        t2d: decides where both encodings are possible.
        claimed: ``offset`` or ``absolute`` when the user says so; it is believed as far as it gives valid ids.
    """
    import numpy as np

    if stored.dtype.kind == "b":
        return Mapping("corrupt", None, "d2t holds truth values")
    try:
        values = _whole_numbers(stored)
    except ValueError as error:
        return Mapping("corrupt", None, "d2t: %s" % error)
    if not values.size:
        return Mapping("corrupt", None, "d2t is empty")
    rows = np.arange(len(values), dtype=np.int64)
    candidates = {"offset": values + rows, "absolute": values}
    faults = {name: _fault(ids, vocab) for name, ids in candidates.items()}
    if claimed is not None:
        if faults[claimed] is None:
            return Mapping(claimed, candidates[claimed], "as asked for")
        return Mapping("corrupt", None, "as %s, which was asked for, %s" % (_WORDS[claimed], faults[claimed]))
    if not values.any():
        return _all_zero(rows, vocab, t2d)
    mapping = _decide(candidates, faults, t2d)
    # A cast to a short float and back leaves ids that are unique, in range, and wrong.
    confirmed = mapping.ids is not None and t2d is not None and t2d.agrees(mapping.ids)
    cast = None if confirmed or mapping.encoding not in ("offset", "corrupt") else rounded_like(values)
    if cast is None:
        return mapping
    told = "" if t2d is None else "; t2d has %d of its %d tokens" % (int(t2d.holds(values + rows).sum()), len(rows))
    return Mapping("corrupt", None, "every offset is rounded as a cast to %s rounds it%s" % (cast, told))


def rounded_like(values: Ids) -> str | None:
    """Return the short float type (``bfloat16``, ``float16``) through which ``values`` must have gone, or None.

    Such a type keeps 8 or 11 bits of a number, so a larger one ends in zeros. Every distinct value that does adds its
    zeros to the evidence; one that does not refutes the cast.
    """
    import numpy as np

    distinct = np.unique(np.abs(values))
    bits = np.frexp(distinct.astype(np.float64))[1].astype(np.int64)
    for name, kept in _SIGNIFICANT_BITS.items():
        zeros = np.maximum(bits - kept, 0)
        if zeros.sum() >= _CERTAIN_BITS and not (distinct & ((np.int64(1) << zeros) - 1)).any():
            return name
    return None


def compare(a: Ids, b: Ids) -> Comparison:
    """Compare two mappings, int64 ids that are all different within each."""
    import numpy as np

    rows = min(len(a), len(b))
    same = a[:rows] == b[:rows]
    row_in_b = find_rows(a, b)
    shared = row_in_b >= 0
    moved_to, moved_from = row_in_b[shared], np.flatnonzero(shared)
    count = len(moved_to)
    return Comparison(
        positional_matches=int(same.sum()),
        shared_targets=count,
        common_prefix=rows if same.all() else int(np.argmin(same)),
        rows_without_source=len(b) - count,
        order_preserved=bool((np.diff(moved_to) > 0).all()),
        max_shift=int(np.abs(moved_to - moved_from).max()) if count else None,
        relation=_relation(bool(same.all()) and len(a) == len(b), count, len(a), len(b)),
    )


def find_rows(wanted: Ids, ids: Ids) -> Ids:
    """Return for each token in ``wanted`` its row in ``ids`` (all different), -1 where it has none."""
    import numpy as np

    if not len(ids):
        return np.full(len(wanted), -1, np.int64)
    order = np.argsort(ids, kind="stable")
    place = np.minimum(np.searchsorted(ids, wanted, sorter=order), len(ids) - 1)
    rows = order[place]
    found: Ids = np.where(ids[rows] == wanted, rows, -1).astype(np.int64)
    return found


def shares(a: Ids, b: Ids, counts: NDArray[Any]) -> Shares | None:
    """Return how much of a counted text the agreements of A and B make up; None when nothing was counted.

    Args:
        a: ids of A's rows.
        b: ids of B's rows.
        counts: occurrences by token id, not negative; a token beyond its end was never seen.
    """
    import numpy as np

    weights = counts.astype(np.float64)
    total = float(weights.sum())
    if not total > 0:
        return None

    def share(ids: Ids) -> float:
        return min(1.0, float(weights[ids[ids < len(weights)]].sum()) / total)

    rows = min(len(a), len(b))
    return Shares(
        positional=share(a[:rows][a[:rows] == b[:rows]]),
        shared=share(a[find_rows(a, b) >= 0]),
        coverage_a=share(a),
        coverage_b=share(b),
    )


def is_ascending(ids: Ids) -> bool:
    """Whether the rows stand in the order of their token ids, as trainers that cut with t2d assume."""
    return bool((ids[1:] > ids[:-1]).all())


_WORDS = {"offset": "offsets", "absolute": "token ids"}


def _whole_numbers(values: NDArray[Any]) -> Ids:
    import numpy as np

    if values.dtype.kind == "f":
        if not np.isfinite(values).all():
            raise ValueError("%d values are infinite or NaN" % int((~np.isfinite(values)).sum()))
        broken = int((values != np.rint(values)).sum())
        if broken:
            raise ValueError("%d values are not whole numbers" % broken)
    if values.size:
        low, high = float(values.min()), float(values.max())
        if not -_LARGEST < low <= high < _LARGEST:
            raise ValueError("values from %.0f to %.0f, beyond any vocabulary" % (low, high))
    whole: Ids = values.astype(np.int64)
    return whole


def _fault(ids: Ids, vocab: int | None) -> str | None:
    """Return why ``ids`` cannot be the tokens of draft rows, None when they can."""
    import numpy as np

    negative = int((ids < 0).sum())
    if negative:
        return f"{negative:,} rows would have negative ids"
    beyond = 0 if vocab is None else int((ids >= vocab).sum())
    if beyond:
        return f"{beyond:,} rows would lie beyond the vocabulary of {vocab or 0:,} (largest id {int(ids.max()):,})"
    repeated = 0 if is_ascending(ids) else len(ids) - len(np.unique(ids))
    return f"{repeated:,} rows would repeat a token" if repeated else None


def _all_zero(rows: Ids, vocab: int | None, t2d: Membership | None) -> Mapping:
    """Zeros are either rows 0, 1, 2... standing for tokens 0, 1, 2..., or a buffer that nothing was loaded into."""
    if vocab == len(rows):
        return Mapping("offset", rows, "all zero, and as many rows as the target has tokens: the identity")
    if t2d is not None:
        if t2d.in_order(rows):
            return Mapping("offset", rows, "all zero, and t2d marks exactly the first %d tokens: the identity" % len(rows))
        if t2d.kind == "mask" and t2d.values.all():
            return Mapping("uninitialised", None, "d2t is all zero and t2d marks every token: nothing was loaded into them")
        if not t2d.values.any():
            return Mapping("uninitialised", None, "d2t is all zero and t2d marks no token: nothing was loaded into them")
        return Mapping("uninitialised", None, "d2t is all zero while t2d marks other tokens than the first %d" % len(rows))
    if vocab is None:
        return Mapping("ambiguous", None, "all zero: the identity or never loaded; neither t2d nor a vocabulary size tells")
    return Mapping(
        "uninitialised", None, "d2t is all zero with %d rows for %d tokens, and no t2d says that is meant" % (len(rows), vocab)
    )


def _decide(candidates: dict[str, Ids], faults: dict[str, str | None], t2d: Membership | None) -> Mapping:
    possible = [name for name, fault in faults.items() if fault is None]
    if not possible:
        told = "; ".join("as %s, %s" % (_WORDS[name], fault) for name, fault in faults.items())
        return Mapping("corrupt", None, told)
    if len(possible) == 1:
        name = possible[0]
        other = "absolute" if name == "offset" else "offset"
        return Mapping(name, candidates[name], "as %s, %s" % (_WORDS[other], faults[other]))
    both = "offsets and token ids are both possible"
    if t2d is None:
        return Mapping("ambiguous", None, both + ", and there is no t2d to decide")
    hits = {name: int(t2d.holds(ids).sum()) for name, ids in candidates.items()}
    rows = len(candidates["offset"])
    told = ", ".join("%d of %d rows as %s" % (hits[name], rows, _WORDS[name]) for name in hits)
    complete = [name for name in hits if hits[name] == rows]
    if len(complete) == 1 and t2d.selected in (None, rows):
        return Mapping(complete[0], candidates[complete[0]], "%s; t2d agrees with %s" % (both, told))
    return Mapping("ambiguous", None, "%s, and t2d does not decide: it agrees with %s" % (both, told))


def _relation(same: bool, shared: int, rows_a: int, rows_b: int) -> str:
    if same:
        return "identical"
    if shared == rows_a == rows_b:
        return "permutation"
    if shared == rows_a:
        return "subset"
    return "superset" if shared == rows_b else "different"
