"""What hidden states hold, for people: the layers, the thirteen verdicts, what to do."""

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


def sentence(result: Any) -> str:
    """Return the verdict in one sentence."""
    count = f"{len(result.samples):,} of {result.samples_total:,} samples ({', '.join(result.kinds)})"
    wrong = [check.name for check in result.checks if check.verdict in ("fail", "degraded")]
    if wrong:
        return f"{count}: {', '.join(wrong)}"
    unknown = sum(check.verdict == "unknown" for check in result.checks)
    return f"{count}: nothing wrong was found" + (f", {unknown} of 13 checks could not be made" if unknown else "")


def render(outcome: Outcome[Any]) -> RenderableType:
    """Return the whole answer; 80 columns are enough."""
    result = outcome.answer
    if result is None:
        return headline(outcome)
    parts: list[RenderableType] = [headline(outcome, sentence(result)), Text(), _parts(result), Text()]
    found = findings(outcome.findings)
    if found is not None:
        parts.append(found)
    return Group(*parts)


def _parts(result: Any) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="cyan")
    table.add_column("states", no_wrap=True)
    table.add_column("type", no_wrap=True)
    for label in ("width", "size", "largest", "input of layer", "cosine", "serving"):
        table.add_column(label, justify="right", no_wrap=True)
    for part in result.parts:
        table.add_row(
            part.name,
            safe(part.dtype, limit=12),
            f"{part.width:,}",
            _number(part.size_median),
            f"{part.largest:.4g}",
            "-" if part.layer is None else str(part.layer),
            _number(part.layer_cosine),
            _number(part.serving_cosine),
        )
    return table


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"
