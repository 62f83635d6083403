"""Numbers as checkpoints store them, and casts between their types: numpy has no bfloat16, so its bits are kept.

What is called *bits* here is an array as it lies in the file: uint16 for bfloat16, numpy's own type for all others.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    import numpy as np
    from numpy.typing import NDArray

STORED = {"bfloat16": "<u2", "float16": "<f2", "float32": "<f4", "float64": "<f8"}
"""Type of weights -> numpy type of their bits. Others (8 and 4 bits) mean nothing without their scales."""


def widen(bits: NDArray[Any], dtype: str) -> NDArray[Any]:
    """Return the numbers that ``bits`` of type ``dtype`` stand for: float32, which holds all short floats exactly.

    float64 stays what it is.
    """
    import numpy as np

    if dtype == "bfloat16":
        return (bits.astype(np.uint32) << 16).view(np.float32)
    return bits if dtype == "float64" else bits.astype(np.float32, copy=False)


def are_finite(bits: NDArray[Any], dtype: str) -> bool:
    """Return whether none of the numbers is a NaN or an infinity."""
    import numpy as np

    if dtype == "bfloat16":
        return not bool(((bits & np.uint16(0x7F80)) == 0x7F80).any())
    return bool(np.isfinite(bits).all())


def narrow(numbers: NDArray[Any], dtype: str) -> NDArray[Any]:
    """Return ``numbers`` cast to ``dtype`` as bits, rounded to nearest even as torch does; NaN stays NaN."""
    import numpy as np

    if dtype == "bfloat16":
        wide = np.ascontiguousarray(numbers, np.float32)
        raw = wide.view(np.uint32)
        rounded: NDArray[np.uint16] = ((raw + (0x7FFF + ((raw >> 16) & 1))) >> 16).astype(np.uint16)
        # Rounding up could turn a NaN into an infinity.
        return np.where(np.isnan(wide), np.uint16(0x7FC0), rounded)
    with np.errstate(over="ignore"):
        return numbers.astype(STORED[dtype], copy=False)


def cast(bits: NDArray[Any], source: str, target: str) -> NDArray[Any]:
    """Return ``bits`` of type ``source`` as bits of type ``target``."""
    return bits if source == target else narrow(widen(bits, source), target)


def same_rows(a: NDArray[Any], b: NDArray[Any]) -> NDArray[np.bool_]:
    """Return for each row of two equally shaped arrays of bits whether all of its bits are the same."""
    same: NDArray[np.bool_] = (_raw(a) == _raw(b)).all(axis=1)
    return same


def _raw(bits: NDArray[Any]) -> NDArray[Any]:
    """Return ``bits`` as unsigned integers, so that -0 differs from 0 and a NaN equals itself."""
    import numpy as np

    return np.ascontiguousarray(bits).view("<u%d" % bits.dtype.itemsize)
