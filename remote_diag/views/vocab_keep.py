"""A mapping that was written for a trainer, for people: what it costs to keep it, and what would override it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from ..text import safe
from .outcome import findings, headline
from .vocab_compare import percent

if TYPE_CHECKING:
    from rich.console import RenderableType

    from ..outcome import Outcome


def sentence(result: Any) -> str:
    """Return what was done in one sentence."""
    told = f"the mapping of {result.draft_vocab_size:,} rows is written"
    if result.cheaper is not None:
        told += "; keeping it is cheaper" if result.cheaper else "; keeping it costs coverage"
    others = sum(1 for cache in result.caches if not cache.same)
    return f"{told}; {others} file{'' if others == 1 else 's'} would override it" if others else told


def render(outcome: Outcome[Any]) -> RenderableType:
    """Return the whole answer; 80 columns are enough."""
    result = outcome.result
    table = Table(show_header=False, box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("what", style="cyan", no_wrap=True)
    table.add_column("value", overflow="fold")
    table.add_row("out", Text(safe(result.out, limit=400)))
    table.add_row("files", ", ".join(result.files_written))
    table.add_row("rows", f"{result.draft_vocab_size:,} of {result.target_vocab_size:,} tokens")
    if result.rows_kept is not None:
        table.add_row("rows that keep their token", f"{result.rows_kept:,} would get another one")
    for label, share in (("coverage, kept", result.coverage_kept), ("coverage, other", result.coverage_other)):
        if share is not None:
            table.add_row(label, f"{percent(share)} of the counted tokens")
    parts: list[RenderableType] = [headline(outcome, sentence(result)), Text(), table]
    found = findings(outcome.findings)
    if found is not None:
        parts += [Text(), found]
    return Group(*parts)
