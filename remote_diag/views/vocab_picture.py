"""A comparison of draft vocabularies as a picture: draft row against target id for both, and the shift along the ids.

An ``.html`` or ``.svg`` file is written here and holds all that it shows; a ``.png`` is drawn by matplotlib, which comes
with the extra ``plot``.
"""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..text import safe
from . import plotting
from .plotting import GRID, HEIGHT, INK, LEFT, RIGHT, WIDTH, Axis, Panel, Point, ticks
from .vocab_compare import percent, sentence

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ..outcome import Outcome

POINTS = 1200
"""Asked of the host: more than the picture is wide."""
_A, _B, _SHIFT = plotting.COLOURS[:3]

__all__ = ["POINTS", "bands", "draw", "lines", "ticks", "title"]


def draw(outcome: Outcome[Any], path: Path) -> bytes:
    """Return the contents of a picture for a file of that name.

    Raises:
        ValueError: there is nothing to draw; in words.
    """
    result = outcome.result
    if result is None or result.picture is None:
        raise ValueError("there is no picture: a mapping is not understood")
    kind = path.suffix.lower()
    if kind == ".png":
        return _png(outcome)
    svg = _svg(outcome)
    return (svg if kind == ".svg" else _page(outcome, svg)).encode("utf-8")


def title(outcome: Outcome[Any]) -> str:
    """Return what stands above the picture."""
    return safe(sentence(outcome.result))


# What is drawn -------------------------------------------------------------------------------------------------------


def lines(result: Any) -> list[tuple[str, str, list[Point], bool]]:
    """Return (label, colour, points, whether they are joined) for A and B: row, target id."""
    found = []
    for name, colour, side, ids in (("A", _A, result.a, result.picture.a), ("B", _B, result.b, result.picture.b)):
        points = [(float(row), float(token)) for row, token in zip(result.picture.rows, ids, strict=True) if token is not None]
        found.append((name, colour, points, bool(side.ascending)))
    return found


def bands(result: Any) -> list[list[tuple[float, float, float]]]:
    """Return stretches of (target id, smallest shift, largest shift) without a gap."""
    stretches: list[list[tuple[float, float, float]]] = []
    joined = False
    for token, low, high in zip(result.picture.tokens, result.picture.low, result.picture.high, strict=True):
        if low is None:
            joined = False
            continue
        if not joined:
            stretches.append([])
        stretches[-1].append((float(token), float(low), float(high)))
        joined = True
    return stretches


# SVG -----------------------------------------------------------------------------------------------------------------


def _svg(outcome: Outcome[Any]) -> str:
    result = outcome.result
    return plotting.svg(title(outcome), 2, (*_rows_panel(result), *_shift_panel(result)))


def _rows_panel(result: Any) -> Iterator[str]:
    drawn = lines(result)
    tokens = [token for _, _, points, _ in drawn for _, token in points]
    across = Axis(0, max(result.picture.rows, default=1) or 1, "draft row")
    panel = Panel(0, across, Axis(0, max(tokens, default=1) or 1, "target id"))
    yield from panel.frame("Which target token each draft row stands for")
    for place, (name, colour, points, joined) in enumerate(drawn):
        # B is drawn above A: broken, so that A shows where both are the same.
        dashes = ' stroke-dasharray="7 5"' if place else ""
        if joined:
            path = "L".join(f"{panel.x(row):.1f},{panel.y(token):.1f}" for row, token in points)
            yield f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="2"{dashes}/>'
        else:
            dots = "".join(f"M{panel.x(row):.1f},{panel.y(token):.1f}h0" for row, token in points)
            yield f'<path d="{dots}" fill="none" stroke="{colour}" stroke-width="2.5" stroke-linecap="round"/>'
        x = LEFT + 20 + 70 * place
        yield f'<line x1="{x}" y1="56" x2="{x + 28}" y2="56" stroke="{colour}" stroke-width="3"{dashes}/>'
        yield f'<text x="{x + 34}" y="60">{name}</text>'


def _shift_panel(result: Any) -> Iterator[str]:
    stretches = bands(result)
    values = [value for stretch in stretches for _, low, high in stretch for value in (low, high)]
    low, high = min([0.0, *values]), max([0.0, *values])
    if low == high:
        low, high = -1.0, 1.0
    tokens = result.picture.tokens
    panel = Panel(HEIGHT, Axis(0, max(tokens, default=1) or 1, "target id"), Axis(low, high, "rows"))
    yield from panel.frame("How far a shared token's row moved, from A to B")
    zero = panel.y(0)
    yield f'<line x1="{panel.x(0):.1f}" y1="{zero:.1f}" x2="{WIDTH - RIGHT}" y2="{zero:.1f}" class="axis"/>'
    for stretch in stretches:
        there = [f"{panel.x(token):.1f},{panel.y(largest):.1f}" for token, _, largest in stretch]
        back = [f"{panel.x(token):.1f},{panel.y(smallest):.1f}" for token, smallest, _ in reversed(stretch)]
        corners = "L".join(there + back)
        yield f'<path d="M{corners}Z" fill="{_SHIFT}" stroke="{_SHIFT}" stroke-width="1.5" stroke-linejoin="round"/>'


