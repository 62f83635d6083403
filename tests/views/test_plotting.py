from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from remote_diag.errors import LocalIOError
from remote_diag.views import plotting
from remote_diag.views.plotting import Axis, Panel, powers, ticks

SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(0, 10, [0, 2, 4, 6, 8, 10]), (0, 1, [0, 1]), (5, 5, [5]), (-30, 30, [-30, -20, -10, 0, 10, 20, 30])],
)
def test_ticks(low: float, high: float, expected: list[float]) -> None:
    assert ticks(low, high) == expected


def test_ticks_below_one() -> None:
    assert ticks(0, 1, least=1e-6) == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 1.0])


@pytest.mark.parametrize(("low", "high", "base"), [(8, 1 << 34, 2), (1, 10, 10), (0.5, 3e6, 10), (7, 9, 2)])
def test_powers_are_few_and_inside(low: float, high: float, base: int) -> None:
    found = powers(low, high, base)
    assert 1 <= len(found) <= 9
    assert all(low <= value <= high for value in found)


@pytest.mark.parametrize("base", [None, 2, 10])
def test_an_axis_runs_from_end_to_end(base: int | None) -> None:
    axis = Axis(1, 1000, "x", base)
    assert axis.share(1) == 0
    assert axis.share(1000) == pytest.approx(1)
    assert 0 < axis.share(10) < axis.share(100) < 1
    assert Axis(3, 3, "x", base).share(3) == 0


def test_what_is_drawn_is_escaped_and_inside() -> None:
    panel = Panel(0, Axis(0, 10, "<across>"), Axis(0, 5, "up & down"))
    parts = [*panel.frame("<script>"), *panel.line([(0, 0), (10, 5)], "#000", dots=True), *panel.key(0, "<b>", "#000")]
    drawing = ET.fromstring(plotting.svg("a < b", 1, parts))  # noqa: S314 - our own
    words = ["".join(text.itertext()) for text in drawing.iter(f"{SVG}text")]
    assert {"<script>", "<across>", "up & down", "<b>"} <= set(words)
    for path in drawing.iter(f"{SVG}path"):
        for x, y in re.findall(r"[ML](-?[\d.]+),(-?[\d.]+)", path.attrib["d"]):
            assert 0 <= float(x) <= plotting.WIDTH
            assert 0 <= float(y) <= plotting.HEIGHT


def test_a_page_loads_nothing() -> None:
    page = plotting.page("<title>", ["<p>x</p>"])
    assert "&lt;title&gt;" in page
    assert "http" not in page


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    plotting.store(tmp_path / "a.html", b"x")
    assert (tmp_path / "a.html").read_bytes() == b"x"
    with pytest.raises(LocalIOError, match="cannot write"):
        plotting.store(tmp_path / "gone" / "a.html", b"x")
