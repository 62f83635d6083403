from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

from remote_diag.cli.nccl import published
from remote_diag.outcome import Outcome, Timing
from remote_diag.views.nccl_plot import draw

from ..support.nccl_output import Run, text
from ..support.nccl_parsing import parse

SVG = "{http://www.w3.org/2000/svg}"


def outcome(whole: str) -> Outcome[Any]:
    parsed = parse(whole)
    return Outcome("-", "nccl", "", "ok", parsed.result, parsed.findings, Timing(0, 0, 0, 0))


def drawing(page: bytes) -> ET.Element:
    found = re.search(r"<svg.*</svg>", page.decode(), re.DOTALL)
    assert found is not None
    return ET.fromstring(found.group())  # noqa: S314 - our own


def words(page: bytes) -> list[str]:
    return ["".join(each.itertext()) for each in drawing(page).iter(f"{SVG}text")]


def test_both_placements_and_what_was_published() -> None:
    shown = outcome(text(Run()))
    page = draw(shown, Path("x.html"), published(shown.result, []))
    said = words(page)
    assert {"Bus bandwidth", "Time of a call", "all_reduce, in place", "all_reduce, out of place", "GB/s", "us"} <= set(said)
    assert any(word.startswith("published: 8 x RTX PRO 6000") for word in said)
    # Two placements and the published course, twice.
    assert len([path for path in drawing(page).iter(f"{SVG}path") if path.get("stroke-width") == "2"]) == 6
    assert b"local-inference-lab" in page


def test_without_a_published_course() -> None:
    shown = outcome(text(Run(gpu="Tesla T4")))
    assert published(shown.result, []) == ()
    assert not [word for word in words(draw(shown, Path("x.html"))) if word.startswith("published")]


def test_single_calls_are_drawn() -> None:
    said = words(draw(outcome(text(Run(single_calls=True), "2.19")), Path("x.html")))
    assert any(word.startswith("99 of 100") for word in said)


@pytest.mark.parametrize(
    "run",
    [
        Run(ranks=1), Run(sizes=(1 << 20,)), Run(sizes=(0, 4 << 20)), Run(gpu="<script>$x$"), Run(collective="alltoall", gbs=0.01),
        Run(sizes=tuple(8 << shift for shift in range(31))),
    ],
    ids=["one rank", "one size", "size 0", "odd name", "slow", "many"],
)  # fmt: skip
def test_odd_runs(run: Run) -> None:
    shown = outcome(text(run, "2.13" if run.collective == "alltoall" else "2.17"))
    page = draw(shown, Path("x.html"))
    assert b"<script>" not in page
    for path in drawing(page).iter(f"{SVG}path"):
        for x, y in re.findall(r"[ML](-?[\d.]+),(-?[\d.]+)", path.attrib["d"]):
            assert 80 <= float(x) <= 945
            assert 0 <= float(y) <= 720


def test_nothing_to_draw() -> None:
    with pytest.raises(ValueError, match="no size was timed"):
        draw(outcome("Invalid number of GPUs: 8 requested but only 7 were found.\n"), Path("x.html"))


def test_png() -> None:
    pytest.importorskip("matplotlib")
    shown = outcome(text(Run(gpu="$x$")))
    assert draw(shown, Path("x.PNG"), published(shown.result, [])).startswith(b"\x89PNG")
