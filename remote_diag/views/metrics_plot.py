"""Series of a job as a picture: an HTML or SVG file that needs nothing else, or a PNG where matplotlib is installed."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..text import safe
from .loss_check import number
from .plotting import COLOURS, check, literal, png, stacked, store

if TYPE_CHECKING:
    from probes.lib.training_log import Point

    from ..metrics import Row

__all__ = ["check", "coordinates", "drawing", "page", "write"]

_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP = 900.0, 260.0, 70.0, 30.0, 10.0
_TICKS = 5
_SHAPES = "text{font-size:12px;fill:#555}.grid{stroke:#ddd}path{fill:none;stroke-width:1.5}"
_STYLE = (
    "body{font:14px system-ui,sans-serif;margin:2em;max-width:960px;color:#222;background:#fff}"
    "svg{width:100%;height:auto}.key{margin-right:1.5em}"
)


def write(path: Path, title: str, rows: Sequence[Row]) -> None:
    """Draw ``rows`` into ``path``, one diagram for each metric.

    Raises:
        LocalIOError: it cannot be written.
    """
    kind = path.suffix.lower()
    if kind == ".png":
        store(path, _png(title, rows))
    else:
        store(path, (drawing(title, rows) if kind == ".svg" else page(title, rows)).encode("utf-8"))


def page(title: str, rows: Sequence[Row]) -> str:
    """Return the HTML page; it loads nothing, and everything from the log is escaped in it."""
    shown = html.escape(safe(title))
    parts = [f"<!doctype html>\n<html lang=en><meta charset=utf-8><title>{shown}</title><style>{_STYLE}{_SHAPES}</style>"]
    parts.append(f"<h1>{shown}</h1>")
    for metric, group in _metrics(rows):
        parts.append(f"<h2>{html.escape(safe(metric))}</h2>{_diagram(group)}")
    if len(parts) == 2:
        parts.append("<p>no numbers in the log</p>")
    return "\n".join(parts) + "\n"


def drawing(title: str, rows: Sequence[Row]) -> str:
    """Return the same as one SVG: a diagram for each metric, one below the other, and what its colours stand for."""
    drawn = []
    for metric, group in _metrics(rows):
        keys = [
            f'<text x="{_LEFT:g}" y="{_HEIGHT + 16 * (place + 1):g}"><tspan style="fill:{colour}">&#9632;</tspan> {html.escape(label)}</text>'
            for place, (label, colour) in enumerate(_keys(group))
        ]
        height = _HEIGHT + 16 * len(keys) + 12
        drawn.append((safe(metric), _WIDTH, height, [f"<style>{_SHAPES}</style>", *_shapes(group), *keys]))
    return stacked(safe(title) if drawn else f"{safe(title)}: no numbers in the log", drawn)


def _metrics(rows: Sequence[Row]) -> Iterable[tuple[str, list[Row]]]:
    drawn = [row for row in rows if row.series.count]
    for metric, group in groupby(drawn, key=lambda row: row.series.key.metric):
        yield metric, list(group)


def coordinates(points: Sequence[Point]) -> list[tuple[float, float]]:
    """Return (x, y): x is the step where all points have one and it never falls, the running number otherwise."""
    steps = [point.step for point in points if point.step is not None]
    counted = len(steps) == len(points) and all(one <= other for one, other in pairwise(steps))
    return [(float(point.step if counted and point.step is not None else point.ordinal), point.value) for point in points]


def _diagram(rows: Sequence[Row]) -> str:
    keys = "".join(f'<span class=key style="color:{colour}">&#9632; {html.escape(label)}</span>' for label, colour in _keys(rows))
    return f'<svg viewBox="0 0 {_WIDTH:g} {_HEIGHT:g}" role="img">{"".join(_shapes(rows))}</svg><p>{keys}</p>'


def _keys(rows: Sequence[Row]) -> Iterator[tuple[str, str]]:
    for place, row in enumerate(rows):
        yield _label(row, rows), COLOURS[place % len(COLOURS)]


def _shapes(rows: Sequence[Row]) -> Iterator[str]:
    lines = [coordinates(row.points()) for row in rows]
    xs = [x for line in lines for x, _ in line]
    ys = [y for line in lines for _, y in line]
    x_low, x_span = min(xs), (max(xs) - min(xs)) or 1.0
    y_low, y_high = min(ys), max(ys)
    y_span = y_high - y_low
    if y_span <= 0 or not math.isfinite(y_span):
        y_low, y_span = y_low - 0.5, 1.0

    def at(x: float, y: float) -> tuple[float, float]:
        across = _LEFT + (x - x_low) / x_span * (_WIDTH - _LEFT - 10)
        return across, _TOP + (1 - (y - y_low) / y_span) * (_HEIGHT - _TOP - _BOTTOM)

    for tick in range(_TICKS):
        share = tick / (_TICKS - 1)
        x, y = at(x_low + share * x_span, y_low + share * y_span)
        yield f'<line class="grid" x1="{_LEFT:g}" x2="{_WIDTH - 10:g}" y1="{y:.1f}" y2="{y:.1f}" />'
        yield f'<text x="{_LEFT - 6:g}" y="{y + 4:.1f}" text-anchor="end">{number(y_low + share * y_span)}</text>'
        yield f'<text x="{x:.1f}" y="{_HEIGHT - 8:g}" text-anchor="middle">{number(x_low + share * x_span)}</text>'
    for line, (_, colour) in zip(lines, _keys(rows), strict=True):
        moves = [at(x, y) for x, y in line]
        if len(moves) == 1:
            yield f'<circle cx="{moves[0][0]:.1f}" cy="{moves[0][1]:.1f}" r="3" fill="{colour}" />'
        drawn = "L".join(f"{x:.1f} {y:.1f}" for x, y in moves)
        yield f'<path d="M{drawn}" stroke="{colour}" />'


def _label(row: Row, rows: Sequence[Row]) -> str:
    several = len({one.stream for one in rows}) > 1
    return safe(f"{row.label} ({row.stream})" if several else row.label)


def _png(title: str, rows: Sequence[Row]) -> bytes:
    from matplotlib.figure import Figure

    groups = list(_metrics(rows))
    figure: Any = Figure(figsize=(10, max(3, 3 * len(groups))), layout="constrained")
    figure.suptitle(literal(safe(title)))
    for (metric, group), axes in zip(groups, _axes(figure, len(groups)), strict=True):
        for place, row in enumerate(group):
            xs, ys = zip(*coordinates(row.points()), strict=True)
            label = literal(_label(row, group))
            axes.plot(xs, ys, color=COLOURS[place % len(COLOURS)], label=label, marker="o" if len(xs) == 1 else None)
        axes.set_ylabel(literal(safe(metric)))
        axes.grid(visible=True, alpha=0.3)
        axes.legend(fontsize="small")
    return png(figure)


def _axes(figure: Any, count: int) -> list[Any]:
    return [axes for (axes,) in figure.subplots(count, 1, squeeze=False)] if count else []
