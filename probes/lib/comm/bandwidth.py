"""What a collective's time says about bandwidth: algorithm bandwidth and bus bandwidth.

The conventions are those of NVIDIA's nccl-tests (its PERFORMANCE.md): `size` is
the larger of what one rank sends and what it receives, in bytes; a GB is 1e9
bytes; the algorithm bandwidth is `size / time`; the bus bandwidth multiplies it
by a factor of the collective and the number of ranks, so that it can be held
against the speed of one link whatever the number of ranks.

With one rank nothing crosses a link: the bus bandwidth is 0 by definition.
"""

from __future__ import annotations

import math

ALL_BUT_ONE = "(n-1)/n"
TWICE_ALL_BUT_ONE = "2(n-1)/n"
ONE = "1"

FACTORS: dict[str, str] = {
    "all_reduce": TWICE_ALL_BUT_ONE,
    "all_gather": ALL_BUT_ONE,
    "reduce_scatter": ALL_BUT_ONE,
    "alltoall": ALL_BUT_ONE,
    "alltoallv": ALL_BUT_ONE,
    "gather": ALL_BUT_ONE,
    "scatter": ALL_BUT_ONE,
    "broadcast": ONE,
    "reduce": ONE,
    "sendrecv": ONE,
    "hypercube": ONE,
}
"""Each collective that is known, and the rule of its bus bandwidth (n = ranks)."""

_SPELLINGS = {name.replace("_", ""): name for name in FACTORS}
_ENDINGS = ("_perf_mpi", "_perf")


def canonical(name: str) -> str | None:
    """Return the collective that a name means, or None for a name that means none.

    Args:
        name: As programs spell it: `all_reduce`, `AllReduce`, `all_reduce_perf`,
            `/opt/build/alltoall_perf_mpi`, `sendrecv`...

    Returns:
        A key of `FACTORS`.
    """
    short = name.strip().rsplit("/", 1)[-1].lower()
    for ending in _ENDINGS:
        if short.endswith(ending):
            short = short[: -len(ending)]
            break
    return _SPELLINGS.get(short.replace("_", "").replace("-", "").replace(" ", ""))


def factor(collective: str, ranks: int) -> float:
    """Bus bandwidth over algorithm bandwidth.

    Args:
        collective: A key of `FACTORS`.
        ranks: Ranks over all processes, 1 or more.

    Raises:
        ValueError: The collective is not known, or there is no rank.
    """
    if ranks < 1:
        raise ValueError(f"a collective of {ranks} ranks")
    rule = FACTORS.get(collective)
    if rule is None:
        raise ValueError(f"no collective is called {collective!r}")
    if ranks == 1:
        return 0.0
    if rule == ONE:
        return 1.0
    part = (ranks - 1) / ranks
    return 2 * part if rule == TWICE_ALL_BUT_ONE else part


def algbw_gbs(size_bytes: int, time_us: float) -> float:
    """Algorithm bandwidth in GB/s (1e9 bytes a second).

    Args:
        size_bytes: The larger of what one rank sends and receives.
        time_us: Time of one call, microseconds, above 0.

    Raises:
        ValueError: The time is not a positive number, or the size is negative.
    """
    if not math.isfinite(time_us) or time_us <= 0:
        raise ValueError(f"a call that took {time_us} us")
    if size_bytes < 0:
        raise ValueError(f"a message of {size_bytes} bytes")
    return size_bytes / time_us / 1000


def busbw_gbs(collective: str, ranks: int, size_bytes: int, time_us: float) -> float:
    """Bus bandwidth in GB/s (1e9 bytes a second).

    Args:
        collective: A key of `FACTORS`.
        ranks: Ranks over all processes.
        size_bytes: The larger of what one rank sends and receives.
        time_us: Time of one call, microseconds, above 0.

    Raises:
        ValueError: As `factor` and `algbw_gbs`.
    """
    return algbw_gbs(size_bytes, time_us) * factor(collective, ranks)
