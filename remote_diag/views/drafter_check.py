"""A check of a drafter for people: what it is, then everything that was found, the worst first."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from ..text import safe
from .outcome import findings, headline

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import RenderableType

    from ..outcome import Outcome

_ORDER = ("fail", "degraded", "unknown", "skipped", "ok")


def sentence(outcome: Outcome[Any]) -> str:
    """Return how many findings of each kind there are."""
    counts = Counter(str(finding.level) for finding in outcome.findings)
    told = [f"{counts[level]} {level}" for level in _ORDER if counts[level] and level != "ok"]
    return ", ".join(told) if told else f"nothing wrong in {counts['ok']} checks"


def render(outcome: Outcome[Any]) -> RenderableType:
    """Return the whole check; 80 columns are enough."""
    result = outcome.answer
    if result is None:
        return headline(outcome)
    table = Table(show_header=False, box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("what", style="cyan", no_wrap=True)
    table.add_column("value", overflow="fold")
    for label, value in _facts(result):
        table.add_row(label, Text(value))
    parts: list[RenderableType] = [headline(outcome, sentence(outcome)), Text(), table, Text()]
    found = findings(sorted(outcome.findings, key=lambda finding: _ORDER.index(finding.level)))
    if found is not None:
        parts.append(found)
    return Group(*parts)


def _facts(result: Any) -> Iterator[tuple[str, str]]:
    yield "checkpoint", f"{safe(result.path)} ({result.kind}, {result.tensors} tensors)"
    yield "written by", f"{result.producer}: {safe(result.producer_reason)}"
    if result.draft_vocab_size is not None:
        of = "" if result.target_vocab_size is None else f" of {result.target_vocab_size:,}"
        yield "draft tokens", f"{result.draft_vocab_size:,}{of} (d2t: {result.encoding})"
    if result.hidden_size is not None:
        of = "" if result.target_hidden_size is None else f", the target's {result.target_hidden_size:,}"
        yield "hidden size", f"{result.hidden_size:,}{of}"
    if result.aux_layer_ids is not None:
        yield "layers it is fed", ", ".join(str(item) for item in result.aux_layer_ids)
    if result.layer_keys:
        yield "its layers", safe(", ".join(result.layer_keys), limit=200)
    if result.head_follows is not None:
        yield "its head follows", safe(result.head_follows)
    if result.special_tokens_missing:
        yield "special tokens missing", f"{len(result.special_tokens_missing):,}"