# The page ------------------------------------------------------------------------------------------------------------


def _page(outcome: Outcome[Any], svg: str) -> str:
    result = outcome.result
    parts = [
        "<table>",
        *(
            f"<tr><th>{name}</th><td><code>{escape(safe(side.path, limit=400))}</code></td></tr>"
            for name, side in (("A", result.a), ("B", result.b))
        ),
        "</table>",
        svg,
        *_numbers(result),
        *_shift_table(result),
        *_token_table("Tokens that only A has", result.only_a),
        *_token_table("Tokens that only B has", result.only_b),
    ]
    return plotting.page(title(outcome), parts)


def _numbers(result: Any) -> Iterator[str]:
    facts: list[tuple[str, int | float | None, Callable[[Any], str]]] = [
        ("rows with the same token", result.positional_matches, "{:,}".format),
        ("tokens with a row in both", result.shared_targets, "{:,}".format),
        ("rows of B without a source in A", result.rows_without_source, "{:,}".format),
        ("first rows that agree", result.common_prefix, "{:,}".format),
        ("last rows that agree", result.common_suffix, "{:,}".format),
        ("stretches put in", result.blocks_inserted, "{:,}".format),
        ("stretches left out", result.blocks_deleted, "{:,}".format),
        ("counted tokens whose row is the same", result.positional_token_share, percent),
        ("highest accuracy that the head can show", result.accuracy_ceiling, percent),
        ("counted tokens with a row only in A", result.token_share_lost, percent),
        ("counted tokens with a row only in B", result.token_share_gained, percent),
    ]
    yield "<h2>In numbers</h2><table>"
    for label, value, show in facts:
        if value is not None:
            yield f'<tr><td>{label}</td><td class="n">{show(value)}</td></tr>'
    yield "</table>"


def _shift_table(result: Any) -> Iterator[str]:
    if not result.shifts:
        return
    yield "<h2>Shifts, in rows</h2><table><tr><th>from</th><th>to</th><th>tokens</th><th>of the counted tokens</th></tr>"
    for found in result.shifts:
        share = "" if found.token_share is None else percent(found.token_share)
        cells = (f"{found.low:,}", f"{found.high:,}", f"{found.tokens:,}", share)
        yield "<tr>" + "".join(f'<td class="n">{cell}</td>' for cell in cells) + "</tr>"
    yield "</table>"


def _token_table(heading: str, tokens: Sequence[Any]) -> Iterator[str]:
    if not tokens:
        return
    yield f"<h2>{heading}</h2><table><tr><th>id</th><th>row</th><th>of the counted tokens</th><th>text</th></tr>"
    for token in tokens:
        share = "" if token.token_share is None else percent(token.token_share)
        cells = (str(token.token), f"{token.row:,}", share)
        text = "" if token.text is None else f"<code>{escape(safe(token.text, limit=80))}</code>"
        yield "<tr>" + "".join(f'<td class="n">{cell}</td>' for cell in cells) + f"<td>{text}</td></tr>"
    yield "</table>"


# PNG -----------------------------------------------------------------------------------------------------------------


def _png(outcome: Outcome[Any]) -> bytes:
    result = outcome.result
    figure = plotting.figure(title(outcome), inches=(WIDTH / 100, 2 * HEIGHT / 100))
    upper, lower = figure.subplots(2, 1)
    for place, (name, colour, points, joined) in enumerate(lines(result)):
        style = ("--" if place else "-") if joined else ""
        rows, tokens = [point[0] for point in points], [point[1] for point in points]
        upper.plot(rows, tokens, style or ".", color=colour, label=name, markersize=2)
    upper.set(title="Which target token each draft row stands for", xlabel="draft row", ylabel="target id")
    upper.legend()
    for stretch in bands(result):
        places, low, high = zip(*stretch, strict=True)
        lower.fill_between(places, low, high, color=_SHIFT, linewidth=1.5)
    lower.axhline(0, color=INK, linewidth=0.8)
    lower.set(title="How far a shared token's row moved, from A to B", xlabel="target id", ylabel="rows")
    for axes in (upper, lower):
        axes.grid(color=GRID)
        axes.set_axisbelow(True)
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.yaxis.set_major_formatter("{x:,.0f}")
    return plotting.png(figure)
