"""What a probe found, and the one status and exit code that all findings of a run add up to."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from .exitcodes import ExitCode

Level: TypeAlias = Literal["ok", "degraded", "fail", "unknown", "skipped"]
Status: TypeAlias = Level
Measured: TypeAlias = bool | int | float | str | None

LEVELS: tuple[Level, ...] = get_args(Level)

_EXIT_CODES: dict[str, ExitCode] = {
    "ok": ExitCode.OK,
    "degraded": ExitCode.FINDINGS,
    "fail": ExitCode.FINDINGS,
    "unknown": ExitCode.UNKNOWN_STATE,
    "skipped": ExitCode.UNKNOWN_STATE,
}


@dataclass(frozen=True)
class Finding:
    """One thing that a probe established, or could not establish.

    The texts come from the host: show them through :func:`remote_diag.text.safe` only.
    """

    level: Level
    code: str
    """Stable name of what was found, kebab-case, for programs: ``rows-out-of-range``."""
    message: str
    """One sentence for people."""
    subject: str | None = None
    """What it is about: a file, a GPU, a link."""
    value: Measured = None
    """What was measured."""
    unit: str | None = None
    """Unit of ``value`` and ``threshold``."""
    threshold: Measured = None
    """What ``value`` was held against."""
    threshold_source: str | None = None
    """Where the threshold came from: a data sheet, a neighbour, a flag."""
    evidence: tuple[str, ...] = ()
    """Lines that let a person check the finding: output, counters, the command that shows it."""
    action: str | None = None
    """What to do next."""


def status(findings: Iterable[Finding], *, skipped: bool = False) -> Status:
    """Return what a run that ended well amounts to.

    The worst finding decides: fail, degraded, unknown. Without one of these a run is ``skipped`` when the probe
    skipped itself (``skipped``) or gave no other findings than skipped ones, and ``ok`` otherwise.
    """
    levels = {finding.level for finding in findings}
    worst: tuple[Status, ...] = ("fail", "degraded", "unknown")
    for level in worst:
        if level in levels:
            return level
    return "skipped" if skipped or levels == {"skipped"} else "ok"


def exit_code(status: str) -> ExitCode:
    """Return the exit code that stands for a run's status: could-not-measure is never OK."""
    return _EXIT_CODES[status]
