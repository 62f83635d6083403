"""What all pictures have in common: names of files, colours, axes, the page around a drawing, and PNG by matplotlib.

A page holds all that it shows and loads nothing; matplotlib comes with the extra ``plot`` and is only needed for .png.
"""

from __future__ import annotations

import math
import os
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from ..errors import LocalIOError, UsageProblem
from ..text import safe

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#999933")
"""Told apart by people who see few colours, too; after eight they begin anew."""
INK, GRID = "#333333", "#dddddd"
WIDTH, HEIGHT = 960, 360
"""Of one pair of axes with what is written around it."""
LEFT, RIGHT, TOP, BOTTOM = 86, 20, 40, 52
"""Margins of the axes."""
_SVG_STYLE = (
    "text{font:13px system-ui,sans-serif;fill:#333}.heading{font-weight:600}.right{text-anchor:end}"
    ".middle{text-anchor:middle}.grid{stroke:#ddd}.axis{stroke:#333;fill:none}"
)
PAGE_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;color:#333;max-width:960px;margin:2em auto;padding:0 1em}"
    "h1{font-size:1.3em}h2{font-size:1.05em;margin-top:2em}table{border-collapse:collapse}"
    "td,th{padding:.15em 1.2em .15em 0;text-align:left;font-weight:400;vertical-align:top}"
    "td.n{text-align:right;font-variant-numeric:tabular-nums}th{color:#777}svg{width:100%;height:auto}"
    "code{white-space:pre-wrap;word-break:break-all;background:#f3f3f3;padding:0 .25em}"
)

SUFFIXES = (".html", ".svg", ".png")
"""Endings of names of pictures; upper case will do."""

Point = tuple[float, float]


def check(path: Path) -> None:
    """Make sure, before anything else is done, that ``path`` can be drawn.

    Raises:
        UsageProblem: its name has another ending than :data:`SUFFIXES`, its folder is missing, or matplotlib is.
    """
    if path.suffix.lower() not in SUFFIXES:
        raise UsageProblem(f"--plot {path}: the name has to end in {', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]}")
    if not path.absolute().parent.is_dir():
        raise UsageProblem(f"--plot {path}: there is no folder {path.absolute().parent}")
    if path.suffix.lower() == ".png":
        try:
            import matplotlib  # noqa: F401
        except ImportError:
            raise UsageProblem(
                f"--plot {path}: a PNG needs matplotlib",
                hint="pip install 'remote-diag[plot]', or give a name that ends in .html or .svg: these need nothing",
            ) from None


def store(path: Path, contents: bytes) -> None:
    """Write a picture, all of it or nothing; raise LocalIOError where that cannot be done."""
    target = path.resolve()
    temporary = target.with_name(f".new-{os.getpid()}-{secrets.token_hex(4)}")
    try:
        try:
            temporary.write_bytes(contents)
            if target.exists():
                shutil.copymode(target, temporary)
            temporary.replace(target)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise LocalIOError(f"cannot write {path}: {error.strerror or error}", hint="give another file to --plot") from error


# Axes ----------------------------------------------------------------------------------------------------------------


def ticks(low: float, high: float, least: float = 1.0) -> list[float]:
    """Return round numbers from ``low`` to ``high``, about six of them and at least ``least`` apart."""
    if high <= low:
        return [low]
    rough = (high - low) / 6
    unit = 10.0 ** math.floor(math.log10(rough))
    step = max(least, next(factor * unit for factor in (1, 2, 5, 10) if factor * unit >= rough))
    return [step * place for place in range(math.ceil(low / step), math.floor(high / step) + 1)]


def powers(low: float, high: float, base: int) -> list[float]:
    """Return powers of ``base`` from ``low`` to ``high``, at most about eight of them."""
    first, last = math.ceil(math.log(low, base) - 1e-9), math.floor(math.log(high, base) + 1e-9)
    step = max(1, math.ceil((last - first) / 8))
    return [float(base) ** place for place in range(first, last + 1, step)]


def plain(value: float) -> str:
    """Return a number with commas between thousands and without a fraction."""
    return f"{value:,.0f}"


@dataclass(frozen=True)
class Axis:
    """One direction of a diagram."""

    low: float
    high: float
    label: str
    base: int | None = None
    """Of the logarithm by which it runs; None for one that runs evenly."""
    show: Callable[[float], str] = plain
    least: float = 1.0
    """Least distance of two ticks, where it runs evenly."""

    def share(self, value: float) -> float:
        """Return where a value lies, from 0 to 1."""
        low, high = self.low, self.high
        if self.base is not None:
            low, high, value = math.log(low), math.log(high), math.log(max(value, 1e-12))
        return (value - low) / ((high - low) or 1)

    def ticks(self) -> list[float]:
        """Return what is written beside it."""
        return ticks(self.low, self.high, self.least) if self.base is None else powers(self.low, self.high, self.base)


