"""Findings about one thing, without naming it each time."""

from __future__ import annotations

from dataclasses import dataclass, field

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from remote_diag.probe import Context


@dataclass
class Report:
    """Passes findings on to a probe's context, and remembers which levels there were."""

    context: Context
    subject: str
    levels: list[str] = field(default_factory=list)

    def ok(self, code: str, message: str, **more: Any) -> None:
        """Report what was looked at and found in order."""
        self._tell("ok", code, message, more)

    def degraded(self, code: str, message: str, **more: Any) -> None:
        """Report what works worse than it could."""
        self._tell("degraded", code, message, more)

    def fail(self, code: str, message: str, **more: Any) -> None:
        """Report a fault."""
        self._tell("fail", code, message, more)

    def unknown(self, code: str, message: str, **more: Any) -> None:
        """Report what could not be found out."""
        self._tell("unknown", code, message, more)

    @property
    def sound(self) -> bool:
        """Whether nothing but ok was reported."""
        return set(self.levels) <= {"ok"}

    def part(self) -> Report:
        """Return a report of the same thing that counts anew, for :attr:`sound`."""
        return Report(self.context, self.subject)

    def _tell(self, level: Any, code: str, message: str, more: dict[str, Any]) -> None:
        self.levels.append(level)
        self.context.finding(level, code, message, **{"subject": self.subject, **more})
