"""Metrics of a job: the library that reads them, the alerts and when exactly they are raised, the views and pictures."""

from __future__ import annotations

import math
import random
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import pytest

from remote_diag.errors import LocalIOError, UsageProblem
from remote_diag.findings import Finding
from remote_diag.metric_alerts import DIVERGED_POINTS
from remote_diag.metrics import Metrics, Row, library
from remote_diag.views import metrics_plot
from remote_diag.views.metrics import alert_text, chart, line

from .support.cli import CHECKOUT

ROOT_CAUSE = b"""\
[rank2]:[E1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7)
Failures:
[0]:
  rank      : 2 (local_rank: 2)
Root Cause (first observed failure):
[1]:
  rank      : 5 (local_rank: 5)
[2]:
  rank      : 7 (local_rank: 7)
"""


def losses(*values: float, name: str = "loss") -> bytes:
    return "".join(f"step={step} {name}={value}\n" for step, value in enumerate(values)).encode()


def read(data: bytes, *, stream: str = "stdout", vocabulary: int | None = None) -> Metrics:
    metrics = Metrics(vocabulary=vocabulary)
    metrics.feed(stream, data)
    metrics.finish()
    return metrics


def alerts(metrics: Metrics) -> dict[str, Finding]:
    found = metrics.alerts.findings()
    assert len({(one.code, one.subject) for one in found}) == len(found)
    return {one.code: one for one in found}


# --- The library ---


