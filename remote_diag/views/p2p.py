"""Copies between GPUs: the verdict, findings, a matrix of bandwidths, and the links to the host."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from ..text import safe
from .outcome import headline, opening

if TYPE_CHECKING:
    from rich.console import RenderableType

    from ..outcome import Outcome

_BAD = {"wrong": "WRONG", "hang": "HANG", "crashed": "CRASH", "error": "ERROR", "not-run": "-"}


def render(outcome: Outcome[Any]) -> RenderableType:
    """Return what came of a run of the probe p2p; eight GPUs fit 80 columns."""
    result = outcome.answer
    if result is None:
        return headline(outcome)
    parts = opening(outcome, sentence(result))
    parts.append(_matrix(result))
    if result.host_links:
        parts.append(_host_links(result))
    names = sorted({gpu.name for gpu in result.gpus})
    parts.append(Text(f"on {len(result.gpus)} x {', '.join(map(safe, names))}", "dim"))
    return Group(*parts)


def sentence(result: Any) -> str:
    """Return the whole in one sentence."""
    bad = [pair for pair in result.pairs if pair.outcome not in ("ok", "not-run")]
    alone = len(result.gpus) == 1
    if bad:
        return f"copies fail between {len(bad)} of {len(result.pairs)} pairs" if not alone else "copies within the GPU fail"
    if not result.complete:
        return "not every copy was made"
    if any(link.outcome != "ok" for link in result.host_links):
        return "copies between host and GPUs fail"
    return "every byte arrived" + (", within one GPU" if alone else f", {len(result.pairs)} pairs")


def _matrix(result: Any) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim")
    table.add_column("GB/s from", no_wrap=True)
    for gpu in result.gpus:
        table.add_column(f"to {gpu.index}", justify="right", no_wrap=True)
    table.add_column("us", justify="right", no_wrap=True)
    pairs = {(pair.source, pair.target): pair for pair in result.pairs}
    for source in result.gpus:
        row = [pairs.get((source.index, target.index)) for target in result.gpus]
        times = [pair.latency_us for pair in row if pair is not None and pair.latency_us is not None]
        span = f"{min(times):.1f}-{max(times):.1f}" if times else ""
        label = f"gpu {source.index}" if source.bus_id is None else f"gpu {source.index} {source.bus_id}"
        table.add_row(Text(safe(label)), *(_cell(pair) for pair in row), span)
    return table


def _cell(pair: Any) -> Text:
    if pair is None:
        return Text("")
    if pair.outcome != "ok":
        return Text(_BAD[pair.outcome], "bold red" if pair.outcome != "not-run" else "magenta")
    # Without peer access bytes go through memory of the host.
    mark = "*" if pair.can_access is False else ""
    return Text(f"{pair.bandwidth_gbs:.1f}{mark}" if pair.bandwidth_gbs is not None else "?")


def _host_links(result: Any) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("host link", "to GPU GB/s", "from GPU GB/s", "bytes"):
        table.add_column(name, justify="left" if name in ("host link", "bytes") else "right", no_wrap=True)
    for link in result.host_links:
        speeds = ("?" if value is None else f"{value:.1f}" for value in (link.h2d_gbs, link.d2h_gbs))
        state = Text("right") if link.outcome == "ok" else Text(_BAD[link.outcome], "bold red")
        table.add_row(f"gpu {link.gpu}", *speeds, state)
    return table
