"""A topology as a picture: who is near whom as a matrix, the way that NCCL will take, and the tree of the bus."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..text import safe
from . import plotting
from .topo import NEAR, WAYS, Node, cells, devices, sentence, tree, word

if TYPE_CHECKING:
    from ..outcome import Outcome

COLOURS = {
    "NV": "#08306b", "PIX": "#2171b5", "PXB": "#6baed6", "PHB": "#c6dbef", "NODE": "#fdd0a2", "SYS": "#f16913", "?": "#ffffff",
}  # fmt: skip
"""From near to far; each cell has its word too."""
WAY_COLOURS = {
    "nvlink": "#08306b", "p2p": "#2171b5", "shm": "#f16913", "net": "#a63603", "refused": "#7f0000", "unknown": "#ffffff",
}  # fmt: skip
_DARK = {"#08306b", "#2171b5", "#a63603", "#7f0000"}
_MEANING = {
    "NV": "NVLink", "PIX": "one bridge or switch between", "PXB": "several bridges", "PHB": "through one host bridge of a CPU",
    "NODE": "host bridges of one NUMA node", "SYS": "across NUMA nodes",
}  # fmt: skip
_SHORT = {"nvlink": "NVL", "p2p": "P2P", "shm": "SHM", "net": "NET", "refused": "no", "unknown": "?"}
_REMARK = (
    "An asterisk: something that decides is taken for granted. What is allowed is no proof that bytes arrive: <code>rdiag p2p</code>."
)
_NEAR, _WAY, _BUS = "Who is near whom", "The way that NCCL will take", "The tree"
_STYLE = "<style>text{font:12px system-ui,sans-serif;fill:#333}.m{text-anchor:middle}.r{text-anchor:end}</style>"
_CELL, _EDGE, _LINE, _STEP = 40, 90, 22, 26
_MOST = 72
"""Devices that are drawn."""


def draw(outcome: Outcome[Any], path: Path) -> bytes:
    """Return the contents of a picture for a file of that name: .html, .svg or .png.

    Raises:
        ValueError: there is nothing to draw; in words.
    """
    result = outcome.answer
    if result is None or not result.gpus:
        raise ValueError("there is nothing to draw: no GPU is seen")
    title = safe(f"{outcome.host}: {sentence(result)}" if outcome.host != "-" else sentence(result))
    kind = path.suffix.lower()
    if kind == ".png":
        return _png(title, result)
    return (plotting.stacked(title, _drawings(result)) if kind == ".svg" else _page(title, result)).encode("utf-8")


def near_matrix(result: Any) -> tuple[list[str], list[list[tuple[str, str]]]]:
    """Return (devices, rows of (word, kind)); ``X`` for a device and itself, ``?`` for what is not known."""
    names = (devices(result) or [_label(gpu) for gpu in result.gpus])[:_MOST]
    links = cells(result)

    def cell(a: str, b: str) -> tuple[str, str]:
        link = links.get((a, b))
        return ("X", "X") if a == b else ("?", "?") if link is None else (word(link), link.link)

    return names, [[cell(a, b) for b in names] for a in names]


def way_matrix(result: Any) -> tuple[list[str], list[list[tuple[str, str]]]]:
    """Return (GPUs, rows of (word, way of NCCL)); an asterisk marks what is taken for granted."""
    indexes = [gpu.index for gpu in result.gpus if gpu.index is not None][:_MOST]
    ways = {pair: item for item in result.pairs for pair in ((item.a, item.b), (item.b, item.a))}

    def cell(a: int, b: int) -> tuple[str, str]:
        item = ways.get((a, b))
        if a == b:
            return "X", "X"
        return ("?", "unknown") if item is None else (_SHORT.get(item.transport, "?") + "*" * (not item.certain), item.transport)

    return [f"GPU{index}" for index in indexes], [[cell(a, b) for b in indexes] for a in indexes]


def _label(gpu: Any) -> str:
    return "GPU?" if gpu.index is None else f"GPU{gpu.index}"


def _page(title: str, result: Any) -> str:
    near, *ways, bus = (_svg(wide, high, heading, shapes) for heading, wide, high, shapes in _drawings(result))
    parts = [f"<h2>{_NEAR}</h2>", near, _key({kind: (COLOURS[kind], _MEANING[kind]) for kind in NEAR})]
    if result.pairs:
        parts += [
            f"<h2>{_WAY}</h2>",
            *ways,
            _key({_SHORT[way]: (colour, WAYS[way]) for way, colour in WAY_COLOURS.items()}),
            f"<p>Directly up to {escape(result.p2p_level)}: {escape(safe(result.p2p_level_source))}. {_REMARK}</p>",
        ]
    parts += [f"<h2>{_BUS}</h2>", bus]
    parts.append(_table(result))
    return plotting.page(title, parts)


def _drawings(result: Any) -> list[tuple[str, float, float, list[str]]]:
    """Return heading, width, height and shapes of each drawing."""
    found = [(_NEAR, *_heat(*near_matrix(result), COLOURS))]
    if result.pairs:
        found.append((_WAY, *_heat(*way_matrix(result), WAY_COLOURS)))
    return [*found, (_BUS, *_tree(tree(result)))]


def _svg(width: float, height: float, name: str, parts: Sequence[str]) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" style="max-width:{width:.0f}px" role="img">'
    return "\n".join([head, f"<title>{escape(name)}</title>", *parts, "</svg>"])


def _heat(names: Sequence[str], rows: Sequence[Sequence[tuple[str, str]]], colours: dict[str, str]) -> tuple[float, float, list[str]]:
    parts = [_STYLE]
    for place, name in enumerate(names):
        middle = _EDGE + (place + 0.5) * _CELL
        parts.append(f'<text x="{middle}" y="{_LINE - 6}" class="m">{escape(safe(name))}</text>')
        parts.append(f'<text x="{_EDGE - 8}" y="{_LINE + place * _STEP + 17}" class="r">{escape(safe(name))}</text>')
    for row, line in enumerate(rows):
        for column, (text, kind) in enumerate(line):
            x, y = float(_EDGE + column * _CELL), float(_LINE + row * _STEP)
            colour = colours.get(kind, "#eeeeee")
            ink = ' style="fill:#fff"' if colour in _DARK else ""
            parts.append(f'<rect x="{x}" y="{y}" width="{_CELL - 1}" height="{_STEP - 1}" fill="{colour}" stroke="#ccc"/>')
            parts.append(f'<text x="{x + _CELL / 2}" y="{y + 17}" class="m"{ink}>{escape(text)}</text>')
    return _EDGE + len(names) * _CELL, _LINE + len(names) * _STEP + 4, parts


def _key(entries: dict[str, tuple[str, str]]) -> str:
    items = "".join(
        f'<span style="margin-right:1.2em"><span style="display:inline-block;width:1em;height:1em;background:{colour};'
        f'border:1px solid #ccc"></span> {escape(name)}: {escape(meaning)}</span>'
        for name, (colour, meaning) in entries.items()
    )
    return f"<p>{items}</p>"


def _tree(roots: Sequence[Node]) -> tuple[float, float, list[str]]:
    placed = list(_places(roots))
    height = max((y for _, _, y, _ in placed), default=0) + 2 * _STEP
    parts = [_STYLE]
    for text, x, y, parent in placed:
        if parent is not None:
            parts.append(f'<path d="M{parent[0] + 6},{parent[1] + 8}V{y}H{x - 4}" fill="none" stroke="#999"/>')
        bold = ' style="font-weight:600"'
        leaf = text.startswith(("GPU", "NIC"))
        parts.append(f'<text x="{x}" y="{y + 4}"{bold if leaf else ""}>{escape(text)}</text>')
    return plotting.WIDTH, height, parts


def _places(roots: Sequence[Node]) -> Iterator[tuple[str, float, float, tuple[float, float] | None]]:
    """Yield (label, x, y, place of the parent) of every node, from above."""
    y = float(_STEP)
    stack: list[tuple[Node, int, tuple[float, float] | None]] = [(root, 0, None) for root in reversed(roots)]
    while stack:
        node, depth, parent = stack.pop()
        x = 10.0 + depth * _STEP
        yield node.label, x, y, parent
        stack += [(child, depth + 1, (x, y)) for child in reversed(node.children)]
        y += _STEP


def _table(result: Any) -> str:
    rows = [
        f"<tr><td>{escape(_label(gpu))}</td><td>{escape(safe(gpu.bus_id or '-'))}</td><td>{escape(gpu.status)}</td>"
        f"<td>{escape(safe(gpu.name or '-'))}</td><td>{escape(safe(gpu.uuid or '-'))}</td></tr>"
        for gpu in result.gpus
    ]
    return "<table><tr><th>GPU</th><th>bus id</th><th>status</th><th>name</th><th>uuid</th></tr>" + "".join(rows) + "</table>"


def _png(title: str, result: Any) -> bytes:
    from matplotlib.colors import to_rgb

    near, ways = near_matrix(result), way_matrix(result)
    lines = list(_places(tree(result)))
    drawn = [(_NEAR, near, COLOURS)] + ([(_WAY, ways, WAY_COLOURS)] if result.pairs else [])
    size = max(4.0, 0.42 * len(near[0]))
    made = plotting.figure(title, inches=(max(10.0, size * len(drawn) + 2), size + 1 + 0.2 * len(lines)))
    grid = made.subfigures(2, 1, height_ratios=[size, max(1.0, 0.2 * len(lines))])
    for axes, (heading, (names, rows), colours) in zip(grid[0].subplots(1, len(drawn), squeeze=False)[0], drawn, strict=True):
        axes.imshow([[to_rgb(colours.get(kind, "#eeeeee")) for _, kind in row] for row in rows])
        axes.set_title(heading, fontsize=9)
        shown = [plotting.literal(safe(name)) for name in names]
        axes.set_xticks(range(len(names)), shown, fontsize=7, rotation=90)
        axes.set_yticks(range(len(names)), shown, fontsize=7)
        for y, row in enumerate(rows):
            for x, (text, kind) in enumerate(row):
                ink = "white" if colours.get(kind) in _DARK else "black"
                axes.text(x, y, text, ha="center", va="center", fontsize=6, color=ink)
    axes = grid[1].subplots()
    axes.axis("off")
    axes.set_xlim(0, plotting.WIDTH)
    axes.set_ylim((len(lines) + 1) * _STEP, 0)
    for text, left, height, parent in lines:
        if parent is not None:
            axes.plot([parent[0] + 6, parent[0] + 6, left - 4], [parent[1] + 8, height, height], color="#999999", linewidth=0.7)
        axes.text(left, height, plotting.literal(text), va="center", fontsize=7)
    return plotting.png(made)
