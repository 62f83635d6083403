"""Metrics of a job: a table of series, a chart of the first of them, the alerts; and the lines that a pipe gets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Group
from rich.table import Table
from rich.text import Text

from ..text import safe
from .loss_check import ROUNDING, number, sparkline
from .outcome import STYLES, findings

if TYPE_CHECKING:
    from rich.console import RenderableType

    from probes.lib.training_log import Point

    from ..findings import Finding
    from ..metrics import Row

SHOWN = 24
"""Series that the table shows; the rest is counted."""
_LIVE_ROWS = 12
_BLOCKS = " ▁▂▃▄▅▆▇█"
_EIGHTHS = 8
_MARGIN = 10


def render(headline: str, rows: Sequence[Row], found: Sequence[Finding], *, status: str) -> RenderableType:
    """Return the whole answer; 80 columns are enough."""
    first = Text(safe(headline))
    first.append(": ")
    first.append(status, STYLES.get(status, ""))
    parts: list[RenderableType] = [first]
    if rows:
        parts.append(table(rows))
    if len(rows) > SHOWN:
        parts.append(Text(f"{len(rows) - SHOWN} more series; all are in --json", "dim"))
    listed = findings(found)
    return Group(*parts, listed) if listed is not None else Group(*parts)


def table(rows: Sequence[Row], most: int = SHOWN) -> Table:
    """Return the series, one a line: first, lowest, highest and last value, number of points, course."""
    several = len({row.stream for row in rows}) > 1
    out = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim")
    out.add_column("series", style="cyan", no_wrap=True, overflow="ellipsis", max_width=24)
    if several:
        out.add_column("log", no_wrap=True, overflow="ellipsis", max_width=10)
    for name in ("first", "min", "max", "last", "count"):
        out.add_column(name, justify="right", no_wrap=True)
    out.add_column("course", no_wrap=True)
    for row in rows[:most]:
        series = row.series
        ends = (series.first, series.lowest, series.highest, series.last)
        count = str(series.count) + (f" +{series.not_finite} NaN" if series.not_finite else "")
        values = [number(None if point is None else point.value) for point in ends]
        names = [Text(safe(row.label))] + ([Text(safe(row.stream))] if several else [])
        out.add_row(*names, *values, count, sparkline([point.value for point in row.points()]))
    return out


def chart(values: Sequence[float], width: int, height: int) -> list[str]:
    """Return ``values`` as lines of blocks with the scale at the left; the newest value is the rightmost column.

    Args:
        values: finite numbers in order; longer stretches are averaged into a column.
        width: columns, the scale included.
        height: lines.
    """
    if not values or height < 1:
        return []
    cells = max(1, min(width - _MARGIN, len(values)))
    parts = [values[cell * len(values) // cells : (cell + 1) * len(values) // cells] for cell in range(cells)]
    means = [sum(part) / len(part) for part in parts]
    low, high = min(means), max(means)
    # What rounding makes of the mean of a constant is no course.
    span = high - low if high - low > ROUNDING * max(abs(low), abs(high)) else 0.0
    # The lowest column is one eighth high: something is there.
    levels = [1 + round((mean - low) / span * (height * _EIGHTHS - 1)) if span > 0 else height * 4 for mean in means]
    lines = []
    for line in range(height - 1, -1, -1):
        scale = number(high) if line == height - 1 else number(low) if line == 0 else ""
        blocks = "".join(_BLOCKS[max(0, min(_EIGHTHS, level - line * _EIGHTHS))] for level in levels)
        lines.append(f"{scale:>{_MARGIN - 2}} {blocks}")
    return lines


def live(headline: str, rows: Sequence[Row], alerts: Sequence[Finding], *, width: int, height: int) -> RenderableType:
    """Return what a terminal of ``width`` times ``height`` shows while a job is followed."""
    parts: list[RenderableType] = [Text(safe(headline, limit=width), "bold", no_wrap=True)]
    shown = list(rows[: max(1, min(_LIVE_ROWS, height - 14))])
    alert_lines = [_alert_line(alert, width) for alert in alerts[:4]]
    if shown:
        room = height - len(shown) - len(alert_lines) - 5
        first = shown[0]
        if room >= 3:
            parts.append(Text(safe(first.label), "cyan"))
            parts += [Text(line, no_wrap=True) for line in chart([one.value for one in first.points()], width, min(room, 14))]
        parts.append(table(shown))
        if len(rows) > len(shown):
            parts.append(Text(f"{len(rows) - len(shown)} more series", "dim"))
    else:
        parts.append(Text("no numbers yet", "dim"))
    return Group(*parts, *alert_lines)


def _alert_line(alert: Finding, width: int) -> Text:
    text = Text(no_wrap=True, overflow="ellipsis")
    text.append(alert.level, STYLES.get(alert.level, ""))
    text.append(f" {alert_text(alert)[: max(1, width - 10)]}")
    return text


def alert_text(alert: Finding) -> str:
    """Return an alert in one line, safe to print."""
    return safe(f"{alert.subject}: {alert.message}" if alert.subject else alert.message)


def line(stream: str, points: Sequence[Point]) -> str:
    """Return the points of one line of a log as a line of text: ``step 50 epoch 1  loss 3.21  lr 5e-05``."""
    first = points[0]
    place = [f"step {first.step}"] if first.step is not None else [f"line {first.where.line}"]
    if first.epoch is not None:
        place.append(f"epoch {first.epoch:g}")
    if first.where.rank is not None:
        place.append(f"rank {first.where.rank}")
    if stream not in {"stdout", "stderr"} and first.where.rank is None:
        place.append(stream)
    return safe(f"{' '.join(place)}  {'  '.join(f'{_name(point)} {point.value:.6g}' for point in points)}")


def _name(point: Point) -> str:
    name = point.metric if point.position is None else f"{point.metric}_{point.position}"
    return f"{point.split}/{name}" if point.split else name
