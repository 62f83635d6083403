"""A stand-in for a session that runs probes in this process: many runs in little time, without an agent."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from remote_diag.agent.context import Leave
from remote_diag.discovery import find
from remote_diag.errors import EnvironmentUnfit, ProbeError
from remote_diag.findings import status
from remote_diag.host import Host
from remote_diag.outcome import Outcome, Timing
from remote_diag.parameters import coerce
from remote_diag.testing import RecordingContext


class InProcess:
    """What triage needs of a session.

    Args:
        folder: for temporary files.
        name: the host's name.
    """

    def __init__(self, folder: Path, name: str = "local") -> None:
        self.host = Host(name=name, transport="local")
        self.notes: list[str] = []
        self.ran: list[str] = []
        """Names of the probes that were run, in order."""
        self._folder = folder

    def run(self, probe: Any, params: Any = None, *, timeout: float | None = None) -> Outcome[Any]:
        """Run a probe; errors are those that a session raises."""
        loaded = find(probe) if isinstance(probe, str) else probe
        self.ran.append(loaded.name)
        context = RecordingContext(self._folder, seconds=timeout or 600.0)
        begun = time.monotonic()
        try:
            answer = loaded.module.run(coerce(loaded, params), context)
        except Leave as leave:
            raise EnvironmentUnfit(str(leave), host=self.host.name) from leave
        except Exception as error:
            raise ProbeError(f"{type(error).__name__}: {error}", host=self.host.name) from error
        # What a host cannot send is not accepted here either.
        loaded.result_adapter.validate_json(loaded.result_adapter.dump_json(answer), strict=True)
        found = tuple(context.findings)
        timing = Timing(connect_s=0.0, upload_s=0.0, run_s=time.monotonic() - begun, total_s=0.0)
        return Outcome(self.host.name, loaded.name, "run", status(found), answer, found, timing)
