"""Rows for tokens that a drafter's head has none for: from the verifier's head, the mean row, or random numbers.

A head that was trained from random numbers lives in a space of its own: the verifier's rows mean little to it and are of
another length. How much they mean is measured on the tokens that both have.
"""

from __future__ import annotations

from dataclasses import dataclass

from .files import Damaged, Unreadable, quoted
from .floats import STORED, narrow, widen

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    import numpy as np
    from numpy.typing import NDArray

    from .mappings import Ids
    from .matrix import Matrix

POLICIES = ("verifier", "verifier-scaled", "mean", "random")
_SAMPLE = 500
"""Rows that lengths and directions are taken from."""
_LARGEST = {"bfloat16": 3.38e38, "float16": 65_500.0, "float32": 3.4e38, "float64": 1.7e308}
"""What surely does not become infinite when it is rounded to that type."""


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

        bits = _read_rows(self._theirs, ids)
        numbers = widen(bits, self._theirs.dtype)
        if self.scale is not None:
            numbers = numbers * np.float32(self.scale)
        # A NaN is the largest of all, and not smaller than anything.
        if not np.abs(numbers).max(initial=0.0) <= _LARGEST[self.dtype]:
            told = "%s holds infinities, NaN, or more than %s can" % (quoted(self._theirs.name), self.dtype)
            raise Damaged(self._theirs.place.file.path, told)
        same = self.scale is None and self._theirs.dtype == self.dtype
        return bits if same else narrow(numbers, self.dtype)


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


def _read_rows(head: Matrix, rows: Ids) -> NDArray[Any]:
    """Return some rows that lie far apart, as stored; raise Damaged or Unreadable."""
    import numpy as np

    file, begin, size = head.place.file, head.place.offset, head.row_bytes
    found = np.empty((len(rows), head.columns), STORED[head.dtype])
    beyond = rows[(rows < 0) | (rows >= head.rows)]
    if len(beyond):
        raise Damaged(file.path, "%s has %d rows, none for token %d" % (quoted(head.name), head.rows, beyond[0]))
    places = [begin + row * size for row in rows.tolist()]
    for place in places:
        file.expect(place, size)
    into = found.data.cast("B") if found.size else memoryview(b"")
    for number, place in enumerate(places):
        file.read_into(place, into[number * size : (number + 1) * size])
    return found


def _median_length(numbers: NDArray[np.float32]) -> float:
    import numpy as np

    return float(np.median(np.sqrt(_products(numbers, numbers)))) if len(numbers) else 0.0


def _mean_cosine(a: NDArray[np.float32], b: NDArray[np.float32]) -> float | None:
    import numpy as np

    with np.errstate(over="ignore", invalid="ignore"):
        lengths = np.sqrt(_products(a, a)) * np.sqrt(_products(b, b))
        usable = np.isfinite(lengths) & (lengths > 0)
        return float((_products(a, b)[usable] / lengths[usable]).mean()) if usable.any() else None


def _products(a: NDArray[np.float32], b: NDArray[np.float32]) -> NDArray[Any]:
    """Return the scalar product of each row of ``a`` with that of ``b``."""
    import numpy as np

    found: NDArray[Any] = np.einsum("ij,ij->i", a, b)
    return found
