"""Helpers for the tests of your own probes.

::

    context = RecordingContext(tmp_path)
    result = probe.module.run(probe.Params(), context)
    assert [finding.code for finding in context.findings] == ["little-space"]
"""

from __future__ import annotations

from os import PathLike, fspath
from time import monotonic

from .agent.context import Context as AgentContext
from .agent.context import Leave
from .findings import Finding
from .messages import Progress, parse_finding, parse_progress

__all__ = ["Leave", "RecordingContext"]


class RecordingContext(AgentContext):
    """The context that ``run`` gets on a host, with everything it is told kept for a test to look at.

    It is the host's own class, so a finding that would be refused there is refused here. ``unfit``, ``skip`` and a
    failing ``require`` raise :class:`Leave`.

    Args:
        run_dir: folder for temporary files; pytest's ``tmp_path`` fits.
        seconds: what ``remaining()`` starts from.
    """

    def __init__(self, run_dir: str | PathLike[str], *, seconds: float = 600.0) -> None:
        self.findings: list[Finding] = []
        self.progress_reports: list[Progress] = []
        """As on a host, reports in quick succession are thinned out; the one that completes the total is not."""
        super().__init__("test-run", fspath(run_dir), monotonic() + seconds, self._take)

    def _take(self, kind: str, payload: bytes) -> None:
        if kind == "finding":
            self.findings.append(parse_finding(payload))
        else:
            self.progress_reports.append(parse_progress(payload))
