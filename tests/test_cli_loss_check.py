from __future__ import annotations

import json
from pathlib import Path

from tests.probes.test_loss_check import specforge
from tests.support.cli import rdiag


def test_numbers_on_the_command_line(tmp_path: Path) -> None:
    ran = rdiag("loss-check", "--loss", "19.2,18.7", "--accuracy", "3%,0.05", "--draft-vocab-size", "32000", "--json", home=tmp_path)
    assert ran.code == 1
    answer = json.loads(ran.out)
    assert (answer["probe"], answer["status"], answer["result"]["verdict"]) == ("loss-check", "fail", "confidently-wrong")
    assert answer["result"]["interpretation"]["accuracy_start"] == 0.04
    assert "loss-above-uniform" in {finding["code"] for finding in answer["findings"]}


def test_a_log_on_the_host(tmp_path: Path) -> None:
    path = tmp_path / "a log; $(x).txt"
    path.write_text(specforge([2.0] * 6, [0.6] * 6))
    ran = rdiag("loss-check", str(path), "--draft-vocab-size", "32000", "--mask-density", "0.5", home=tmp_path)
    assert ran.code == 0, ran.err
    assert ran.out.startswith("local: loss-check: ok - healthy: ")


def test_misuse(tmp_path: Path) -> None:
    assert rdiag("loss-check", home=tmp_path).code == 2
    assert rdiag("loss-check", "--loss", "1,two", home=tmp_path).code == 2
    both = rdiag("loss-check", "/some/log", "--loss", "1", home=tmp_path)
    assert both.code == 2
    assert "not both" in both.err
    assert rdiag("loss-check", "/absent/log", home=tmp_path).code == 7
