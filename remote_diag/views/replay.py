"""A replay for people: one line a hypothesis, the best first."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from .outcome import findings, headline

if TYPE_CHECKING:
    from rich.console import RenderableType

    from ..outcome import Outcome


def sentence(result: Any) -> str:
    """Return the verdict in one sentence."""
    best = result.runs[result.best]
    which = "as declared" if result.best == 0 else "under another hypothesis than declared"
    return f"best {which}: top-1 {best.top1:.3f}, accepts {best.accept_length:.2f} tokens"


def render(outcome: Outcome[Any]) -> RenderableType:
    """Return the whole answer; 80 columns are enough."""
    result = outcome.answer
    if result is None:
        return headline(outcome)
    parts: list[RenderableType] = [headline(outcome, sentence(result)), Text(), _runs(result), Text()]
    found = findings(outcome.findings)
    if found is not None:
        parts.append(found)
    return Group(*parts)


def _runs(result: Any) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="cyan")
    for label in ("mapping", "norm", "shift", "aux", "residual"):
        table.add_column(label, no_wrap=True)
    for label in ("loss", "divergence", "top-1", "accepts"):
        table.add_column(label, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for run in sorted(result.runs, key=lambda run: float(run.divergence)):
        table.add_row(
            run.mapping,
            "-" if run.norm is None else "on" if run.norm else "off",
            str(run.shift),
            "-".join(map(str, run.aux_order)),
            "normed" if run.norm_before_residual else "plain",
            f"{run.loss:.3f}",
            f"{run.divergence:.3f}",
            f"{run.top1:.3f}",
            f"{run.accept_length:.2f}",
            "<- declared" if run == result.runs[0] else "",
        )
    return table
