"""Judges collectives that were measured here, with the user's thresholds and figures or the shipped ones."""

from __future__ import annotations

from ..gpu.thresholds import Thresholds
from . import reference, verdict

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Mapping, Sequence

    from remote_diag.probe import Context


class Judge:
    """Says what times mean.

    Args:
        thresholds: those that differ from the shipped ones.
        own: lines of a table of the user's own figures.
        file: where thresholds are from, for findings.

    Raises:
        ValueError: one of them is not as it should be.
    """

    def __init__(self, thresholds: Mapping[str, float], own: Sequence[str] = (), file: str = "") -> None:
        self._thresholds = Thresholds(thresholds, file)
        self._own = reference.parse(own, own=True) if own else []

    def judge(self, context: Context, report: dict[str, Any]) -> None:
        """Report what the times say, and put the peak and what it was held against into the report."""
        if report["ranks"] == 1:
            return

        def least(name: str) -> int | None:
            return min((load[name] for load in report["load"] if load[name] is not None), default=None)

        known = verdict.conditions(
            [device["name"] for device in report["devices"]],
            ranks=report["ranks"],
            nodes=1,
            collective=report["collective"],
            settings=report["settings"],
            pcie_gen=least("pcie_gen"),
            pcie_width=least("pcie_width"),
        )
        points = [(row["size_bytes"], row["busbw_gbs"]) for row in report["rows"] if row["busbw_gbs"] is not None]
        if points:
            found, peak, report["expectation"] = verdict.of_peak(
                points, known, self._thresholds, own=self._own, settings=report["settings"]
            )
            if peak is not None:
                report["peak_size_bytes"], report["peak_busbw_gbs"] = peak
            # The bands are of bursts. What a call costs to launch lengthens single ones, and is hidden in a burst.
            small = [
                (row["size_bytes"], min(row["latency"]["p50_us"], row["time_us"]))
                for row in report["rows"]
                if row["latency"] is not None and row["time_us"] is not None
            ]
            found += verdict.of_small(small, known, self._thresholds, what="median of single calls, or a call of a burst if that is less")
            for finding in found:
                # That large sizes are missing is told by what kept them from being measured.
                if peak is not None or report["failure"] is None:
                    context.finding(**finding)
        self._spread(context, report)

    def _spread(self, context: Context, report: Mapping[str, Any]) -> None:
        limit = self._thresholds["nccl.spread_pct"]
        for row in report["rows"]:
            if row["spread_pct"] is None or row["spread_pct"] <= limit.value:
                continue
            context.finding(
                "degraded",
                "times-vary",
                "repeated bursts of %d bytes differ by more than %g %%" % (row["size_bytes"], limit.value),
                value=round(row["spread_pct"], 2),
                unit="%",
                threshold=limit.value,
                threshold_source=limit.provenance,
                action="look for others on this host's CPUs and links, and for throttling; then measure again",
            )
