"""The share of communication: the verdict, the findings, then for each GPU its collectives, messages and kernels."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from ..text import safe
from .outcome import headline, opening

if TYPE_CHECKING:
    from rich.console import RenderableType

    from ..outcome import Outcome

_KERNELS = 5
_MESSAGES = 5
_NAME = 44


def render(outcome: Outcome[Any]) -> RenderableType:
    """Return the shares; 80 columns are enough."""
    result = outcome.answer
    if result is None:
        return headline(outcome)
    parts = opening(outcome, _sentence(result))
    for device in result.devices:
        parts += list(_device(device))
    parts.append(Text(_source(result), "dim"))
    return Group(*parts)


def _sentence(result: Any) -> str:
    if not result.devices:
        return "no GPU's time could be told"
    worst = max(result.devices, key=lambda device: device.exposed_share)
    return (
        f"communication takes {percent(worst.communication_share)} of {_step(result)} on GPU {worst.device},"
        f" {percent(worst.exposed_share)} exposed"
    )


def _step(result: Any) -> str:
    return "the traced span" if result.step_name is None else f"{safe(result.step_name, limit=40)}"


def _device(device: Any) -> Iterator[RenderableType]:
    spans = f"{device.steps} x {device.window}" if device.window != "span" else "the whole span"
    yield Text(f"\nGPU {device.device}: {spans}, {duration(device.step_us)}", "bold")
    table = _table(("", "left"), ("time", "right"), ("of the step", "right"))
    for name, value in (
        ("communication", device.communication_us),
        ("  hidden by computation", device.overlapped_us),
        ("  exposed", device.exposed_us),
        ("  in kernels of NCCL", device.nccl_us),
        ("computation", device.compute_us),
        ("copies", device.copies_us),
        ("idle", device.idle_us),
    ):
        table.add_row(name, duration(value), percent(value / device.step_us) if device.step_us else "-")
    yield table
    if device.per_step is not None and device.per_step.steps > 1:
        yield _per_step(device.per_step)
    if device.collectives:
        table = _table(("collective", "left"), *((name, "right") for name in ("calls", "share", "exposed", "p50", "p99", "small", "large")))
        for row in device.collectives:
            sized = row.latency_bound_us + row.bandwidth_bound_us
            whole = sized + row.unsized_us
            table.add_row(
                safe(f"{row.name} ({row.family})"), str(row.calls), percent(row.share), percent(row.exposed_share),
                duration(row.p50_us), duration(row.p99_us),
                *(percent(part / whole) if sized and whole else "?" for part in (row.latency_bound_us, row.bandwidth_bound_us)),
            )  # fmt: skip
        yield table
    if device.messages:
        table = _table(("message", "left"), *((name, "right") for name in ("bytes", "calls", "min", "p50", "GB/s")))
        for row in device.messages[:_MESSAGES]:
            table.add_row(
                safe(f"{row.collective} {row.dtype}", limit=_NAME), f"{row.size_bytes:,}", str(row.calls), duration(row.min_us),
                duration(row.p50_us), f"{row.algbw_gbs:.3g}",
            )  # fmt: skip
        yield table
    table = _table(("kernel", "left"), ("kind", "left"), *((name, "right") for name in ("calls", "time", "share")))
    table.columns[0].no_wrap, table.columns[0].overflow = False, "fold"  # names give way before numbers do
    for row in device.top_kernels[:_KERNELS]:
        table.add_row(safe(_without_arguments(row.name), limit=_NAME), row.kind, str(row.calls), duration(row.total_us), percent(row.share))
    yield table


def _without_arguments(name: str) -> str:
    """Return a kernel's name without the list of its arguments, which tells nothing; ``--json`` has it."""
    return _ARGUMENTS.sub("", name) or name


_ARGUMENTS = re.compile(r"(?<=\w)\([^()]*\)\Z")


def _per_step(each: Any) -> Table:
    table = _table((f"{each.steps} single steps", "left"), *((name, "right") for name in ("least", "median", "most")))
    table.add_row("length", *(duration(value) for value in (each.length_min_us, each.length_p50_us, each.length_max_us)))
    shares = (each.communication_min, each.communication_p50, each.communication_max)
    table.add_row("communication", *map(percent, shares))
    table.add_row("  exposed", *map(percent, (each.exposed_min, each.exposed_p50, each.exposed_max)))
    return table


def _source(result: Any) -> str:
    told = [
        f"{result.events:,} events, {result.gpu_events:,} of GPUs, in {result.bytes_read:,} bytes of {safe(result.path)}",
        *([f"rank {result.rank} of {result.world_size}"] if result.rank is not None else []),
        *([f"NCCL {safe(result.nccl_version)}"] if result.nccl_version else []),
    ]
    return "; ".join(told)


def _table(*columns: tuple[str, Any]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim")
    for name, justify in columns:
        table.add_column(name, justify=justify, no_wrap=True, overflow="ellipsis")
    return table


def percent(share: float) -> str:
    """Return a share as percent, one digit behind the point."""
    return f"{100 * share:.1f} %"


def duration(us: float | None) -> str:
    """Return microseconds in the unit that suits them; ``-`` for none."""
    if us is None:
        return "-"
    for unit, size in (("s", 1e6), ("ms", 1e3)):
        if us >= size:
            return f"{us / size:.4g} {unit}"
    return f"{us:.4g} us"
