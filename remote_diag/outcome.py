"""What comes back from one probe run on one host."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from .errors import StateUnknown
from .exitcodes import ExitCode

if TYPE_CHECKING:
    from .findings import Finding

SCHEMA_VERSION = 1
"""Version of every JSON object that rdiag prints; fields may be added under the same number, never changed."""

ResultT = TypeVar("ResultT")


@dataclass(frozen=True)
class Timing:
    """Where the time of one run went, seconds on this machine's monotonic clock."""

    connect_s: float
    """From opening the socket to a ready agent, uploads not included."""
    upload_s: float
    """Spent on bringing the agent and the probe to the host; 0 when both were there."""
    run_s: float
    """From the request to the last frame."""
    total_s: float
    phases: dict[str, float] = field(default_factory=dict)
    """Seconds of each phase of the connection, by name."""

    def as_dict(self) -> dict[str, Any]:
        """Return the ``timing`` object of ``--json``; seconds, rounded to microseconds."""
        plain = dataclasses.asdict(self)
        plain["phases"] = {name: round(value, 6) for name, value in self.phases.items()}
        return {name: round(value, 6) if isinstance(value, float) else value for name, value in plain.items()}


@dataclass(frozen=True)
class Outcome(Generic[ResultT]):
    """One probe, run on one host to its end."""

    host: str
    probe: str
    run_id: str
    status: str
    """``ok``, ``degraded``, ``fail``, ``unknown`` or ``skipped``."""
    answer: ResultT | None
    """The probe's validated result; None when the probe skipped itself. See :attr:`result`."""
    findings: tuple[Finding, ...]
    timing: Timing
    message: str = ""
    """Why the probe skipped itself."""
    kept: str | None = None
    """The run's directory on the host, when it was kept."""
    rerun: str | None = None
    """What to type on the host to run it again from there, when it was kept."""
    notes: tuple[str, ...] = ()
    baseline: dict[str, Any] | None = None
    """How the result differs from the host's baseline, or where that was saved; None when there is none."""

    @property
    def result(self) -> ResultT:
        """The probe's validated result; raises StateUnknown when the probe skipped itself."""
        if self.answer is None:
            raise StateUnknown(f"the probe {self.probe} gave no result: {self.message}", host=self.host)
        return self.answer

    @property
    def exit_code(self) -> ExitCode:
        """The exit code that stands for :attr:`status`."""
        from .findings import exit_code

        return exit_code(self.status)

    def as_dict(self) -> dict[str, Any]:
        """Return the object that ``--json`` prints."""
        plain: dict[str, Any] = {
            "schema_version": SCHEMA_VERSION,
            "host": self.host,
            "probe": self.probe,
            "run_id": self.run_id,
            "status": self.status,
            "result": None if self.answer is None else dataclasses.asdict(self.answer),  # type: ignore[call-overload]
            "findings": [dataclasses.asdict(finding) for finding in self.findings],
            "timing": self.timing.as_dict(),
        }
        if self.message:
            plain["message"] = self.message
        if self.baseline is not None:
            plain["baseline"] = self.baseline
        if self.kept:
            plain["kept"] = {"run_dir": self.kept, "rerun": self.rerun}
        if self.notes:
            plain["notes"] = list(self.notes)
        return plain