def test_the_library_is_found_as_a_wheel_holds_it(tmp_path: Path) -> None:
    """Far from the checkout, and with another package called ``probes`` in reach."""
    shutil.copytree(CHECKOUT / "remote_diag", tmp_path / "remote_diag", ignore=shutil.ignore_patterns("__pycache__"))
    shipped = tmp_path / "remote_diag" / "_shipped" / "probes"
    shutil.copytree(CHECKOUT / "probes", shipped, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "probes").mkdir()
    (tmp_path / "probes" / "__init__.py").write_text("raise RuntimeError('the wrong one')")
    code = (
        "from remote_diag.metrics import Metrics, library\n"
        "metrics = Metrics(); metrics.feed('stdout', b'step=1 loss=2.5\\n'); metrics.finish()\n"
        "print(library('training_log').__file__, metrics.rows()[0].series.last.value)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == [str(shipped / "lib" / "training_log.py"), "2.5"], done.stderr


def test_in_a_checkout_it_is_the_one_beside_the_package() -> None:
    assert Path(library("training_log").__file__) == CHECKOUT / "probes" / "lib" / "training_log.py"
    assert library("training_log") is library("training_log")


# --- Series ---


def test_series_of_several_logs_stay_apart() -> None:
    metrics = Metrics()
    metrics.feed("stdout", losses(4.0, 3.0))
    metrics.feed("rank1", losses(9.0))
    metrics.feed("stdout", b"step=2 lo")
    metrics.feed("rank1", b"step=1 loss=8.0\n")
    metrics.feed("stdout", b"ss=2.0 lr=1e-4")
    metrics.finish()
    rows = {(row.stream, row.label): [point.value for point in row.points()] for row in metrics.rows()}
    assert rows == {
        ("stdout", "loss"): [4.0, 3.0, 2.0], ("rank1", "loss rank 1"): [9.0, 8.0], ("stdout", "lr"): [1e-4],
    }  # fmt: skip
    first = metrics.rows()[0].as_dict()
    assert (first["first"], first["lowest"], first["highest"], first["last"], first["count"]) == (4.0, 2.0, 4.0, 2.0, 3)


def test_points_are_told_by_line() -> None:
    told: list[str] = []
    metrics = Metrics(on_points=lambda stream, points: told.append(line(stream, points)))
    metrics.feed("stdout", b"step=3 loss=1.5 lr=2e-5\nnothing\nstep=4 loss=1.25\n")
    assert told == ["step 3  loss 1.5  lr 2e-05", "step 4  loss 1.25"]


def test_a_line_that_may_go_on_is_read_when_the_log_is_quiet() -> None:
    metrics = Metrics()
    metrics.feed("stdout", b"[12:00:00] INFO     {'loss': 2.5, 'lr': 0.1}" + b" " * 30 + b"trainer.py:12\n")
    assert metrics.rows() == []
    metrics.settle()
    assert [row.label for row in metrics.rows()] == ["loss", "lr"]


def test_no_numbers_and_unknown_forms_are_not_ok() -> None:
    assert [(one.level, one.code) for one in read(b"hello\n").findings()] == [("unknown", "no-metrics")]
    assert read(losses(2.0)).findings() == ()


# --- Alerts ---


def test_a_loss_that_is_not_a_number() -> None:
    found = alerts(read(losses(3.0, float("nan"), float("nan"))))
    assert list(found) == ["not-finite"]
    assert (found["not-finite"].level, found["not-finite"].subject) == ("fail", "loss")
    assert "step 1" in found["not-finite"].message
    overflow = alerts(read(b"step=1 loss=2.0 grad_norm=inf\n"))
    assert overflow["not-finite"].level == "degraded"


def test_a_loss_above_a_uniform_guess() -> None:
    above, at = 1.11 * math.log(1000), 1.09 * math.log(1000)
    found = alerts(read(losses(*[above] * 5), vocabulary=1000))
    assert found["loss-above-uniform"].level == "fail"
    assert "confidently wrong: mapping or shift, not warm-up" in found["loss-above-uniform"].message
    assert alerts(read(losses(*[above] * 4), vocabulary=1000)) == {}
    assert alerts(read(losses(*[at] * 50), vocabulary=1000)) == {}
    assert alerts(read(losses(*[above] * 50))) == {}


def test_a_loss_that_falls_below_the_guess_keeps_a_trace() -> None:
    data = losses(*[9.0] * 5, *[7.2] * 20)
    assert alerts(read(data, vocabulary=1000))["loss-above-uniform"].level == "fail"
    data = losses(*[9.0] * 5, *[6.5] * 5)
    after = alerts(read(data, vocabulary=1000))["loss-above-uniform"]
    assert after.level == "degraded"
    assert "it fell to 6.5 by step 7" in after.message


def test_a_total_over_steps_is_held_against_the_guess_summed_over_them() -> None:
    def speculators(total: float) -> bytes:
        steps = ", ".join(f"train/loss_{k}={total / 3:.4f}, train/full_acc_{k}=0.1, train/cond_acc_{k}=0.1" for k in range(3))
        return f"{steps}, train/loss={total:.4f}, epoch=0, lr=1e-05\n".encode() * 8

    fine = read(speculators(3 * 6.5), vocabulary=1000)
    assert {row.series.key.family for row in fine.rows()} == {"speculators"}
    assert alerts(fine) == {}
    assert "loss-above-uniform" in {one.code for one in read(speculators(3 * 8.0), vocabulary=1000).alerts.findings()}


def test_divergence_takes_many_points_in_a_row() -> None:
    calm = [1.0] * DIVERGED_POINTS
    assert alerts(read(losses(*calm, *[2.01] * (DIVERGED_POINTS - 1)))) == {}
    assert alerts(read(losses(*calm, *[1.99] * 100))) == {}
    spikes = [*[5.0] * (DIVERGED_POINTS - 1), 1.0] * 4
    assert alerts(read(losses(*calm, *spikes))) == {}
    found = alerts(read(losses(*calm, *[2.01] * DIVERGED_POINTS)))
    assert (found["diverged"].level, found["diverged"].threshold) == ("fail", 2.0)
    assert alerts(read(losses(*calm, *[2.01] * DIVERGED_POINTS, 1.0)))["diverged"].level == "degraded"
    assert alerts(read(losses(*[0.001] * 50, *[0.05] * 100))) == {}


def test_noise_is_no_divergence() -> None:
    source = random.Random(4)  # noqa: S311 - the same noise every time
    noisy = [8 * math.exp(-step / 500) + source.random() for step in range(3000)]
    assert alerts(read(losses(*noisy))) == {}


def test_the_first_failing_rank_is_the_root_cause() -> None:
    found = alerts(read(ROOT_CAUSE))
    assert (found["nccl-error"].level, found["root-cause"].level) == ("fail", "fail")
    assert found["first-failing-rank"].value == 5
    waiting = ROOT_CAUSE.split(b"\n")[0] + b"\n[rank4]: NCCL error: unhandled\n"
    found = alerts(read(waiting))
    assert found["first-failing-rank"].value == 2
    assert found["nccl-error"].value == 2
    assert len(found["nccl-error"].evidence) == 2


@pytest.mark.parametrize(
    ("text", "code", "level"),
    [
        (b"NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus", "xid", "fail"),
        (b"RuntimeError: CUDA error: an illegal memory access", "cuda-error", "fail"),
        (b"torch.OutOfMemoryError: CUDA out of memory.", "cuda-out-of-memory", "fail"),
        (b"Traceback (most recent call last):", "exception", "degraded"),
        (b"warning: loss is nan, skipped", "not-a-number", "degraded"),
    ],
)
def test_faults_in_the_log(text: bytes, code: str, level: str) -> None:
    assert {one.code: one.level for one in read(text + b"\n").alerts.findings()} == {code: level}
    in_rank = alerts(read(text + b"\n", stream="rank3.err"))
    assert ("first-failing-rank" in in_rank) == (level == "fail")


def test_silence_counts_while_connected() -> None:
    told: list[Finding] = []
    metrics = Metrics(stall=60.0, on_alert=told.append)
    watch = metrics.alerts
    watch.tick(1e6)
    watch.listen(0.0)
    watch.tick(59.0)
    watch.deaf()
    watch.tick(500.0)
    watch.listen(500.0)
    watch.heard(550.0)
    watch.tick(609.0)
    assert told == []
    watch.tick(610.0)
    watch.tick(620.0)
    assert [(one.level, one.code, one.value) for one in told] == [("degraded", "no-output", 1.0)]
    watch.heard(700.0)
    assert "then it went on" in watch.findings()[0].message
    watch.tick(760.0)
    assert len(told) == 2
    endless = Metrics()
    endless.alerts.listen(0.0)
    endless.alerts.tick(1e9)
    assert endless.alerts.findings() == ()


def test_an_alert_is_told_once_and_cannot_steer_a_terminal() -> None:
    told: list[Finding] = []
    metrics = Metrics(on_alert=told.append)
    metrics.feed("stdout", b"step=1 loss=nan\n" * 10)
    assert len(told) == 1
    assert alert_text(Finding("fail", "x", "a\x1b[2Jb\nc", subject="s")) == "s: a\\x1b[2Jb\\x0ac"


# --- Pictures ---


def test_a_chart_has_its_extremes_at_its_edges() -> None:
    lines = chart([10.0, 5.0, 0.0], width=40, height=4)
    assert [one.strip() for one in (lines[0][:9], lines[-1][:9])] == ["10", "0"]
    assert lines[0].endswith("█  ")
    assert lines[-1].endswith("██▁")
    assert all(len(one) <= 40 for one in chart(list(map(float, range(5000))), 40, 6))
    assert chart([], 40, 4) == []
    assert len(chart([3.0], 40, 4)) == 4


def picture(data: bytes) -> str:
    return metrics_plot.page("job <b>", read(data).rows())


def test_a_page_needs_nothing_else_and_escapes(tmp_path: Path) -> None:
    page = picture(losses(3.0, 2.0, 1.0) + b"step=3 lr=1e-4 loss=0.5\n")
    assert "job &lt;b&gt;" in page
    assert not re.search(r"<script|https?:|src=|@import", page)
    assert page.count("<svg") == page.count("</svg>") == 2
    (moves,) = re.findall(r'd="M([^"]*)" stroke="#0072b2"', page.split("<h2>lr")[0])
    heights = [float(point.split()[1]) for point in moves.split("L")]
    assert heights == sorted(heights)
    assert len(heights) == 4
    assert "no numbers" in picture(b"hello\n")
    path = tmp_path / "a.html"
    metrics_plot.write(path, "t", read(losses(1.0)).rows())
    assert "<circle" in path.read_text()
    with pytest.raises(LocalIOError):
        metrics_plot.write(tmp_path / "gone" / "a.html", "t", [])


def test_an_svg_is_whole_by_itself(tmp_path: Path) -> None:
    path = tmp_path / "a.svg"
    metrics_plot.write(path, "job <b>", read(losses(3.0, 2.0, 1.0) + b"step=3 lr=1e-4 loss=0.5\n").rows())
    drawing = ET.fromstring(path.read_text())  # noqa: S314 - our own
    words = ["".join(each.itertext()) for each in drawing.iter("{http://www.w3.org/2000/svg}text")]
    assert {"loss", "lr", "\u25a0 loss", "\u25a0 lr"} <= set(words)
    metrics_plot.write(path, "t", [])
    assert "no numbers" in path.read_text()


def test_steps_are_the_axis_unless_they_begin_anew() -> None:
    def xs(data: bytes) -> list[float]:
        (row,) = read(data).rows()
        return [x for x, _ in metrics_plot.coordinates(row.points())]

    assert xs(b"step=10 loss=3\nstep=20 loss=2\n") == [10.0, 20.0]
    assert xs(b"step=10 loss=3\nstep=5 loss=2\n") == [0.0, 1.0]
    assert xs(b"loss=3\nloss=2\n") == [0.0, 1.0]


def test_what_cannot_be_drawn_is_said_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    metrics_plot.check(tmp_path / "a.html")
    with pytest.raises(UsageProblem, match=r"\.html, \.svg or \.png"):
        metrics_plot.check(tmp_path / "a.pdf")
    with pytest.raises(UsageProblem, match="no folder"):
        metrics_plot.check(tmp_path / "gone" / "a.html")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UsageProblem, match="matplotlib") as raised:
        metrics_plot.check(tmp_path / "a.png")
    assert "remote-diag[plot]" in str(raised.value.hint)


