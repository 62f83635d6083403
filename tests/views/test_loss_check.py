from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from probes import loss_check
from remote_diag.outcome import Outcome, Timing
from remote_diag.views.loss_check import number, render, sparkline
from tests.probes.test_loss_check import FakeContext, specforge


def shown(params: loss_check.Params, width: int = 80) -> str:
    context = FakeContext()
    result = loss_check.run(params, context)
    outcome: Outcome[Any] = Outcome("gpu8", "loss-check", "run", "fail", result, tuple(context.findings), Timing(0, 0, 0, 0))
    page = io.StringIO()
    Console(file=page, width=width, color_system=None).print(render(outcome))
    return page.getvalue()


def test_numbers_verdict_first() -> None:
    text = shown(loss_check.Params(loss=(19.2, 18.7), accuracy=(0.03, 0.05), draft_vocab_size=32000), 200)
    first, *rest = text.splitlines()
    assert first.startswith("gpu8: loss-check: fail - confidently-wrong: ")
    assert any(line.startswith("loss: loss 18.95 to 18.95; a uniform guess at most 10.37 (ln 32000)") for line in rest)
    assert any("ratio 1.83" in line for line in rest)
    assert any("next:" in line for line in rest)


def test_a_log_in_80_columns(tmp_path: Path) -> None:
    path = tmp_path / "log"
    losses = [15.0 - n / 10 for n in range(60)]
    path.write_text("".join(specforge(losses, [0.02 + n / 1000 for n in range(60)], k) for k in range(7)) + "loss=oops\n")
    text = shown(loss_check.Params(path=str(path), draft_vocab_size=32000))
    lines = text.splitlines()
    assert max(map(len, lines)) <= 80
    row = next(line for line in lines if line.startswith("loss_0"))
    assert row.split()[:7] == ["loss_0", "15", "9.1", "15", "9.1", "10.37", "60"]
    assert row.rstrip().endswith("▁")
    assert "█" in row
    assert "1 lines look like metrics and could not be read" in text
    assert "loss=oops" in text


def test_many_series_are_cut_and_counted(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("".join(specforge([2.0] * 3, [0.5] * 3, k) for k in range(20)))
    text = shown(loss_check.Params(path=str(path)))
    assert "24 more series" in text


def test_text_of_the_log_cannot_steer_the_terminal(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes("loss=\u202eoops \u009b31m\n".encode() + b"Finetuning from base model: /a\xc2\x9b2J\nLoaded vocab mapping\n")
    text = shown(loss_check.Params(path=str(path)))
    assert "\\u202e" in text
    assert not {"\x1b", "\x9b", "\u202e"} & set(text)


def test_an_outcome_without_result() -> None:
    outcome: Outcome[Any] = Outcome("gpu8", "loss-check", "run", "skipped", None, (), Timing(0, 0, 0, 0), message="why")
    page = io.StringIO()
    Console(file=page, width=80).print(render(outcome))
    assert page.getvalue() == "gpu8: loss-check: skipped - why\n"


@pytest.mark.parametrize(
    ("values", "line"),
    [([], ""), ([1.0], "▄"), ([2.0, 2.0], "▄▄"), ([0.0, 1.0], "▁█"), ([float(n) for n in range(8)], "▁▂▃▄▅▆▇█"), ([1e308, -1e308], "▄▄"), ([0.1] * 50, "▄" * 16)],
)
def test_sparkline(values: list[float], line: str) -> None:
    assert sparkline(values) == line


def test_a_sparkline_is_no_longer_than_asked() -> None:
    assert len(sparkline([float(n % 7) for n in range(1000)], 24)) == 24


def test_numbers_in_four_digits() -> None:
    assert [number(value) for value in (None, 19.23456, 0.00003125, 163840.0)] == ["-", "19.23", "3.125e-05", "1.638e+05"]
