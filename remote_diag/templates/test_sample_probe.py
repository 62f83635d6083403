"""Tests of the probe sample-probe: called directly, and through the agent on this machine."""

from __future__ import annotations

from pathlib import Path

import remote_diag
from remote_diag.testing import RecordingContext

PROBE = Path(__file__).resolve().parents[1] / "probes" / "sample_probe.py"


def test_it_measures(tmp_path: Path) -> None:
    probe = remote_diag.load_probe(PROBE)
    context = RecordingContext(tmp_path)
    result = probe.module.run(probe.Params(path=str(tmp_path), least_free=0.0), context)
    assert 0 <= result.free_bytes <= result.total_bytes
    assert context.findings == []


def test_little_space_is_found(tmp_path: Path) -> None:
    probe = remote_diag.load_probe(PROBE)
    context = RecordingContext(tmp_path)
    probe.module.run(probe.Params(path=str(tmp_path), least_free=1.0), context)
    assert [finding.code for finding in context.findings] == ["little-space"]


def test_through_the_agent(tmp_path: Path) -> None:
    with remote_diag.connect("local") as host:
        outcome = host.run(PROBE, {"path": str(tmp_path), "least_free": 0.0})
    assert outcome.status == "ok"
    assert outcome.result is not None
    assert outcome.result.total_bytes > 0
