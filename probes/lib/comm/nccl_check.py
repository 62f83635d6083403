"""Holds the numbers of an nccl-tests table against each other: which collective, how many ranks, which rows to believe.

A bus bandwidth was computed by the program from its own number of ranks, so the ratio of both bandwidths tells that
number where the text does not, and contradicts it where the text is wrong or glued together from several runs.
"""

from __future__ import annotations

import bisect
import math
from collections import Counter
from dataclasses import dataclass, replace

from . import bandwidth
from .nccl_log import TYPE_BYTES, Damage, Line, Log, Side, Table

TOLERANCE = 0.01
"""Relative difference of a printed from a recomputed bandwidth, beyond rounding, that still agrees."""
MOST_RANKS = 4096
_WIDEST = 0.05
"""Width of an interval of ratios that still tells anything."""
_MOST_VOTES = 64

OK, WRONG, NOT_CHECKED = "ok", "wrong", "not_checked"
_ONLY_OUT_OF_PLACE = frozenset({"alltoall", "alltoallv", "sendrecv"})
"""Programs that check nothing in place: the input that they would compare with is overwritten."""
_ALIGNED = 16
"""Bytes; times the number of ranks, what a size is at most rounded down by."""
_EVEN_FROM = 64 << 10
"""Bytes from which on rounding down changes no step between sizes."""
_FEW = 64
"""Ranks, where their number is not known."""


@dataclass(frozen=True)
class Reading:
    """One table, understood."""

    table: Table
    collective: str | None
    """A key of `bandwidth.FACTORS`; None where neither names nor numbers tell."""
    collective_from: str
    """What told it."""
    ranks: int | None
    ranks_from: str
    lines: tuple[Line, ...]
    """Rows whose numbers agree with each other."""
    damaged: tuple[Damage, ...]
    complete: bool
    correctness: str
    """ok, wrong or not_checked."""
    disagreement: str | None
    """In words, when the printed bus bandwidths do not follow from the number of ranks."""
    hosts: int | None
    """Hosts among the devices; None without a list of devices."""

    def wrong(self, side: Side) -> int | None:
        """Return how many elements of a placement are wrong; None where nobody looked, or that is not known."""
        return side.wrong if side.wrong or says_that_it_checked(self.table) else None

    def busbw_gbs(self, line: Line, side: Side) -> float:
        """Return the bus bandwidth: recomputed where the ranks are known, as printed otherwise."""
        if self.ranks is None or self.collective is None:
            return side.busbw_gbs.value
        return bandwidth.busbw_gbs(self.collective, self.ranks, line.size_bytes, side.time_us.value)


def understand(log: Log, table: Table, collective: str | None = None) -> Reading:
    """Read what a table means.

    Args:
        log: What the table is from.
        table: One of its tables.
        collective: What the user says that it is, a key of `bandwidth.FACTORS`.
    """
    ratio = _ratio(table)
    named, named_from = _named(log, table, collective)
    if named is None:
        named, named_from = _by_shape(table, ratio), "the columns and bandwidths of its rows"
    rule = bandwidth.FACTORS[named] if named is not None else _rule(ratio)
    stated, stated_from = _stated(log, table)
    votes = _votes(table)
    ranks, ranks_from = stated, stated_from
    if stated is None and rule is not None:
        ranks, ranks_from = _voted(rule, votes), "the ratio of its bandwidths"
    disagreement = None
    if ranks is not None and rule is not None and votes and not _agrees(rule, ranks, votes):
        voted = _voted(rule, votes)
        told = "" if voted is None else f"; they were computed for {voted}"
        disagreement = f"its bus bandwidths do not follow from {ranks} ranks ({ranks_from}){told}"
    elif stated is not None and _lacks_devices(log, table):
        # Lines of the list are lost, and it takes bandwidths that tell numbers of ranks apart to believe it all the same.
        ranks = ranks if votes and rule not in {None, bandwidth.ONE} else None
    lines, damaged = _believable(table, rule, None if disagreement else ranks, lost=named != "alltoall" and _blank_reductions(table))
    complete = table.ended and bool(lines) and _all_sizes(table, len(damaged), ranks or _FEW)
    return Reading(
        table, named, named_from if named is not None else "", ranks, ranks_from if ranks is not None else "", lines, damaged,
        complete, _correctness(table, named, lines, damaged, complete), disagreement,
        len({device.host for device in table.devices}) or None,
    )  # fmt: skip


# Which collective ----------------------------------------------------------------------------------------------------


def _named(log: Log, table: Table, given: str | None) -> tuple[str | None, str]:
    for name, source in (
        (given, "what was asked for"),
        (table.program, "its name in the file"),
        (log.command, "the command in the file"),
    ):
        found = bandwidth.canonical(name) if name else None
        if found is not None:
            return found, source
    return None, ""


