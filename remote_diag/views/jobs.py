"""Jobs as a table: one row each, the state first; below a row that needs it, why."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from ..text import safe

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import RenderableType

    from ..jobs import JobRecord

STYLES = {
    "starting": "cyan",
    "running": "green",
    "exited": "dim",
    "failed": "bold red",
    "stopped": "yellow",
    "lost": "magenta",
    "unknown": "magenta",
}
"""Colour of each state; every one is also written out as a word."""


def render(records: Sequence[JobRecord], *, now: float | None = None) -> RenderableType:
    """Return the jobs as a table.

    Args:
        records: the jobs, in the order of the rows.
        now: seconds since 1970; the clock of this machine by default.
    """
    clock = time.time() if now is None else now
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("job", "host", "state", "for", "gpus"):
        table.add_column(name, no_wrap=True)
    # Where there is not room for all of it, this column gives way: rich takes from those first that could be wrapped.
    table.add_column("last", no_wrap=False, ratio=1)
    for record in records:
        table.add_row(
            Text(record.job, "bold"),
            Text(record.host),
            Text(state(record), STYLES.get(record.state, "")),
            Text(age(record, clock)),
            Text(gpus(record)),
            _last(record),
        )
    return table


def state(record: JobRecord) -> str:
    """Return the state in a few words: ``failed (exit 3)``, ``failed (out of memory)``."""
    if record.oom_killed:
        return f"{record.state} (out of memory)"
    if record.signal is not None:
        return f"{record.state} (signal {record.signal})"
    if record.state == "failed" and record.exit_code is not None:
        return f"failed (exit {record.exit_code})"
    return record.state


def age(record: JobRecord, now: float) -> str:
    """Return how long it has run, or ran: ``4m 10s``, ``3h 02m``, ``2d 5h``."""
    if record.started_at is None:
        return "-"
    end = record.ended_at if record.ended_at is not None else now if record.active else None
    if end is None:
        return "-"
    seconds = max(0, int(end - record.started_at))
    if seconds < 60:
        return f"{seconds}s"
    if seconds < 3600:
        return f"{seconds // 60}m {seconds % 60:02d}s"
    if seconds < 86400:
        return f"{seconds // 3600}h {seconds % 3600 // 60:02d}m"
    return f"{seconds // 86400}d {seconds % 86400 // 3600}h"


def gpus(record: JobRecord) -> str:
    """Return which GPUs it has: ``0-3``, ``0,2``, ``none``, or ``-`` when it asked for none in particular."""
    if record.gpus is None:
        return "-"
    if not record.gpus:
        return "none"
    first, last = record.gpus[0], record.gpus[-1]
    if len(record.gpus) > 1 and record.gpus == tuple(range(first, last + 1)):
        return f"{first}-{last}"
    return ",".join(map(str, record.gpus))


def _last(record: JobRecord) -> Text:
    text = _last_words(record)
    text.no_wrap, text.overflow = True, "ellipsis"
    return text


def _last_words(record: JobRecord) -> Text:
    if record.message and record.state != "exited":
        return Text(safe(record.message, limit=300), STYLES.get(record.state, ""))
    if record.metrics:
        return Text("  ".join(f"{safe(name, limit=30)} {value:.6g}" for name, value in record.metrics.items()), "dim")
    return Text(safe(record.last_line or "", limit=300), "dim")
