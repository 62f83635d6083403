"""A triage for people: the contradiction, every hypothesis with its numbers, the cause."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from ..text import safe
from .outcome import headline

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import RenderableType

    from ..outcome import Outcome
    from ..triage_ranking import Judged

_STYLES = {"supported": "bold red", "undecided": "magenta", "refuted": "green"}
_SHOWN = 300


def sentence(result: Any) -> str:
    """Return the verdict in one sentence."""
    if result.cause is not None:
        return f"the cause is {result.cause}"
    if result.supported:
        return f"{len(result.supported)} hypotheses are supported: {', '.join(result.supported)}"
    if result.undecided:
        return f"no cause found; {len(result.undecided)} of {len(result.hypotheses)} hypotheses are undecided"
    return f"none of {len(result.hypotheses)} hypotheses is the cause"


def render(outcome: Outcome[Any]) -> RenderableType:
    """Return the whole answer; 80 columns are enough."""
    result = outcome.result
    parts: list[RenderableType] = [headline(outcome, sentence(result)), Text(safe(result.contradiction.text))]
    if result.accuracy_ceiling is not None:
        ceiling = f"exchanging the two mappings would leave an accuracy of at most {result.accuracy_ceiling:.3g}"
        parts.append(Text(ceiling))
    parts += [Text(f"note: {safe(note)}", "dim") for note in result.notes]
    parts += [Text(), _table(result.hypotheses)]
    return Group(*parts)


def _table(judged: tuple[Judged, ...]) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column("verdict", no_wrap=True, min_width=9)
    table.add_column("what", overflow="fold")
    for one in judged:
        table.add_row(Text(one.verdict, _STYLES[one.verdict]), Text(f"{safe(one.id)}: {safe(one.claim)}"))
        for line in _support(one):
            table.add_row("", Text(line, "dim"))
    return table


def _support(one: Judged) -> Iterator[str]:
    for line in one.evidence:
        yield safe(line, limit=_SHOWN)
    explains = one.explains
    if explains.text:
        yield f"explains: {safe(explains.text, limit=_SHOWN)}"
    numbers = [
        f"{label}{_number(value)} explained, {_number(seen)} observed"
        for label, value, seen in (
            ("accuracy at most ", explains.accuracy, explains.observed_accuracy),
            ("loss ", explains.loss, explains.observed_loss),
        )
        if value is not None
    ]
    if numbers:
        yield "; ".join(numbers)
    if one.missing:
        yield f"to decide it, add to the case: {', '.join(map(safe, one.missing))}"


def _number(value: float | None) -> str:
    return "nothing" if value is None else f"{value:.3g}"


def next_steps(judged: tuple[Judged, ...]) -> list[str]:
    """Return what to type next, for what is supported; where nothing is, for what is undecided.

    Plain lines, never wrapped: they are commands to copy.
    """
    chosen = [one for one in judged if one.verdict == "supported"] or [one for one in judged if one.verdict == "undecided"]
    commands = dict.fromkeys(safe(one.next_command, limit=4000) for one in chosen if one.next_command)
    return ["next:", *(f"  {line}" for line in commands)] if commands else []
