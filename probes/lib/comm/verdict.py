"""What the speed of a collective says, as findings: its peak against an expectation, and the time of a small one.

The same for collectives that were measured here and for those that nccl-tests measured.
"""

from __future__ import annotations

import re

from . import bandwidth, expectation, reference
from .expectation import Conditions

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Mapping, Sequence

    from ..gpu.thresholds import Thresholds
    from .reference import Reference

    Findings = list[dict[str, Any]]


_SLOWING = (
    ("NCCL_P2P_DISABLE", r"[1-9]\d*", "GPUs exchange nothing directly"),
    ("NCCL_P2P_LEVEL", r"0|LOC", "GPUs exchange nothing directly"),
    ("NCCL_SHM_DISABLE", r"[1-9]\d*", "GPUs without a direct way use the network stack"),
    ("NCCL_PROTO", r"LL", "half of what crosses a link are flags"),
    ("NCCL_MAX_(?:CTAS|NCHANNELS)", r"[12]", "so few channels fill no link"),
)
"""Settings that cost bandwidth wherever they are: name, value, what they do."""


def slowed_by(settings: Mapping[str, str]) -> str | None:
    """Return what to do about the first setting of the run that is known to cost bandwidth; None without one."""
    for name, value, what in _SLOWING:
        for each in sorted(settings):
            if re.fullmatch(name, each) and re.fullmatch(value, settings[each].strip(), re.IGNORECASE):
                return f"{each}={settings[each].strip()} is set: {what}; measure again without it (rdiag env says who sets it)"
    return None


def conditions(
    gpu_names: Sequence[str], *, ranks: int | None, nodes: int | None, collective: str | None,
    settings: dict[str, str], pcie_gen: int | None = None, pcie_width: int | None = None,
) -> Conditions:  # fmt: skip
    """Return what a run was made on.

    Args:
        gpu_names: Names of all GPUs; where they differ nothing can be expected of them.
        ranks: Over all hosts.
        nodes: Hosts.
        collective: A key of `bandwidth.FACTORS`.
        settings: NCCL_ variables of the ranks.
        pcie_gen: Generation of the slowest link.
        pcie_width: Lanes of the narrowest link.
    """
    names = set(gpu_names)
    off = settings.get("NCCL_NVLS_ENABLE") == "0" or _leaves_nvls_out(settings.get("NCCL_ALGO", ""), collective)
    name = names.pop() if len(names) == 1 else None
    return Conditions(name, ranks, nodes, collective, False if off else None, pcie_gen, pcie_width)


def _leaves_nvls_out(algorithms: str, collective: str | None) -> bool:
    """Say whether NCCL_ALGO forbids NVLS: ``ring,tree``, ``^nvls``, or from 2.24 on ``ring;allreduce:^nvls``, the last that fits."""
    wanted = ""
    for part in algorithms.lower().split(";"):
        function, colon, listed = part.rpartition(":")
        if not colon or bandwidth.canonical(function) == collective:
            wanted = listed.strip()
    if not wanted:
        return False
    names = {name.strip() for name in wanted.lstrip("^").split(",")}
    return "nvls" in names if wanted.startswith("^") else not names & {"nvls", "nvlstree"}


