"""Which sizes are measured, with how many calls, and how long that may take."""

from __future__ import annotations

import re

_SIZE = re.compile(r"(\d+)([KMG]?)", re.ASCII)
_FACTOR = re.compile(r"\d{1,20}", re.ASCII)
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
FACTOR = 4
"""Between one size and the next."""
MOST_SIZES = 128
MOST_BYTES = 1 << 50
LATENCY_UP_TO = 1 << 20
"""Bytes: up to here latency tells, above it bandwidth does."""
ELEMENT = {"bf16": 2, "fp16": 2, "fp32": 4, "fp64": 8, "int32": 4, "int64": 8, "uint8": 1}
"""Bytes of an element."""
REDOPS = {"all_reduce": "sum", "reduce": "sum", "reduce_scatter": "sum"}
ROOTS = {"broadcast": 0, "reduce": 0}
SPLIT = frozenset({"all_gather", "reduce_scatter", "alltoall"})
"""Collectives whose size is divided among the ranks."""
IN_PLACE = frozenset({"all_reduce", "broadcast", "reduce"})
"""Collectives that are called with one buffer."""


def parse_size(text: str) -> int:
    """Return the bytes of ``32K``; suffixes are powers of 1024, as in nccl-tests.

    Raises:
        ValueError: it is no size, or none above 0.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None or int(match[1]) == 0:
        raise ValueError("%r is no size: write bytes, or a number with K, M or G" % text)
    size = int(match[1]) * _UNITS[match[2]]
    if size > MOST_BYTES:
        raise ValueError("%.40s is more than any GPU holds" % text)
    return size


def parse_sizes(text: str) -> list[int]:
    """Return the sizes of ``8:4G``, ``8:4G:2`` or ``32K,1M``, in bytes.

    Raises:
        ValueError: it is none of those, or more than 128 sizes.
    """
    if ":" not in text:
        sizes = [parse_size(part) for part in text.split(",")]
    else:
        first, last, *rest = text.split(":")
        size, end = parse_size(first), parse_size(last)
        told = rest[0].strip() if rest else str(FACTOR)
        factor = int(told) if _FACTOR.fullmatch(told) else 0
        if factor < 2 or len(rest) > 1:
            raise ValueError("the factor of %r must be 2 or more" % text)
        if end < size:
            raise ValueError("%r ends below its beginning" % text)
        sizes = []
        while size <= end and len(sizes) <= MOST_SIZES:
            sizes.append(size)
            size *= factor
        if sizes[-1] != end and len(sizes) <= MOST_SIZES:
            # The largest size is the one that matters.
            sizes.append(end)
    if len(sizes) > MOST_SIZES:
        raise ValueError("%r gives more than %d sizes" % (text, MOST_SIZES))
    return sizes


def possible(sizes: list[int], collective: str, ranks: int, element: int) -> list[int]:
    """Return the sizes as they can be made: whole elements, for some collectives a whole number of them each rank."""
    step = element * (ranks if collective in SPLIT else 1)
    made = []
    for size in sizes:
        whole = max(step, size // step * step)
        if whole not in made:
            made.append(whole)
    return made


def latency_calls(size: int, estimate_us: float, given: int | None, *, cuda: bool, seconds: float = 5.0) -> int:
    """Return for how many single calls latency is taken: many where it tells, never for longer than ``seconds``."""
    wanted = given or (200 if cuda else 50)
    if size > LATENCY_UP_TO and given is None:
        wanted = 20 if cuda else 5
    return max(5, min(wanted, int(seconds * 1e6 / max(estimate_us, 1.0))))


def burst_calls(estimate_us: float, *, cuda: bool, seconds: float | None = None) -> int:
    """Return how many calls a burst has: a few tenths of a second of them, or ``seconds``."""
    wanted = seconds if seconds is not None else 0.4 if cuda else 0.2
    most = 100_000 if seconds is not None else 200 if cuda else 50
    return max(3, min(most, int(wanted * 1e6 / max(estimate_us, 1.0))))


def nearest_rank(ordered: list[float], share: float) -> float:
    """Return the smallest of ascending values that ``share`` of them do not exceed."""
    place = -(-len(ordered) * round(share * 1000) // 1000)
    return ordered[max(0, place - 1)]


def latency(by_rank: dict[int, list[float]]) -> dict[str, object]:
    """Return the fields of a Latency: a call takes as long as its slowest rank.

    Args:
        by_rank: rank -> microseconds of each call; all of the same length, at least one call.
    """
    ranks = sorted(by_rank)
    slowest = []
    last: dict[int, int] = {}
    for call in zip(*(by_rank[rank] for rank in ranks)):
        most = max(call)
        slowest.append(most)
        rank = ranks[call.index(most)]
        last[rank] = last.get(rank, 0) + 1
    worst = max(last, key=lambda rank: last[rank])
    ordered = sorted(slowest)
    several = len(ranks) > 1
    return {
        "iterations": len(ordered),
        "min_us": ordered[0],
        "p50_us": nearest_rank(ordered, 0.5),
        "p99_us": nearest_rank(ordered, 0.99),
        "max_us": ordered[-1],
        "slowest_rank": worst if several else None,
        "slowest_share": last[worst] / len(ordered) if several else None,
    }


def spread(values: list[float]) -> float | None:
    """Return (longest - shortest) / median in per cent; None for a single value."""
    if len(values) < 2:
        return None
    return 100 * (max(values) - min(values)) / median(values)


def median(values: list[float]) -> float:
    """Return the middle value, the mean of the middle two."""
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2
