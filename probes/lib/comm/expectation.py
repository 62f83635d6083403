"""What bus bandwidth to expect of a collective, and what a measured one says then.

A figure is only held against a run of the same GPU, number of GPUs, collective and a comparable size. Where layouts of a
box differ (PCIe switches, sockets), the least of the good ones is expected, and the best is named. Without a published
figure the physics of the link serves: a ring reaches about 80 % of what a link carries in one direction. Where GPUs are
joined by PCIe that tells only what is possible - whether they may reach each other directly is not known - so what falls
short of it is `unknown`, and no fault.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from . import reference
from .reference import Reference

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Iterable, Sequence

    from ..gpu.thresholds import Threshold, Thresholds

LARGE_BYTES = {"nvlink": 256 << 20, "nvlink-bridge": 256 << 20, "pcie": 64 << 20}
"""From which size on bandwidth, and no longer latency, decides."""
SATURATED_BYTES = {"nvlink": 1 << 30, "nvlink-bridge": 1 << 30, "pcie": 32 << 20}
"""From which size on a published figure also holds for larger ones."""
MIDDLE_BYTES = 16 << 20
"""Below it, tools differ too much in what a call costs for a figure of one to be held against another."""
_RINGS = frozenset({"all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce", "sendrecv"})
_USUAL_LANES = 16


@dataclass(frozen=True)
class Conditions:
    """What a run was made on."""

    gpu_name: str | None
    """As the driver tells it; None where not known, or where GPUs differ."""
    ranks: int | None
    nodes: int | None
    """Hosts; None where not known."""
    collective: str | None
    nvls: bool | None = None
    """False when NVLS was switched off, or another algorithm forced."""
    pcie_gen: int | None = None
    """Of the narrowest link, under load or as far as it can go."""
    pcie_width: int | None = None


@dataclass(frozen=True)
class Expected:
    """A figure to hold a peak against."""

    busbw_gbs: float
    size_bytes: int
    kind: str
    """published, floor (what an operator calls the least), yours or physics."""
    source: str
    conditions: str
    best_gbs: float | None = None
    """What the best layout of the same GPUs reaches, where that is more."""
    firm: bool = True
    """Whether falling short of it is a fault."""


@dataclass(frozen=True)
class Verdict:
    """What a peak says."""

    level: str
    """ok, degraded, fail or unknown."""
    ratio: float
    text: str
    hint: str | None
    bound: Threshold
    """The one that decided, a share of :attr:`of_gbs`: what it fell short of or went beyond, or for ``ok`` what it had to reach."""
    of_gbs: float
    """The expected figure, or that of the best layout."""


def link_of(conditions: Conditions) -> str | None:
    """Return how the GPUs are joined; None for a GPU that is not known."""
    found = None if conditions.gpu_name is None else reference.family_of(conditions.gpu_name)
    return None if found is None else found.link


def peak(points: Iterable[tuple[int, float]], link: str | None) -> tuple[int, float] | None:
    """Return the best of (size in bytes, busbw in GB/s) among sizes large enough to tell; None without one.

    Where no size is large, the best of middling ones is returned: whether a figure for it is known decides then.
    """
    known = [point for point in points if point[1] > 0]
    large = LARGE_BYTES["nvlink" if link is None else link]
    for least in (large, MIDDLE_BYTES):
        found = [point for point in known if point[0] >= least]
        if found:
            return max(found, key=lambda point: point[1])
    return None


def expect(
    conditions: Conditions, size_bytes: int, thresholds: Thresholds, own: Sequence[Reference] = ()
) -> Expected | None:
    """Return what to expect at a size, from the user's figures, published ones, or the link; None when nothing fits."""
    if conditions.gpu_name is None or not conditions.ranks or conditions.ranks < 2 or conditions.collective is None:
        return None
    for table in (own, reference.shipped()):
        fitting = [row for row in table if _fits(row, conditions)]
        for kinds in (("measured", "peak", "mean"), ("floor",)):
            found = _published([row for row in fitting if row.kind in kinds], size_bytes)
            if found is not None:
                return found
    return _physics(conditions, size_bytes, thresholds)


