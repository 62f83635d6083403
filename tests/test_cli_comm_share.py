from __future__ import annotations

import json
from pathlib import Path

from tests.probes.test_comm_share import verify_steps
from tests.support.cli import rdiag
from tests.support.profiler_traces import write_trace


def test_a_trace_on_the_host(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "a trace; $(x).json.gz", verify_steps(), "gzip")
    ran = rdiag("comm-share", str(path), "--step", "verify", "--exposed-limit", "0.95", "--json", home=tmp_path)
    assert ran.code == 0, ran.err
    answer = json.loads(ran.out)
    assert (answer["probe"], answer["status"]) == ("comm-share", "ok")
    assert answer["result"]["devices"][0]["communication_share"] == 0.97
    ran = rdiag("comm-share", str(path), "--step", "verify", home=tmp_path)
    assert ran.code == 1
    assert ran.out.startswith("local: comm-share: degraded - communication takes 97.0 % of verify on GPU 0, 93.0 % exposed\n")


def test_misuse(tmp_path: Path) -> None:
    assert rdiag("comm-share", home=tmp_path).code == 2
    assert rdiag("comm-share", "/t.json", "--pid", "1", home=tmp_path).code == 2
    absent = rdiag("comm-share", "/absent.json", home=tmp_path)
    assert absent.code == 7
    assert "cannot read the trace" in absent.err
