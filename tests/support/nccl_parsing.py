"""Parses output of nccl-tests in this process, as ``rdiag nccl --parse`` does."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from probes import nccl
from remote_diag.findings import Finding, status
from remote_diag.testing import RecordingContext


@dataclass(frozen=True)
class Parsed:
    """What came of a text."""

    result: nccl.Result
    findings: tuple[Finding, ...]

    @property
    def status(self) -> str:
        return status(self.findings)

    @property
    def codes(self) -> dict[str, str]:
        """Code -> level."""
        return {finding.code: finding.level for finding in self.findings}

    def finding(self, code: str) -> Finding:
        (found,) = [finding for finding in self.findings if finding.code == code]
        return found


def parse(text: str | bytes, **params: Any) -> Parsed:
    context = RecordingContext(os.curdir)
    data = text.encode() if isinstance(text, str) else text
    result = nccl.parse(data, nccl.Params(**params), context)
    return Parsed(result, tuple(context.findings))