def judge(measured_gbs: float, expected: Expected, conditions: Conditions, thresholds: Thresholds) -> Verdict:
    """Say what a peak means."""
    ratio = measured_gbs / expected.busbw_gbs
    ok, note, degraded = (thresholds["nccl." + name] for name in ("ok_ratio", "note_ratio", "degraded_ratio"))
    against = f"{measured_gbs:.4g} GB/s = {ratio:.2f} of {expected.busbw_gbs:.4g} ({expected.kind}: {expected.conditions})"
    above = thresholds["nccl.above_ratio"]
    best = expected.best_gbs or expected.busbw_gbs
    if expected.kind in ("published", "physics") and measured_gbs > above.value * best:
        hint = "make sure which GPUs these are and how they are joined; a figure of your own: --reference FILE"
        return Verdict("unknown", ratio, against + ": more than these GPUs are known to reach", hint, above, best)
    if ratio >= note.value:
        low = "" if ratio >= ok.value else f"; somewhat low: below {ok.value:g} ({ok.name}, {ok.provenance})"
        more = "" if expected.best_gbs is None else f"; the best layout of these GPUs reaches {expected.best_gbs:.4g}"
        return Verdict("ok", ratio, against + low + more, None, note, expected.busbw_gbs)
    level, bound = ("degraded", note) if ratio >= degraded.value else ("fail", degraded)
    suspect = _suspect(measured_gbs, expected, conditions, thresholds)
    if not expected.firm:
        level, bound = "unknown", note
    return Verdict(level, ratio, against, suspect, bound, expected.busbw_gbs)


def curve(conditions: Conditions, own: Sequence[Reference] = ()) -> tuple[Reference, ...]:
    """Return the published course over sizes that fits best, ascending; empty when there is none."""
    best: list[Reference] = []
    for table in (own, reference.shipped()):
        courses: dict[tuple[str, ...], list[Reference]] = {}
        for row in table:
            if row.kind == "measured" and row.size_bytes is not None and _fits(row, conditions):
                course = courses.setdefault((row.layout, row.settings, row.algorithm), [])
                if all(row.size_bytes != other.size_bytes for other in course):
                    course.append(row)
        for course in courses.values():
            if len(course) > len(best):
                best = course
        if best:
            break
    return tuple(sorted(best, key=lambda row: row.size_bytes or 0))


def latency(
    conditions: Conditions, points: Iterable[tuple[int, float]], thresholds: Thresholds
) -> tuple[str, int, float, str] | None:
    """Judge the time of a small all-reduce over PCIe Gen5, the size nearest 32 KiB from 16 to 64 KiB.

    Args:
        conditions: What the run was made on.
        points: (size in bytes, time of one call in us).
        thresholds: Bounds of the bands.

    Returns:
        (level, size, time, in words), or None where no band holds.
    """
    found = None if conditions.gpu_name is None else reference.family_of(conditions.gpu_name)
    generation = conditions.pcie_gen or (None if found is None else found.pcie_gen)
    few = conditions.ranks is not None and 4 <= conditions.ranks <= 8 and conditions.nodes == 1
    if found is None or found.link != "pcie" or generation != 5 or not few or conditions.collective != "all_reduce":
        return None
    near = [point for point in points if 16 << 10 <= point[0] <= 64 << 10]
    if not near:
        return None
    size, time = min(near, key=lambda point: abs(math.log2(point[0] / (32 << 10))))
    good, bad = thresholds["nccl.latency_32k_good_us"], thresholds["nccl.latency_32k_bad_us"]
    if time <= good.value:
        return "ok", size, time, f"{time:.3g} us at {size} bytes; up to {good.value:g} us is good"
    if time <= bad.value:
        return "unknown", size, time, f"{time:.3g} us at {size} bytes is more than the {good.value:g} us of a good box"
    return "degraded", size, time, f"{time:.3g} us at {size} bytes, above {bad.value:g} us: the wrong protocol, or the wrong path"


# Published figures ---------------------------------------------------------------------------------------------------


def _fits(row: Reference, conditions: Conditions) -> bool:
    name = (conditions.gpu_name or "").strip()
    same = row.gpu == (reference.family(name) or name) and row.gpus == conditions.ranks
    without_nvls = row.settings == "NCCL_NVLS_ENABLE=0"
    right = row.algorithm != "nvls" if conditions.nvls is False else not without_nvls
    return same and right and row.collective == conditions.collective and conditions.nodes in {None, row.nodes}


