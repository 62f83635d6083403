from __future__ import annotations

from pathlib import Path

import pytest

from probes import hello
from remote_diag.probe import Context
from remote_diag.testing import Leave, RecordingContext


def test_a_probe_called_directly(tmp_path: Path) -> None:
    context = RecordingContext(tmp_path)
    assert hello.run(hello.Params(name="Ada"), context).greeting == "Hello, Ada!"
    assert [(report.done, report.total, report.unit) for report in context.progress_reports] == [(1, 1, "greeting")]


def test_it_is_the_context_that_probes_are_typed_with(tmp_path: Path) -> None:
    context: Context = RecordingContext(tmp_path, seconds=5)
    assert context.run_dir == str(tmp_path)
    assert 0 < context.remaining() <= 5


def test_findings_are_kept_and_checked_as_on_a_host(tmp_path: Path) -> None:
    context = RecordingContext(tmp_path)
    context.finding("fail", "too-slow", "slow", value=1.5, unit="s", evidence=("a",))
    assert [(found.level, found.code, found.value, found.evidence) for found in context.findings] == [
        ("fail", "too-slow", 1.5, ("a",))
    ]
    with pytest.raises(ValueError, match="code must be words"):
        context.finding("fail", "Too Slow", "slow")


def test_ending_early(tmp_path: Path) -> None:
    context = RecordingContext(tmp_path)
    assert context.require("json").loads("1") == 1
    with pytest.raises(Leave) as caught:
        context.require("no_such_module_anywhere")
    assert (caught.value.outcome, caught.value.hint is None) == ("environment", False)
    with pytest.raises(Leave, match="nothing to do"):
        context.skip("nothing to do")
