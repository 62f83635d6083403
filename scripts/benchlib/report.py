"""The tables that ``scripts/bench`` prints."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from . import contenders
from .aims import Aim
from .checkpoint import Measured
from .clock import Times


def race_table(title: str, times: dict[str, Times], ours: str = contenders.RDIAG) -> Table:
    """Return one row a contender: median, range, and what ours is of it."""
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    table.add_column("")
    for heading in ("median", "min", "max", "local CPU", f"{ours} is" if ours else ""):
        table.add_column(heading, justify="right")
    base = times[ours].median if ours in times else None
    for name, measured in sorted(times.items(), key=lambda item: item[1].median):
        ratio = "" if base is None or name == ours else f"{base / measured.median:.2f} x"
        seconds = (measured.median, min(measured.wall), max(measured.wall), statistics.median(measured.cpu))
        table.add_row(name, *(f"{value * 1000:.0f} ms" for value in seconds), ratio)
    return table


def checkpoint_table(measured: Measured) -> Table:
    """Return what was measured of vocab-compare."""
    table = Table(title="vocab-compare on two checkpoints", title_justify="left", box=None, pad_edge=False)
    table.add_column("")
    table.add_column("", justify="right")
    table.add_row("size of a checkpoint", f"{measured.checkpoint_bytes / 1e9:.2f} GB")
    read = "not counted" if measured.read_bytes is None else f"{measured.read_bytes / 1e6:.2f} MB"
    mapped = "" if not measured.mapped_bytes else f", and {measured.mapped_bytes / 1e6:.2f} MB mapped"
    table.add_row("read of it", read + mapped)
    table.add_row("torch imported", "yes" if measured.torch_imported else "no")
    table.add_row("time on the host", f"{measured.probe:.0f} ms")
    table.add_row('python -c "import numpy, safetensors"', f"{measured.imports:.0f} ms")
    return table


def aims_table(aims: Sequence[Aim]) -> Table:
    """Return the aims, and whether they are met."""
    table = Table(title="aims", title_justify="left", box=None, pad_edge=False)
    table.add_column("")
    for heading in ("measured", "at most", ""):
        table.add_column(heading, justify="right")
    for aim in aims:
        limit, verdict = ("", "") if math.isinf(aim.limit) else (f"{aim.limit:g}", "met" if aim.met else "MISSED")
        table.add_row(aim.what, f"{aim.value:.2f} {aim.unit}", limit, verdict)
    return table


def show(*tables: Table) -> None:
    """Print them to stdout."""
    console = Console(width=None if Console().is_terminal else 110, highlight=False)
    for table in tables:
        console.print(table)
        console.print()