def _published(rows: Sequence[Reference], size: int) -> Expected | None:
    layouts: dict[str, list[tuple[float, Reference]]] = {}
    courses: dict[tuple[str, ...], list[Reference]] = {}
    for row in rows:
        courses.setdefault((row.layout, row.settings, row.algorithm, row.source, row.kind), []).append(row)
    for course in courses.values():
        found = _at(course, size)
        if found is not None:
            layouts.setdefault(course[0].layout, []).append(found)
    if not layouts:
        return None
    best_of_each = [max(found, key=lambda value: value[0]) for found in layouts.values()]
    (least, row), (most, _) = min(best_of_each, key=lambda v: v[0]), max(best_of_each, key=lambda v: v[0])
    kind = reference.YOURS if row.own else ("floor" if row.kind == "floor" else "published")
    return Expected(least, size, kind, row.source, row.conditions, most if most > least * 1.01 else None)


def _at(course: Sequence[Reference], size: int) -> tuple[float, Reference] | None:
    """Return the figure of a course at a size, between two sizes in proportion; None outside of what it tells."""
    link = course[0].link
    sized = sorted((row for row in course if row.size_bytes), key=lambda row: row.size_bytes or 0)
    if not sized:
        return (course[0].busbw_gbs, course[0]) if size >= LARGE_BYTES[link] else None
    first, last = sized[0], sized[-1]
    low, high = first.size_bytes or 0, last.size_bytes or 0
    if size >= high:
        return (last.busbw_gbs, last) if size <= 2 * high or high >= SATURATED_BYTES[link] else None
    if size < low:
        return (first.busbw_gbs, first) if 2 * size >= low and size >= SATURATED_BYTES[link] else None
    for one, other in zip(sized, sized[1:]):
        left, right = one.size_bytes or 1, other.size_bytes or 1
        if left <= size < right:
            share = math.log(size / left) / math.log(right / left)
            return one.busbw_gbs * (other.busbw_gbs / one.busbw_gbs) ** share, one
    return None


# Physics -------------------------------------------------------------------------------------------------------------


def _physics(conditions: Conditions, size: int, thresholds: Thresholds) -> Expected | None:
    found = reference.family_of(conditions.gpu_name or "")
    if found is None or conditions.collective not in _RINGS or conditions.nodes != 1 or size < LARGE_BYTES[found.link]:
        return None
    share = thresholds["nccl.link_share"]
    if found.link == "nvlink" and found.link_gbs is not None:
        link, told = found.link_gbs, f"NVLink of {found.name}, {found.link_gbs:g} GB/s in one direction"
    elif found.link == "pcie":
        generation, width = conditions.pcie_gen or found.pcie_gen or 0, conditions.pcie_width or _USUAL_LANES
        if generation not in reference.PCIE_LANE_GBS:
            return None
        link = reference.PCIE_LANE_GBS[generation] * width
        told = f"PCIe Gen{generation} x{width} of {found.name}, {link:.3g} GB/s in one direction"
    else:
        return None
    return Expected(
        share.value * link, size, "physics", share.provenance, f"{share.value:g} of {told}; a ring over {conditions.ranks} GPUs",
        firm=found.link == "nvlink",
    )  # fmt: skip


# Suspects ------------------------------------------------------------------------------------------------------------


def _suspect(measured: float, expected: Expected, conditions: Conditions, thresholds: Thresholds) -> str | None:
    """Name what is known to bring about such a figure."""
    without = Conditions(conditions.gpu_name, conditions.ranks, conditions.nodes, conditions.collective, nvls=False)
    link = link_of(conditions)
    if link == "nvlink":
        ring = expect(without, expected.size_bytes, thresholds)
        if conditions.nvls is not False and ring is not None and 0.95 <= measured / ring.busbw_gbs <= 1.05:
            return f"that is what a ring without NVLS gives ({ring.source}): look for NCCL_NVLS_ENABLE=0 and for the fabric manager"
        return "look at the NVLinks of every GPU (rdiag gpu), and at NCCL_ variables and nccl.conf (rdiag env)"
    untuned = [
        row for row in reference.shipped() if row.kind == "untuned" and _fits(row, conditions) and (row.size_bytes or 0) >= MIDDLE_BYTES
    ]
    for row in untuned:
        if 0.85 <= measured / row.busbw_gbs <= 1.15:
            return (
                f"the same GPUs gave {row.busbw_gbs:g} with {row.layout}, {row.settings} ({row.source}): "
                "NCCL_MIN_CTAS=8 (before 2.17 NCCL_MIN_NCHANNELS), NCCL_P2P_LEVEL=SYS or a graph file raised it there"
            )
    if link == "pcie":
        return "see whether channels go via SHM in place of P2P (NCCL_DEBUG=INFO), and rdiag topo for ACS and IOMMU"
    return None
