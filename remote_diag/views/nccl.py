"""A measured or parsed collective: the verdict, findings, one row a size, and what the numbers hold for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from ..text import safe
from .outcome import headline, opening

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rich.console import RenderableType

    from ..outcome import Outcome

_SHOWN = 64
_MANY_SETTINGS = 12


def render(outcome: Outcome[Any]) -> RenderableType:
    """Return what came of a run of the probes nccl and collectives-cpu; 100 columns are enough."""
    result = outcome.answer
    if result is None:
        return headline(outcome)
    parts = opening(outcome, sentence(result))
    if result.rows:
        parts.append(_rows(result.rows))
    if len(result.rows) > _SHOWN:
        parts.append(Text(f"{len(result.rows) - _SHOWN} more rows; all are in --json", "dim"))
    if result.load:
        parts.append(_load(result.load))
    parts += [Text(line, "dim") for line in _conditions(result)]
    return Group(*parts)


def sentence(result: Any) -> str:
    """Return the whole in one sentence."""
    ranks = "an unknown number of ranks" if result.ranks is None else f"{result.ranks} rank{'s' * (result.ranks != 1)}"
    data = {"ok": "data correct", "wrong": "WRONG DATA", "not_checked": "data not checked"}[result.correctness]
    if result.correctness == "not_checked" and any(row.wrong is not None for row in result.rows):
        data = "data checked in part"
    parts = [f"{result.collective} over {ranks}, {data}"]
    if result.peak_busbw_gbs is not None:
        against = ""
        if result.expectation is not None:
            against = f" = {result.expectation.ratio:.2f} of {result.expectation.busbw_gbs:.4g}"
        parts.append(f"peak {result.peak_busbw_gbs:.4g} GB/s{against}")
    if not result.complete:
        parts.append("not complete")
    return ", ".join(parts)


def size(number: int) -> str:
    """Return bytes as 32 KiB, 1 MiB; others as they are."""
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if number >= factor and number % factor == 0:
            return f"{number // factor} {unit}"
    return f"{number} B"


def _rows(rows: Sequence[Any]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    mixed = len({row.collective for row in rows}) > 1
    if mixed:
        table.add_column("collective", no_wrap=True)
    table.add_column("size", justify="right", no_wrap=True)
    table.add_column("place", no_wrap=True)
    for name in ("wrong", "p50 us", "p99 us", "max us", "burst us", "algbw GB/s", "busbw GB/s"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows[:_SHOWN]:
        latency = row.latency
        single = ("", "", "") if latency is None else (latency.p50_us, latency.p99_us, latency.max_us)
        cells = [
            size(row.size_bytes),
            "in" if row.in_place else "out",
            Text("?", "magenta") if row.wrong is None else Text(str(row.wrong), "bold red" if row.wrong else ""),
            *(_number(value) for value in single),
            _number(row.time_us),
            *("" if value is None else f"{value:.2f}" for value in (row.algbw_gbs, row.busbw_gbs)),
        ]
        table.add_row(*([safe(row.collective)] if mixed else []), *cells)
    return table


def _number(value: float | str | None) -> str:
    if value is None or value == "":
        return ""
    number = float(value)
    return f"{number:.0f}" if number >= 1000 else f"{number:.4g}"


def _load(load: Sequence[Any]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("under load", "samples", "pcie", "sm MHz", "W", "C", "held down by"):
        table.add_column(name, no_wrap=name != "held down by")
    for each in load:
        link = f"gen {_known(each.pcie_gen)}/{_known(each.pcie_gen_max)} x{_known(each.pcie_width)}/{_known(each.pcie_width_max)}"
        numbers = (each.clock_sm_mhz, each.power_w, each.temperature_c)
        # Where every sample was idle nothing is known of it under load.
        told = each.samples and "throttle" not in each.missing
        reasons = ", ".join(f"{safe(held.reason)} {held.share:.0%}" for held in each.held) or "nothing" if told else "?"
        table.add_row(safe(each.bus_id), str(each.samples), link, *(_known(number) for number in numbers), reasons)
    return table


def _known(value: float | None) -> str:
    return "?" if value is None else f"{value:g}"


def _conditions(result: Any) -> Iterator[str]:
    if result.expectation is not None:
        expected = result.expectation
        yield f"expected: {expected.busbw_gbs:.4g} GB/s, {safe(expected.kind)}: {safe(expected.conditions)} ({safe(expected.source)})"
    names = sorted({device.name for device in result.devices})
    if names:
        yield f"on {len(result.devices)} x {', '.join(map(safe, names))}"
    versions = [
        f"{name} {safe(version)}"
        for name, version in (("torch", result.torch_version), (result.backend, result.library_version))
        if version
    ]
    if versions:
        yield ", ".join(versions)
    settings = [f"{safe(name)}={safe(value, limit=60)}" for name, value in sorted(result.settings.items()) if value]
    if settings:
        yield "set: " + " ".join(settings[:_MANY_SETTINGS])
    for note in result.notes:
        yield f"note: {safe(note)}"
