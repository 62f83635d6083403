from __future__ import annotations

import os
import re
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from probes import vocab_compare
from remote_diag.findings import status
from remote_diag.outcome import Outcome, Timing
from remote_diag.testing import RecordingContext
from remote_diag.views.vocab_picture import bands, draw, lines, ticks

from ..support.checkpoints import mask, offsets, write_npy

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "mappings"
SVG = "{http://www.w3.org/2000/svg}"


def outcome(a: Path, b: Path, **more: Any) -> Outcome[Any]:
    context = RecordingContext(os.curdir)
    result = vocab_compare.run(vocab_compare.Params(a=str(a), b=str(b), points=400, **more), context)
    findings = tuple(context.findings)
    return Outcome("gpu8", "vocab-compare", "run", status(findings), result, findings, Timing(0, 0, 0, 0))


@pytest.fixture(scope="module")
def real() -> Outcome[Any]:
    return outcome(EXAMPLES / "a.npz", EXAMPLES / "b.npz", counts=str(EXAMPLES / "b.npz"))


def pair(tmp_path: Path, a: Any, b: Any, vocab: int = 1000) -> Outcome[Any]:
    for name, ids in (("a", a), ("b", b)):
        write_npy(tmp_path / name, offsets(np.array(ids)), mask(np.array(ids), vocab))
    return outcome(tmp_path / "a", tmp_path / "b")


def coordinates(svg: ET.Element) -> list[tuple[float, float]]:
    found: list[tuple[float, float]] = []
    for path in svg.iter(f"{SVG}path"):
        found += [(float(x), float(y)) for x, y in re.findall(r"[ML](-?[\d.]+),(-?[\d.]+)", path.attrib["d"])]
    return found


def test_what_is_drawn_lies_inside(real: Outcome[Any]) -> None:
    svg = ET.fromstring(draw(real, Path("x.svg")))  # noqa: S314 - our own
    points = coordinates(svg)
    assert len(points) > 1000
    assert all(80 <= x <= 945 and 0 <= y <= 720 for x, y in points)
    words = ["".join(text.itertext()) for text in svg.iter(f"{SVG}text")]
    assert {"draft row", "target id", "rows", "A", "B", "30,000", "150,000", "-1,000"} <= set(words)


def test_the_points_are_those_of_the_mappings(real: Outcome[Any]) -> None:
    (_, _, a, joined), (_, _, b, _) = lines(real.result)
    ids = {name: np.load(EXAMPLES / f"{name}.npz")["d2t"] + np.arange(32_000) for name in "ab"}
    assert joined
    assert all(ids["a"][int(row)] == token for row, token in a)
    assert all(ids["b"][int(row)] == token for row, token in b)
    assert min(low for stretch in bands(real.result) for _, low, _ in stretch) == -real.result.max_shift


def test_a_page_needs_nothing_else_and_escapes_what_it_shows(tmp_path: Path) -> None:
    folder = tmp_path / "<script>alert(1)<"
    shown = pair(folder, range(10, 60), range(12, 70, 2))
    page = draw(shown, Path("x.html")).decode()
    assert page.startswith("<!doctype html>")
    assert "<script" not in page
    assert "&lt;script&gt;" in page
    assert not re.search(r"(?:src|href|url\()\s*=?\s*['\"(]?(?:https?:)?//", page.replace('xmlns="http://www.w3.org/2000/svg"', ""))
    assert "Tokens that only A has" in page


def test_rows_in_no_order_are_dots(tmp_path: Path) -> None:
    ids = np.random.default_rng(0).permutation(200)
    svg = draw(pair(tmp_path, ids, np.arange(200)), Path("x.svg")).decode()
    assert "h0" in svg
    assert svg.count("stroke-dasharray") == 2


@pytest.mark.parametrize(
    ("a", "b"), [([5], [5]), ([5], [7]), ([1, 2, 3], [4, 5, 6]), ([0, 1], [0, 1, 2]), (range(300), range(300))]
)
@pytest.mark.parametrize("suffix", [".svg", ".html", ".png"])
def test_small_and_equal_ones(tmp_path: Path, a: Any, b: Any, suffix: str) -> None:
    for name, ids in (("a", a), ("b", b)):
        write_npy(tmp_path / name, offsets(np.array(ids)), mask(np.array(ids), 1000))
    shown = outcome(tmp_path / "a", tmp_path / "b", encoding_a="offset", encoding_b="offset")
    data = draw(shown, Path("x" + suffix))
    assert b"nan" not in data.lower() or suffix == ".png"
    if suffix == ".svg":
        ET.fromstring(data)  # noqa: S314 - our own


def test_a_png(real: Outcome[Any]) -> None:
    assert draw(real, Path("x.png")).startswith(b"\x89PNG")


def test_nothing_to_draw(tmp_path: Path) -> None:
    (tmp_path / "broken.npz").write_bytes(b"")
    with pytest.raises(ValueError, match="not understood"):
        draw(outcome(EXAMPLES / "a.npz", tmp_path / "broken.npz"), Path("x.svg"))


@pytest.mark.parametrize(("low", "high"), [(0, 1), (-3, 5), (0, 163_839), (-1393, 24), (5, 5), (0, 31_999)])
def test_ticks_are_round_and_inside(low: float, high: float) -> None:
    found = ticks(low, high)
    assert 1 <= len(found) <= 9
    assert all(low <= value <= high for value in found)
    assert found == sorted(set(found))
    assert all(value == round(value) for value in found)
