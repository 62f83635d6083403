"""Rows for tokens that a drafter's head has none for: from the verifier's head, the mean row, or random numbers.

A head that was trained from random numbers lives in a space of its own: the verifier's rows mean little to it and are of
another length. How much they mean is measured on the tokens that both have.
"""

from __future__ import annotations

from dataclasses import dataclass

from .files import Damaged, Unreadable, quoted
from .floats import cast, narrow, widen

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    import numpy as np
    from numpy.typing import NDArray

    from .mappings import Ids
    from .matrix import Matrix

POLICIES = ("verifier", "verifier-scaled", "mean", "random")
_SAMPLE = 1000
"""Rows that lengths and directions are taken from."""


@dataclass(frozen=True)
class Sample:
    """Some rows of a head, evenly spread over it."""

    rows: Ids
    """Which, those with infinities or NaN left out."""
    numbers: NDArray[np.float32]
    """[rows, width]."""
    broken: int
    """Rows that were left out."""

    @property
    def length(self) -> float:
        """Median length of a row."""
        return _median_length(self.numbers)

    @property
    def deviation(self) -> float:
        """Standard deviation of a number."""
        return float(self.numbers.std(dtype="f8")) if self.numbers.size else 0.0


def take_sample(head: Matrix) -> Sample:
    """Return some rows of ``head``; raise Damaged or Unreadable."""
    import numpy as np

    rows = np.unique(np.linspace(0, head.rows - 1, min(head.rows, _SAMPLE)).astype(np.int64))
    numbers = head.take(rows)
    finite = np.isfinite(numbers).all(axis=1)
    return Sample(rows[finite], numbers[finite], int((~finite).sum()))


class Fill:
    """Makes rows, always in the order of the new head.

    Args:
        dtype: type of the head.
    """

    scale: float | None = None
    """What the verifier's rows are multiplied by; None where they are taken as they are, or not at all."""
    cosine: float | None = None
    """Mean cosine between the drafter's rows and the verifier's of the same tokens, on a sample; None without a verifier."""

    def __init__(self, dtype: str) -> None:
        self.dtype = dtype

    def rows(self, ids: Ids) -> NDArray[Any]:
        """Return one row for each of the tokens ``ids`` as bits of the head's type; raise Damaged or Unreadable."""
        raise NotImplementedError


class Verifier(Fill):
    """The verifier's rows of the same tokens.

    Args:
        head: the drafter's.
        ids: tokens of its rows.
        sample: rows of it.
        theirs: the verifier's head; it must stay open.
        scaled: whether their rows are brought to the length that the drafter's have.

    Raises:
        Unreadable: they are of another width.
        Damaged: their rows do not reach as far as the drafter's tokens.
    """

    def __init__(self, head: Matrix, ids: Ids, sample: Sample, theirs: Matrix, *, scaled: bool) -> None:
        super().__init__(head.dtype)
        if theirs.columns != head.columns:
            raise Unreadable(
                theirs.place.file.path,
                "%s is %d wide, the drafter's head %d: its rows do not fit" % (quoted(theirs.name), theirs.columns, head.columns),
                "fill the rows with --missing mean",
            )
        self._theirs = theirs
        same = theirs.take(ids[sample.rows])
        self.cosine = _mean_cosine(sample.numbers, same)
        if scaled:
            length = _median_length(same)
            if not (length > 0 and sample.length > 0):
                raise Damaged(theirs.place.file.path, "the rows of the verifier or of the drafter have no length to compare")
            self.scale = sample.length / length

    def rows(self, ids: Ids) -> NDArray[Any]:
        """Return the verifier's rows."""
        import numpy as np

        bits = self._theirs.take_bits(ids)
        if self.scale is None:
            bits = cast(bits, self._theirs.dtype, self.dtype)
        else:
            bits = narrow(widen(bits, self._theirs.dtype) * np.float32(self.scale), self.dtype)
        if not np.isfinite(widen(bits, self.dtype)).all():
            raise Damaged(self._theirs.place.file.path, "%s holds infinities or NaN" % quoted(self._theirs.name))
        return bits


class Mean(Fill):
    """The mean of all rows: scores as an average token does.

    Args:
        head: the drafter's; it is read once.

    Raises:
        Damaged: no row of it is finite.
    """

    def __init__(self, head: Matrix) -> None:
        import numpy as np

        super().__init__(head.dtype)
        total, count = np.zeros(head.columns), 0
        for _, bits in head.chunks():
            numbers = widen(bits, head.dtype)
            finite = np.isfinite(numbers).all(axis=1)
            total += numbers[finite].sum(axis=0, dtype=np.float64)
            count += int(finite.sum())
        if not count:
            raise Damaged(head.place.file.path, "%s has no finite row" % quoted(head.name))
        self._row = narrow(total / count if head.dtype == "float64" else (total / count).astype(np.float32), head.dtype)

    def rows(self, ids: Ids) -> NDArray[Any]:
        """Return the mean, once for each token."""
        import numpy as np

        return np.broadcast_to(self._row, (len(ids), len(self._row)))


class Random(Fill):
    """Normal numbers that spread as the head's own do, the same for the same seed.

    Args:
        head: the drafter's.
        sample: rows of it.
        seed: 0 or more.

    Raises:
        Damaged: the head's numbers spread beyond all bounds.
    """

    def __init__(self, head: Matrix, sample: Sample, seed: int) -> None:
        import numpy as np

        super().__init__(head.dtype)
        with np.errstate(over="ignore"):
            self._deviation = np.float32(sample.deviation)
        if not np.isfinite(self._deviation):
            raise Damaged(head.place.file.path, "the numbers of %s are too large for any head" % quoted(head.name))
        self._columns = head.columns
        self._random = np.random.default_rng(seed)

    def rows(self, ids: Ids) -> NDArray[Any]:
        """Return the next rows of the stream."""
        import numpy as np

        numbers = self._random.standard_normal((len(ids), self._columns), dtype=np.float32)
        return narrow(numbers * self._deviation, self.dtype)


def _median_length(numbers: NDArray[np.float32]) -> float:
    import numpy as np

    return float(np.median(np.linalg.norm(numbers, axis=1))) if len(numbers) else 0.0


def _mean_cosine(a: NDArray[np.float32], b: NDArray[np.float32]) -> float | None:
    import numpy as np

    lengths = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
    usable = np.isfinite(lengths) & (lengths > 0)
    if not usable.any():
        return None
    return float(((a[usable] * b[usable]).sum(axis=1) / lengths[usable]).mean())
