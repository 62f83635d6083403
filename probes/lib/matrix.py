"""A matrix of weights in a file, read by rows: a head of 163,840 rows takes 2.3 GB, any chunk of it what was asked for."""

from __future__ import annotations

from .files import Damaged, Unreadable, quoted
from .floats import STORED, widen

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Iterator

    import numpy as np
    from numpy.typing import NDArray

    from .checkpoint import Checkpoint

CHUNK = 32 << 20
"""Bytes that are read at a time where rows are walked through."""
_GAP = 1 << 16
"""Bytes that are rather read and thrown away than skipped with another system call."""

_AHEAD = 4096
"""Small reads that are announced before they are made."""


class Matrix:
    """A two-dimensional tensor of a checkpoint.

    Args:
        checkpoint: it must stay open.
        name: full name of the tensor.
        shape: rows and columns that its numbers are read as, where it has other dimensions.

    Raises:
        Damaged: it has no two dimensions, or other numbers of them.
        Unreadable: its numbers are not plain floats.
    """

    def __init__(self, checkpoint: Checkpoint, name: str, shape: tuple[int, int] | None = None) -> None:
        entry = checkpoint.entry(name)
        seen = entry.shape if shape is None else shape
        if len(seen) != 2 or seen[0] * seen[1] != entry.elements:
            raise Damaged(checkpoint.path, "%s has the shape %s, not rows and columns" % (quoted(name), list(entry.shape)))
        if entry.dtype not in STORED:
            raise Unreadable(
                checkpoint.path,
                "%s is stored as %s: quantised weights mean nothing without their scales" % (quoted(name), quoted(entry.dtype)),
                "give a copy of the model in bfloat16, float16 or float32",
            )
        self.name = name
        self.dtype = entry.dtype
        """``bfloat16``, ``float16``, ``float32`` or ``float64``."""
        self.rows, self.columns = seen
        self.place = checkpoint.place(name)
        """The file that holds it, and where in it the first byte lies."""

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return self.columns * int(STORED[self.dtype][-1])

    @property
    def chunk_rows(self) -> int:
        """Rows that make up a chunk."""
        return max(1, CHUNK // max(1, self.row_bytes))

    def bits(self, start: int, stop: int) -> NDArray[Any]:
        """Return rows ``start`` up to ``stop`` as stored (see :mod:`floats`); raise Damaged or Unreadable."""
        import numpy as np

        if not 0 <= start <= stop <= self.rows:
            raise Damaged(self.place.file.path, "%s has no rows %d to %d" % (quoted(self.name), start, stop))
        data = self.place.file.read(self.place.offset + start * self.row_bytes, (stop - start) * self.row_bytes)
        return np.frombuffer(data, STORED[self.dtype]).reshape(stop - start, self.columns)

    def numbers(self, start: int, stop: int) -> NDArray[Any]:
        """Return rows ``start`` up to ``stop`` as float32 (float64 as it is)."""
        return widen(self.bits(start, stop), self.dtype)

    def chunks(self) -> Iterator[tuple[int, NDArray[Any]]]:
        """Yield (index of the first row, bits of some rows) for all rows in order."""
        for start in range(0, self.rows, self.chunk_rows):
            self._prefetch(min(self.rows, start + self.chunk_rows), min(self.rows, start + 2 * self.chunk_rows))
            yield start, self.bits(start, min(self.rows, start + self.chunk_rows))

    def take_bits(self, rows: NDArray[np.int64]) -> NDArray[Any]:
        """Return ``rows`` in the order asked for, as stored; the caller bounds how many. Read in the order of the file."""
        import numpy as np

        found = np.empty((len(rows), self.columns), STORED[self.dtype])
        order = np.argsort(rows, kind="stable")
        wanted = rows[order]
        if len(wanted) and not (wanted[0] >= 0 and wanted[-1] < self.rows):
            raise Damaged(
                self.place.file.path,
                "%s has %d rows; rows %d to %d are asked for" % (quoted(self.name), self.rows, wanted[0], wanted[-1]),
            )
        runs = list(_runs(wanted, self.row_bytes))
        # On a cold disk a thousand small reads take as long as one, when all are asked for before the first is waited for.
        for index, (begin, end) in enumerate(runs):
            if index % _AHEAD == 0:
                for later, last in runs[index : index + _AHEAD]:
                    self._prefetch(int(wanted[later]), int(wanted[last - 1]) + 1)
            first = int(wanted[begin])
            block = self.bits(first, int(wanted[end - 1]) + 1)
            found[order[begin:end]] = block[wanted[begin:end] - first]
        return found

    def _prefetch(self, start: int, stop: int) -> None:
        self.place.file.expect(self.place.offset + start * self.row_bytes, (stop - start) * self.row_bytes)

    def take(self, rows: NDArray[np.int64]) -> NDArray[Any]:
        """Return ``rows`` in the order asked for as float32 (float64 as it is)."""
        return widen(self.take_bits(rows), self.dtype)


def _runs(wanted: NDArray[np.int64], row_bytes: int) -> Iterator[tuple[int, int]]:
    """Yield (begin, end) of stretches of the ascending ``wanted`` that are worth one read."""
    import numpy as np

    far = (np.diff(wanted) - 1) * row_bytes > _GAP
    limit = max(1, CHUNK // max(1, row_bytes))
    begin = 0
    for end in [*(np.flatnonzero(far) + 1).tolist(), len(wanted)]:
        while begin < end:
            # A stretch longer than a chunk is read in several.
            stop = begin + int(np.searchsorted(wanted[begin:end], wanted[begin] + limit))
            yield begin, stop
            begin = stop
