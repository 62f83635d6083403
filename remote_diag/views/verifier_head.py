"""Which mapping a drafter's head follows, for people: the verdict, every guess with its evidence, what to do."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from ..text import safe
from .outcome import findings, headline

if TYPE_CHECKING:
    from rich.console import RenderableType

    from ..outcome import Outcome

_METHODS = {"exact": "bit for bit", "cosine": "by direction", "similarity": "by neighbourhood"}


def sentence(result: Any) -> str:
    """Return the verdict in one sentence."""
    head = result.lm_head
    if result.follows is None:
        return f"cannot tell which mapping the {head.rows:,} rows follow"
    told = f"the head follows {safe(result.follows)}, {_METHODS[result.method]}"
    if result.method == "exact":
        told += f" in {head.rows_exact:,} of {head.rows:,} rows"
    return told


def render(outcome: Outcome[Any]) -> RenderableType:
    """Return the whole answer; 80 columns are enough."""
    result = outcome.answer
    if result is None:
        return headline(outcome)
    parts: list[RenderableType] = [headline(outcome, sentence(result)), Text()]
    for head in (result.lm_head, result.verifier_lm_head):
        if head is not None:
            parts += [_guesses(head), Text()]
    found = findings(outcome.findings)
    if found is not None:
        parts.append(found)
    return Group(*parts)


def _guesses(head: Any) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="cyan")
    table.add_column(Text(safe(head.name, limit=40)), overflow="fold")
    for label in ("equal rows", "cosine", "similarity"):
        table.add_column(label, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for guess in head.guesses:
        cells = [_number(value) for value in (guess.exact, guess.cosine, guess.similarity)]
        mark = "<- followed" if guess.name == head.follows else ""
        table.add_row(safe(guess.name), *cells, mark, style="bold" if mark else "")
    return table


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