def test_a_png_gets_every_series(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in for matplotlib: what is asked of it, not how it draws."""
    drawn: list[tuple[list[float], str]] = []

    class Axes:
        def plot(self, xs: list[float], ys: list[float], *, label: str, **_: object) -> None:
            assert len(xs) == len(ys)
            drawn.append((list(ys), label))

        def __getattr__(self, name: str) -> Callable[..., None]:
            return lambda *_, **__: None

    class Figure(Axes):
        def __init__(self, **_: object) -> None: ...

        def subplots(self, rows: int, columns: int, *, squeeze: bool) -> list[list[Axes]]:
            assert (columns, squeeze) == (1, False)
            return [[Axes()] for _ in range(rows)]

        def savefig(self, file: BinaryIO, **_: object) -> None:
            file.write(b"png")

    figure = type(sys)("matplotlib.figure")
    figure.Figure = Figure  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "matplotlib", type(sys)("matplotlib"))
    monkeypatch.setitem(sys.modules, "matplotlib.figure", figure)
    path = tmp_path / "a.png"
    metrics_plot.check(path)
    rows: list[Row] = read(losses(3.0, 2.0) + b"step=2 lr=0.5 loss=1\n").rows()
    metrics_plot.write(path, "t", rows)
    assert drawn == [([3.0, 2.0, 1.0], "loss"), ([0.5], "lr")]
    assert path.read_bytes() == b"png"
