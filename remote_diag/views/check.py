"""A check report as a table: the verdict first, then one row a check; below a row that is not ok, what to do."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group
from rich.table import Table
from rich.text import Text

from ..text import safe
from .outcome import STYLES, headline, support

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import RenderableType

    from ..check import CheckReport
    from ..findings import Finding

_NAMED = 6
_BAD = ("fail", "degraded", "unknown")


def sentence(findings: Sequence[Finding]) -> str:
    """Return what the findings add up to: how many of each level that is not ok, and which."""
    parts = []
    for level, word in (("fail", "failed"), ("degraded", "degraded"), ("unknown", "unknown"), ("skipped", "skipped")):
        codes = list(dict.fromkeys(finding.code for finding in findings if finding.level == level))
        if codes:
            more = f" and {len(codes) - _NAMED} more" if len(codes) > _NAMED else ""
            parts.append(f"{len(codes)} {word} ({', '.join(codes[:_NAMED])}{more})")
    good = sum(finding.level == "ok" for finding in findings)
    return "; ".join([*parts, f"{good} ok"])


def render(report: CheckReport) -> RenderableType:
    """Return the report of one host; 80 columns are enough."""
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("level", no_wrap=True)
    table.add_column("check", no_wrap=True, style="cyan")
    table.add_column("what", overflow="fold", ratio=1)
    for finding in report.findings:
        table.add_row(Text(finding.level, STYLES.get(finding.level, "")), Text(safe(finding.code)), _what(finding))
    return Group(headline(report, sentence(report.findings)), table)


def _what(finding: Finding) -> Text:
    text = Text()
    if finding.subject:
        text.append(f"{safe(finding.subject)}: ")
    text.append(safe(finding.message))
    if finding.level in _BAD:
        for line in support(finding):
            text.append(f"\n{line}", "dim")
    else:
        for line in finding.evidence:
            text.append(f"; {safe(line, limit=300)}", "dim")
    if finding.action and finding.level in _BAD:
        text.append("\nfix: ", "bold")
        text.append(safe(finding.action))
    return text
