"""A remapped drafter for people: where its rows come from, how much text they stand for, what was written."""

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
    made = f", {result.rows_initialised:,} made anew ({result.missing_policy})" if result.rows_initialised else ""
    return f"{result.rows_moved:,} rows moved{made}; written and verified"


def render(outcome: Outcome[Any]) -> RenderableType:
    """Return the whole answer; 80 columns are enough."""
    result = outcome.result
    parts: list[RenderableType] = [headline(outcome, sentence(result)), Text(), _rows(result), Text(), _files(result)]
    found = findings(outcome.findings)
    if found is not None:
        parts += [Text(), found]
    return Group(*parts)


def _rows(result: Any) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="cyan")
    table.add_column("rows of lm_head", style="cyan")
    for label in ("rows", "share", "counted tokens"):
        table.add_column(label, justify="right", no_wrap=True)
    total = result.draft_vocab_size
    for label, rows, share in (
        ("moved by token id", result.rows_moved, result.token_share_moved),
        (f"made anew ({result.missing_policy})", result.rows_initialised, result.token_share_initialised),
    ):
        table.add_row(label, f"{rows:,}", percent(rows / total), "-" if share is None else percent(share))
    left = result.token_share_without_row
    table.add_row("left behind: the mapping lacks them", f"{result.rows_dropped:,}", "", "")
    if left is not None:
        table.add_row("tokens without a row", "", "", percent(left))
    return table


def _files(result: Any) -> Table:
    table = Table(show_header=False, box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("what", style="cyan", no_wrap=True)
    table.add_column("value", overflow="fold")
    table.add_row("out", Text(safe(result.out, limit=400)))
    table.add_row("files", Text(safe(", ".join(result.files_written), limit=400)))
    table.add_row("size", f"{result.bytes_written / 1e6:,.1f} MB, of which {result.bytes_verified / 1e6:,.1f} MB read again")
    if result.verifier_cosine is not None:
        scale = "" if result.verifier_scale is None else f", multiplied by {result.verifier_scale:.4g}"
        table.add_row("verifier's rows", f"mean cosine with the drafter's {result.verifier_cosine:.2f}{scale}")
    return table
