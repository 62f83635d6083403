"""A collective as a picture: bus bandwidth and time of a call against size, with what was published for such a box."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..text import safe
from . import plotting
from .nccl import sentence, size
from .plotting import COLOURS, HEIGHT, WIDTH, Axis, Panel, Point

if TYPE_CHECKING:
    from ..outcome import Outcome

_REFERENCE = "#777777"
_DASHES = "7 5"


class _Line:
    """One course over sizes.

    Args:
        name: what it is.
        points: size in bytes, and GB/s or microseconds; ascending.
        colour: as in SVG.
        published: whether it is not of this run.
    """

    def __init__(self, name: str, points: Sequence[Point], colour: str, *, published: bool = False) -> None:
        self.name = name
        self.points = sorted(points)
        self.colour = colour
        self.published = published

    @property
    def dashes(self) -> str:
        """As in stroke-dasharray."""
        return _DASHES if self.published else ""


def draw(outcome: Outcome[Any], path: Path, published: Sequence[Any] = ()) -> bytes:
    """Return the contents of a picture for a file of that name: .html, .svg or .png.

    Args:
        outcome: of the probe nccl.
        path: where it will be written.
        published: the course that the result can be compared with (probes.lib.comm.expectation.curve).

    Raises:
        ValueError: there is nothing to draw; in words.
    """
    result = outcome.answer
    if result is None or not any(row.time_us is not None and row.size_bytes > 0 for row in result.rows):
        raise ValueError("there is nothing to draw: no size was timed")
    title = safe(f"{outcome.host}: {sentence(result)}" if outcome.host != "-" else sentence(result))
    panels = [(heading, label, _lines(result, name, published)) for heading, label, name in _PANELS]
    kind = path.suffix.lower()
    if kind == ".png":
        return _png(title, panels)
    return (_svg(title, panels) if kind == ".svg" else _page(title, result, panels)).encode("utf-8")


_PANELS = (
    ("Bus bandwidth", "GB/s", "busbw_gbs"),
    ("Time of a call", "us", "time_us"),
)


def _lines(result: Any, field: str, published: Sequence[Any]) -> list[_Line]:
    found: list[_Line] = []
    kinds = sorted({(row.collective, row.in_place) for row in result.rows})
    for place, (collective, in_place) in enumerate(kinds):
        points = [
            (float(row.size_bytes), float(getattr(row, field)))
            for row in result.rows
            if (row.collective, row.in_place) == (collective, in_place) and row.size_bytes > 0 and getattr(row, field)
        ]
        if points:
            name = f"{collective}, {'in place' if in_place else 'out of place'}"
            found.append(_Line(name, points, COLOURS[place % len(COLOURS)]))
    singles = [
        (float(row.size_bytes), float(row.latency.p99_us)) for row in result.rows if row.latency is not None and row.size_bytes > 0
    ]
    if field == "time_us" and singles:
        found.append(_Line("99 of 100 single calls, the slowest rank of each", singles, COLOURS[len(kinds) % len(COLOURS)]))
    points = [(float(row.size_bytes), float(getattr(row, field))) for row in published if row.size_bytes and getattr(row, field)]
    if points:
        found.append(_Line(f"published: {published[0].gpus} x {published[0].gpu}, {published[0].layout}", points, _REFERENCE, published=True))
    return found


def _axes(lines: Sequence[_Line], label: str) -> tuple[Axis, Axis]:
    across = [x for line in lines for x, _ in line.points]
    up = [y for line in lines for _, y in line.points]
    low, high = min(across), max(across)
    if low == high:
        low, high = low / 2, high * 2
    sizes = Axis(low, high, "size", base=2, show=lambda value: size(round(value)))
    if label == "us":
        least, most = min(up), max(up)
        return sizes, Axis(10 ** _floor(least), 10 ** (_floor(most) + 1), label, base=10, show=lambda value: f"{value:g}")
    return sizes, Axis(0.0, max(up) * 1.05, label, show=lambda value: f"{value:g}", least=1e-6)


def _floor(value: float) -> int:
    from math import floor, log10

    return floor(log10(value))


def _panel(place: int, heading: str, label: str, lines: Sequence[_Line]) -> Iterator[str]:
    panel = Panel(place * HEIGHT, *_axes(lines, label))
    yield from panel.frame(heading)
    for line in lines:
        yield from panel.line(line.points, line.colour, dashes=line.dashes, dots=not line.published)
    for number, line in enumerate(lines):
        yield from panel.key(number, line.name, line.colour, dashes=line.dashes)


def _svg(title: str, panels: Sequence[tuple[str, str, list[_Line]]]) -> str:
    drawn = [panel for panel in panels if panel[2]]
    shapes = [shape for place, (heading, label, lines) in enumerate(drawn) for shape in _panel(place, heading, label, lines)]
    return plotting.svg(title, len(drawn), shapes)


def _page(title: str, result: Any, panels: Sequence[tuple[str, str, list[_Line]]]) -> str:
    parts = [_svg(title, panels)]
    if result.expectation is not None:
        held = result.expectation
        words = f"Held against {held.busbw_gbs:.4g} GB/s, {held.kind}: {held.conditions} ({held.source})"
        parts.append(f"<p>{escape(safe(words, limit=1000))}</p>")
    parts += [f"<p>{escape(safe(note, limit=1000))}</p>" for note in result.notes]
    return plotting.page(title, parts)


def _png(title: str, panels: Sequence[tuple[str, str, list[_Line]]]) -> bytes:
    drawn = [panel for panel in panels if panel[2]]
    figure = plotting.figure(title, inches=(WIDTH / 100, len(drawn) * HEIGHT / 100))
    for axes, (heading, label, lines) in zip(figure.subplots(len(drawn), 1, squeeze=False)[:, 0], drawn, strict=True):
        across, up = _axes(lines, label)
        for line in lines:
            xs, ys = [x for x, _ in line.points], [y for _, y in line.points]
            style = "--" if line.published else "-o"
            axes.plot(xs, ys, style, color=line.colour, label=plotting.literal(safe(line.name)), markersize=4)
        axes.set_xscale("log", base=2)
        axes.set_yscale("linear" if up.base is None else "log")
        axes.set(title=heading, xlabel=across.label, ylabel=label, xlim=(across.low, across.high), ylim=(up.low, up.high))
        axes.set_xticks(across.ticks(), [across.show(value) for value in across.ticks()])
        axes.grid(color=plotting.GRID)
        axes.set_axisbelow(True)
        axes.legend(fontsize="small")
    return plotting.png(figure)