class Panel:
    """One pair of axes in an SVG.

    Args:
        top: where it begins, in pixels from above.
        across: the horizontal axis.
        up: the vertical one.
    """

    def __init__(self, top: float, across: Axis, up: Axis) -> None:
        self._top = top
        self._across = across
        self._up = up

    def x(self, value: float) -> float:
        """Return the place of a value, in pixels from the left."""
        return LEFT + self._across.share(value) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        """Return the place of a value, in pixels from above."""
        return self._top + HEIGHT - BOTTOM - self._up.share(value) * (HEIGHT - TOP - BOTTOM)

    def frame(self, heading: str) -> Iterator[str]:
        """Yield the axes, their grid and what they are called."""
        left, right = self.x(self._across.low), self.x(self._across.high)
        bottom, top = self.y(self._up.low), self.y(self._up.high)
        yield f'<text x="{left:.1f}" y="{self._top + 22:.1f}" class="heading">{escape(heading)}</text>'
        for value in self._up.ticks():
            y = self.y(value)
            yield f'<line x1="{left:.1f}" y1="{y:.1f}" x2="{right:.1f}" y2="{y:.1f}" class="grid"/>'
            yield f'<text x="{left - 8:.1f}" y="{y + 4:.1f}" class="right">{escape(self._up.show(value))}</text>'
        for value in self._across.ticks():
            x = self.x(value)
            yield f'<line x1="{x:.1f}" y1="{top:.1f}" x2="{x:.1f}" y2="{bottom:.1f}" class="grid"/>'
            yield f'<text x="{x:.1f}" y="{bottom + 18:.1f}" class="middle">{escape(self._across.show(value))}</text>'
        yield f'<path d="M{left:.1f},{top:.1f}V{bottom:.1f}H{right:.1f}" class="axis"/>'
        yield f'<text x="{(left + right) / 2:.1f}" y="{bottom + 40:.1f}" class="middle">{escape(self._across.label)}</text>'
        middle = (top + bottom) / 2
        yield f'<text transform="translate(16,{middle:.1f}) rotate(-90)" class="middle">{escape(self._up.label)}</text>'

    def line(self, points: Sequence[Point], colour: str, *, dashes: str = "", dots: bool = False) -> Iterator[str]:
        """Yield the points joined in their order; ``dashes`` as in stroke-dasharray."""
        places = [f"{self.x(x):.1f},{self.y(y):.1f}" for x, y in points]
        if len(places) > 1:
            broken = f' stroke-dasharray="{dashes}"' if dashes else ""
            yield f'<path d="M{"L".join(places)}" fill="none" stroke="{colour}" stroke-width="2"{broken}/>'
        if dots or len(places) == 1:
            marks = "".join(f"M{place}h0" for place in places)
            yield f'<path d="{marks}" fill="none" stroke="{colour}" stroke-width="6" stroke-linecap="round"/>'

    def key(self, place: int, name: str, colour: str, *, dashes: str = "") -> Iterator[str]:
        """Yield what a colour stands for, one below the other."""
        x, y = LEFT + 20, self._top + 56 + 18 * place
        broken = f' stroke-dasharray="{dashes}"' if dashes else ""
        yield f'<line x1="{x}" y1="{y}" x2="{x + 28}" y2="{y}" stroke="{colour}" stroke-width="3"{broken}/>'
        yield f'<text x="{x + 34}" y="{y + 4}">{escape(safe(name))}</text>'


# Documents -----------------------------------------------------------------------------------------------------------


def svg(title: str, panels: int, parts: Iterable[str]) -> str:
    """Return a drawing of some panels, one below the other."""
    head = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {panels * HEIGHT}" role="img">',
        f"<title>{escape(title)}</title><style>{_SVG_STYLE}</style>",
        f'<rect width="{WIDTH}" height="{panels * HEIGHT}" fill="#fff"/>',
    ]
    return "\n".join([*head, *parts, "</svg>"]) + "\n"


def stacked(title: str, drawings: Sequence[tuple[str, float, float, Iterable[str]]]) -> str:
    """Return one drawing of several, one below the other: heading, width, height and shapes of each."""
    width = max((wide for _, wide, _, _ in drawings), default=WIDTH)
    parts, y = [], 0.0
    for heading, wide, high, shapes in drawings:
        parts.append(f'<text x="8" y="{y + 20:.0f}" class="heading">{escape(heading)}</text>')
        parts.append(f'<svg x="0" y="{y + 30:.0f}" width="{wide:.0f}" height="{high:.0f}">')
        parts += [*shapes, "</svg>"]
        y += 30 + high
    head = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {y:.0f}" role="img">',
        f"<title>{escape(title)}</title><style>{_SVG_STYLE}</style>",
        f'<rect width="{width:.0f}" height="{y:.0f}" fill="#fff"/>',
    ]
    return "\n".join([*head, *parts, "</svg>"]) + "\n"


def page(title: str, parts: Iterable[str], *, style: str = PAGE_STYLE) -> str:
    """Return an HTML page around ``parts``, which are HTML already; the title is text."""
    shown = escape(title)
    head = [
        "<!doctype html>",
        f'<html lang="en"><head><meta charset="utf-8"><title>{shown}</title><style>{style}</style></head><body>',
        f"<h1>{shown}</h1>",
    ]
    return "\n".join([*head, *parts, "</body></html>"]) + "\n"


def literal(text: str) -> str:
    """Return text so that matplotlib draws it as it is: dollar signs would be read as formulas."""
    return text.replace("$", r"\$")


def figure(title: str, *, inches: tuple[float, float]) -> Any:
    """Return an empty figure of matplotlib; not pyplot: no window system, no global state."""
    from matplotlib.figure import Figure

    made = Figure(figsize=inches, layout="constrained")
    made.suptitle(literal(title), fontsize=11)
    return made


def png(made: Any) -> bytes:
    """Return a figure of matplotlib as PNG."""
    from io import BytesIO

    file = BytesIO()
    made.savefig(file, format="png", dpi=150)
    return file.getvalue()
