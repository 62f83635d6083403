"""A loss check: the verdict, each series in a row with its course, the findings, and what they stand on."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from ..text import safe
from .outcome import findings, headline

if TYPE_CHECKING:
    from rich.console import RenderableType

    from ..outcome import Outcome

_BARS = "▁▂▃▄▅▆▇█"
_COURSE = 16
ROUNDING = 1e-12
"""Differences of this share are what rounding makes of the mean of a constant."""
_SHOWN = 16
_JUDGED = ("loss", "full_acc", "cond_acc", "acc", "acceptance_rate", "accept_length", "kl_div")


def sparkline(values: Sequence[float], width: int = _COURSE) -> str:
    """Return the course of ``values`` in at most ``width`` characters, the lowest value at the bottom.

    Each character stands for the mean of its stretch, so the course is smoother than the values.
    """
    if not values:
        return ""
    cells = min(width, len(values))
    means = []
    for cell in range(cells):
        part = values[cell * len(values) // cells : (cell + 1) * len(values) // cells]
        means.append(sum(part) / len(part))
    low, high = min(means), max(means)
    span = high - low
    # What rounding makes of the mean of a constant is no course.
    if not math.isfinite(span) or span <= ROUNDING * max(abs(low), abs(high)):
        return _BARS[3] * cells
    return "".join(_BARS[min(len(_BARS) - 1, int((mean - low) / span * len(_BARS)))] for mean in means)


def number(value: float | None) -> str:
    """Return a number in four digits, ``-`` for none."""
    return "-" if value is None else f"{value:.4g}"


def render(outcome: Outcome[Any]) -> RenderableType:
    """Return a loss check; 80 columns are enough."""
    result = outcome.answer
    if result is None:
        return headline(outcome)
    parts: list[RenderableType] = [headline(outcome, f"{result.verdict}: {result.sentence}")]
    if result.series:
        parts.append(_series(result))
        hidden = len(result.series) - len(_chosen(result.series))
        if hidden:
            parts.append(Text(f"{hidden} more series; all are in --json", "dim"))
    parts += [Text(line) for line in _summary(result)]
    found = findings(outcome.findings)
    if found is not None:
        parts.append(found)
    return Group(*parts)


def _chosen(series: Sequence[Any]) -> list[Any]:
    """Return the series to show: those that are judged first, in the order of the steps."""
    order = {name: place for place, name in enumerate(_JUDGED)}
    ranked = sorted(series, key=lambda item: (order.get(item.metric, len(order)), item.split == "val", item.position or 0))
    return ranked[:_SHOWN]


def _series(result: Any) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim")
    table.add_column("series", style="cyan", no_wrap=True, overflow="ellipsis", max_width=20)
    for name in ("first", "lowest", "highest", "last", "uniform", "points"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("course", no_wrap=True)
    for item in _chosen(result.series):
        judged = item.label == result.interpretation.loss
        label = item.label if item.rank is None else f"{item.label} r{item.rank}"
        table.add_row(
            Text(safe(label)),
            *(number(value) for value in (item.first, item.lowest, item.highest, item.last)),
            number(result.interpretation.reference_high) if judged else "",
            str(item.count),
            sparkline(item.values),
        )
    return table


def _summary(result: Any) -> Iterator[str]:
    told = result.interpretation
    if result.source == "log":
        written = ", ".join(f"{safe(found.name)} ({found.lines}, {found.confidence})" for found in result.dialects) or "nothing known"
        yield f"read {result.lines} lines of {safe(result.path or '')}: {written}"
        odd = [
            f"{count} {words}"
            for count, words in (
                (result.unread_lines, "lines look like metrics and could not be read"),
                (result.long_lines, "lines were longer than 1 MiB and cut"),
                (result.points_left_out, "points of further series left out"),
            )
            if count
        ]
        if odd:
            yield "; ".join(odd)
        for sample in result.unread_samples:
            yield f"  {safe(sample, limit=100)}"
    if told.loss is not None:
        yield f"loss: {_spelled_out(told)}"
    if told.accuracy is not None:
        chance = "" if told.chance is None else f"; chance {told.chance:.2g}"
        ceiling = "" if told.accuracy_over_ceiling is None else f"; {told.accuracy_over_ceiling:.2f} of the ceiling at the start"
        yield f"accuracy: {safe(told.accuracy)} {number(told.accuracy_start)} to {number(told.accuracy_end)}{chance}{ceiling}"
    if told.expected_accept_length is not None:
        yield f"expected acceptance length: {told.expected_accept_length:.3g} tokens"


def _spelled_out(told: Any) -> str:
    text = f"{safe(told.loss)} {number(told.loss_start)} to {number(told.loss_end)}"
    if told.reference_high is None:
        return f"{text}; no reference" + (f" without the {' and '.join(told.missing)}" if told.missing else "")
    at_most = "at most " if told.missing else ""
    text += f"; a uniform guess {at_most}{number(told.reference_high)} ({safe(told.reference_formula or '')})"
    return f"{text}; ratio {told.loss_ratio_start:.2f} to {told.loss_ratio_end:.2f}"