def of_peak(
    points: Sequence[tuple[int, float]], known: Conditions, thresholds: Thresholds, *, own: Sequence[Reference] = (),
    through_memory: int = 0, settings: Mapping[str, str] | None = None,
) -> tuple[Findings, tuple[int, float] | None, dict[str, Any] | None]:  # fmt: skip
    """Judge the best bus bandwidth.

    Args:
        points: (size in bytes, bus bandwidth in GB/s).
        known: What the run was made on.
        thresholds: Bounds of the bands.
        own: The user's figures.
        through_memory: Channels that go through the memory of the host (SHM), as NCCL says.
        settings: NCCL_ variables of the ranks.

    Returns:
        Findings as arguments of `context.finding`, the peak as (size, GB/s), and the fields of an Expectation.
    """
    best = expectation.peak(points, expectation.link_of(known))
    subject = f"{known.collective or 'a collective'} over {known.ranks or 'an unknown number of'} ranks"
    expected = None if best is None else expectation.expect(known, best[0], thresholds, own)
    if best is None or expected is None:
        names = "" if best is None else _names(known)
        missing: dict[str, Any] = {
            "level": "unknown", "code": "no-expectation", "message": _why_not(known, best), "subject": subject,
            "action": names + "give figures of your own with --reference FILE, or save a baseline of a run that is good",
        }  # fmt: skip
        return [missing if best is None else {**missing, "value": round(best[1], 3), "unit": "GB/s"}], best, None
    verdict = expectation.judge(best[1], expected, known, thresholds)
    hint = verdict.hint
    if verdict.level != "ok" and through_memory:
        channels = "1 channel goes" if through_memory == 1 else f"{through_memory} channels go"
        hint = f"{channels} via SHM: GPUs do not reach each other directly; see rdiag topo and rdiag p2p"
    if verdict.level != "ok":
        hint = slowed_by(settings or {}) or hint
    bound = verdict.bound
    finding = {
        "level": verdict.level, "code": "busbw", "message": f"peak at {best[0]} bytes: {verdict.text}", "subject": subject,
        "value": round(best[1], 3), "unit": "GB/s", "threshold": round(bound.value * verdict.of_gbs, 3),
        "threshold_source": f"{bound.value:g} ({bound.name}, {bound.provenance}) of {verdict.of_gbs:.4g}: {expected.source}",
        "action": hint,
    }  # fmt: skip
    held = {
        "busbw_gbs": expected.busbw_gbs, "ratio": verdict.ratio, "kind": expected.kind, "source": expected.source,
        "conditions": expected.conditions,
    }  # fmt: skip
    return [finding], best, held


def of_small(points: Sequence[tuple[int, float]], known: Conditions, thresholds: Thresholds, *, what: str) -> Findings:
    """Judge the time of a small all-reduce, where a band for it is known.

    Args:
        points: (size in bytes, microseconds).
        known: What the run was made on.
        thresholds: Bounds of the bands.
        what: What the times are: a median of single calls, a mean of a burst.
    """
    found = expectation.latency(known, points, thresholds)
    if found is None:
        return []
    level, size, time, text = found
    bound = thresholds["nccl.latency_32k_bad_us" if level == "degraded" else "nccl.latency_32k_good_us"]
    action = "see which protocol and path NCCL takes (NCCL_DEBUG=INFO); NCCL_ variables and nccl.conf: rdiag env"
    finding = {
        "level": level, "code": "small-latency", "message": f"{what}: {text}", "subject": f"{known.collective} of {size} bytes",
        "value": time, "unit": "us", "threshold": bound.value, "threshold_source": bound.provenance,
        "action": None if level == "ok" else action,
    }  # fmt: skip
    return [finding]


def _why_not(known: Conditions, best: tuple[int, float] | None) -> str:
    if best is None:
        return "no size is large enough for its bandwidth to be judged"
    told = f"the peak of {best[1]:.4g} GB/s at {best[0]} bytes is shown and not judged: "
    if known.collective is None:
        return told + "which collective it is, is not said; say it with --collective"
    if known.gpu_name is None:
        return told + "which GPUs it ran on is not said, or they differ; say it with --gpu"
    where = f"{known.ranks or '?'} x {known.gpu_name} on {known.nodes or '?'} host{'s' * (known.nodes != 1)}"
    return told + f"no figure is known for {known.collective} over {where} at such a size"


def _names(known: Conditions) -> str:
    """Return the names of GPUs that are known, where this one's is none of them; those that hold it if there are any."""
    if known.collective is None or (known.gpu_name and reference.family_of(known.gpu_name)):
        return ""
    names = [family.name for family in reference.FAMILIES]
    asked = (known.gpu_name or "").strip().lower()
    near = [name for name in names if asked and asked in name.lower()]
    return "known names of GPUs are %s; " % ", ".join(near or names)