def _by_shape(table: Table, ratio: float | None) -> str | None:
    """Tell a collective by what its rows have: a reduction, a root, a ratio of bandwidths."""
    if not table.lines or ratio is None or ratio == 0:
        return None
    reduces = any(line.redop for line in table.lines)
    rooted = any(line.root is not None for line in table.lines)
    one = abs(ratio - 1) < TOLERANCE
    if reduces:
        if ratio > 1 + TOLERANCE or (one and not rooted):
            return "all_reduce"
        return "reduce" if one else "reduce_scatter"
    if rooted:
        # Gather and scatter have a root, too.
        return "broadcast" if one else None
    if _blank_reductions(table):
        return "alltoall" if ratio < 1 - TOLERANCE else None
    if one:
        return "sendrecv"
    if table.old_errors:
        return "all_gather"
    sides = [side for line in table.lines for side in line.sides]
    in_place = [side.wrong for side in sides if side.in_place]
    out_of_place = [side.wrong for side in sides if not side.in_place]
    only_out = bool(in_place) and all(wrong is None for wrong in in_place) and all(wrong is not None for wrong in out_of_place)
    return "alltoall" if only_out else None


def _ratio(table: Table) -> float | None:
    """Return the median of bus over algorithm bandwidth among the rows that have digits enough."""
    ratios = sorted(
        side.busbw_gbs.value / side.algbw_gbs.value
        for line in table.lines
        for side in line.sides
        if side.algbw_gbs.value > 100 * side.algbw_gbs.slack
    )
    return ratios[len(ratios) // 2] if ratios else None


def _rule(ratio: float | None) -> str | None:
    if ratio is None:
        return None
    if abs(ratio - 1) < TOLERANCE:
        return bandwidth.ONE
    return bandwidth.TWICE_ALL_BUT_ONE if ratio > 1 else bandwidth.ALL_BUT_ONE


# How many ranks ------------------------------------------------------------------------------------------------------


def _stated(log: Log, table: Table) -> tuple[int | None, str]:
    devices, config = table.devices, table.config
    groups: dict[int, int] = {}
    for device in devices:
        groups[device.group] = groups.get(device.group, 0) + 1
    listed = max(groups.values(), default=0)
    if log.form == "json" and listed <= 1 and config.threads and config.gpus:
        # Built without MPI, it lists the first device only.
        return config.threads * config.gpus, "threads x GPUs of its only process"
    if not devices or sorted(device.rank for device in devices) != list(range(len(devices))):
        return None, ""
    return listed, "its list of devices"


def _lacks_devices(log: Log, table: Table) -> bool:
    """Whether the list of devices is not that of whole processes, or of groups that differ."""
    each = (table.config.threads or 0) * (table.config.gpus or 0)
    groups = Counter(device.group for device in table.devices)
    if len(set(groups.values())) > 1:
        return True
    return each > 0 and len(table.devices) % each != 0 and not (log.form == "json" and len(table.devices) == 1)


def _votes(table: Table) -> list[tuple[float, float]]:
    """Return intervals in which the ratio of both bandwidths lies, the narrowest first."""
    found = []
    for line in table.lines:
        for side in line.sides:
            algbw, busbw = side.algbw_gbs, side.busbw_gbs
            if algbw.value > algbw.slack:
                low = max(0.0, busbw.value - busbw.slack) / (algbw.value + algbw.slack)
                high = (busbw.value + busbw.slack) / (algbw.value - algbw.slack)
                if high - low < _WIDEST:
                    found.append((low - 1e-6, high + 1e-6))
    return sorted(found, key=lambda vote: vote[1] - vote[0])[:_MOST_VOTES]


def _factor(rule: str, ranks: int) -> float:
    return bandwidth.factor(next(name for name, of in bandwidth.FACTORS.items() if of == rule), ranks)


def _voted(rule: str, votes: list[tuple[float, float]]) -> int | None:
    """Return the only number of ranks that most rows allow."""
    if not votes or rule == bandwidth.ONE:
        return None
    share = 2 if rule == bandwidth.TWICE_ALL_BUT_ONE else 1
    changes: Counter[int] = Counter()
    for low, high in votes:
        # (n-1)/n lies between both exactly for these n.
        changes[math.ceil(_ranks_of(low / share) - 1e-9)] += 1
        changes[math.floor(_ranks_of(high / share) + 1e-9) + 1] -= 1
    count, counts = 0, []
    for ranks in range(MOST_RANKS + 1):
        count += changes[ranks]
        counts.append(count)
    most = max(counts)
    return counts.index(most) if counts.count(most) == 1 and most > len(votes) / 2 else None


def _ranks_of(part: float) -> float:
    """Return n of (n-1)/n."""
    return 1 / (1 - part) if part < 1 else MOST_RANKS + 1.0


def _agrees(rule: str, ranks: int, votes: list[tuple[float, float]]) -> bool:
    expected = _factor(rule, ranks)
    margin = TOLERANCE * expected
    return sum(low - margin <= expected <= high + margin for low, high in votes) > len(votes) / 2


# Which rows ----------------------------------------------------------------------------------------------------------


def _blank_reductions(table: Table) -> bool:
    """Whether a reduction is announced and none is printed, as the all-to-all of 2021 does."""
    return "redop" in table.columns and "root" not in table.columns and not any(line.redop for line in table.lines)


def _believable(
    table: Table, rule: str | None, ranks: int | None, *, lost: bool
) -> tuple[tuple[Line, ...], tuple[Damage, ...]]:
    kept, damaged = [], list(table.damaged)
    factor = None if rule is None or ranks is None else _factor(rule, ranks)
    for line in table.lines:
        why = "its reduction is missing" if lost else _contradiction(line, factor, ranks)
        if why is None:
            kept.append(line)
        else:
            damaged.append(Damage(line.number, "%d bytes" % line.size_bytes, why))
    return tuple(kept), tuple(sorted(damaged, key=lambda damage: damage.number))


def _contradiction(line: Line, factor: float | None, ranks: int | None) -> str | None:
    if line.count is not None and line.dtype is not None and line.size_bytes:
        # A count is of the whole, or of one rank's part.
        part = line.count * TYPE_BYTES[line.dtype]
        if part == 0 or line.size_bytes % part or (ranks is not None and line.size_bytes // part not in {1, ranks}):
            return "its size is not that of its elements"
    for side in line.sides:
        time, algbw, busbw = side.time_us, side.algbw_gbs, side.busbw_gbs
        slowest = line.size_bytes / (time.value + time.slack) / 1000
        fastest = line.size_bytes / max(time.value - time.slack, 1e-9) / 1000
        if not slowest * (1 - TOLERANCE) - algbw.slack <= algbw.value <= fastest * (1 + TOLERANCE) + algbw.slack:
            return "its bandwidth is not its size over its time"
        if factor is not None:
            low, high = (algbw.value - algbw.slack) * factor, (algbw.value + algbw.slack) * factor
            if not low * (1 - TOLERANCE) - busbw.slack <= busbw.value <= high * (1 + TOLERANCE) + busbw.slack:
                return "its two bandwidths do not fit together"
        if side.spread is not None and side.spread.min_us > time.value * (1 + TOLERANCE) + time.slack:
            return "its mean is below its shortest call"
    return None


def _all_sizes(table: Table, damaged: int, ranks: int) -> bool:
    """Whether there is a row for each size that was asked for; a row that is there twice stands for no other one."""
    asked = table.config.sizes()
    if asked is None:
        return table.left_out or _even(sorted({line.size_bytes for line in table.lines if line.size_bytes >= _EVEN_FROM}))
    kinds = len({(line.dtype, line.redop, line.root) for line in table.lines}) or 1
    if len(table.lines) + damaged < asked * kinds:
        return False
    there = sorted({line.size_bytes for line in table.lines})
    missing = 0
    for size in table.config.each_size():
        place = bisect.bisect_right(there, size)
        missing += place == 0 or size - there[place - 1] >= _ALIGNED * ranks
    return missing <= damaged


def _even(sizes: list[int]) -> bool:
    """Whether sizes are each the same factor, or the same number of bytes, above the one before."""
    pairs = list(zip(sizes, sizes[1:]))
    if len(pairs) < 2:
        return True
    (low, high), steps = pairs[0], [after - before for before, after in pairs]
    by_factor = all(abs(after / before / (high / low) - 1) < TOLERANCE for before, after in pairs)
    return by_factor or max(steps) - min(steps) <= TOLERANCE * min(steps)


# Whether contents were right -----------------------------------------------------------------------------------------


def says_that_it_checked(table: Table) -> bool:
    """Whether a count of no wrong elements says that elements were compared.

    Since 2022-09 and before 2022-08 nccl-tests prints N/A where it did not look, in between it printed 0: without the
    line of parameters only what came later tells a program apart from those.
    """
    config = table.config
    if config.validation is not None:
        return config.validation > 0
    if config.validation_unreadable:
        return False
    # Names of programs since 2025-06, whole bus ids since 2025-02, its own version since 2025-10; `error` until 2022-08.
    newer = table.tests_version is not None or table.announced or any(device.bus_id for device in table.devices)
    return newer or table.old_errors or table.json


def _correctness(
    table: Table, collective: str | None, lines: tuple[Line, ...], damaged: tuple[Damage, ...], complete: bool
) -> str:
    sides = [side for line in table.lines for side in line.sides]
    if any(side.wrong for side in sides) or table.out_of_bounds or table.out_of_bounds_ok is False:
        return WRONG
    if not lines or damaged or not complete or not says_that_it_checked(table):
        return NOT_CHECKED
    if table.out_of_bounds != 0 or table.out_of_bounds_ok is not True:
        return NOT_CHECKED
    return OK if all(_checked(side, collective, old=table.old_errors) for side in sides) else NOT_CHECKED


def _checked(side: Side, collective: str | None, *, old: bool) -> bool:
    if side.in_place and collective in _ONLY_OUT_OF_PLACE:
        return True
    # Deviations above zero are judged by the count below the table only.
    return (side.max_error if old else side.wrong) is not None


def told_by(reading: Reading, source: str) -> Reading:
    """Return the same reading with another answer to what told its collective."""
    return replace(reading, collective_from=source)
