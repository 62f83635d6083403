from __future__ import annotations

import dataclasses
import io
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from probes import vocab_compare
from remote_diag.findings import status
from remote_diag.outcome import Outcome, Timing
from remote_diag.testing import RecordingContext
from remote_diag.views.vocab_compare import percent, render

from ..support.checkpoints import mask, offsets, write_npy

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "mappings"
V = 100_000


def outcome(a: Path, b: Path, **more: Any) -> Outcome[Any]:
    context = RecordingContext(os.curdir)
    result = vocab_compare.run(vocab_compare.Params(a=str(a), b=str(b), **more), context)
    findings = tuple(context.findings)
    return Outcome("gpu8", "vocab-compare", "run", status(findings), result, findings, Timing(0, 0, 0, 0))


def page(shown: Outcome[Any], width: int = 80) -> list[str]:
    file = io.StringIO()
    Console(file=file, width=width, color_system=None).print(render(shown))
    return [line.rstrip() for line in file.getvalue().splitlines()]


def pair(tmp_path: Path, a: Any, b: Any, **more: Any) -> list[str]:
    for name, ids in (("a", a), ("b", b)):
        write_npy(tmp_path / name, offsets(np.array(ids)), mask(np.array(ids), V))
    return page(outcome(tmp_path / "a", tmp_path / "b", **more))


def test_real_mappings_in_80_columns() -> None:
    lines = page(outcome(EXAMPLES / "a.npz", EXAMPLES / "b.npz", counts=str(EXAMPLES / "b.npz")))
    assert lines[0] == "gpu8: vocab-compare: fail - the mappings differ: 132 of 32,000 rows agree"
    assert max(map(len, lines)) <= 80
    words = [" ".join(line.split()) for line in lines]
    for line in (
        "rows with the same token 132 0.41 %",
        "tokens with a row in both 21,703 67.82 %",
        "rows of B without a source in A 10,297 32.18 %",
        "first rows that agree 126 0.39 %",
        "shared tokens in the same order yes",
        "largest shift of a shared token, rows 1,393",
        "counted tokens (freq) 15,452,163",
        "whose row is the same: the ceiling 15.07 %",
        "with a row in both 92.13 %",
        "with a row in A 92.23 %",
        "with a row in B 99.72 %",
        "npz; 32,000 rows of 163,840 tokens; d2t holds offsets; t2d agrees",
        "row token id in A token id in B",
        "19 19 19",
        "...",
        "126 135 130 <- differs",
    ):
        assert line in words
    assert sum("<- differs" in line for line in lines) == 5
    assert any(line.startswith("fail ") for line in lines)
    assert any("next:" in line for line in lines)


def test_nothing_of_counts_without_counts() -> None:
    text = "\n".join(page(outcome(EXAMPLES / "a.npz", EXAMPLES / "b.npz")))
    assert "counted" not in text
    assert "ceiling" not in text


@pytest.mark.parametrize(
    ("a", "b", "first_line"),
    [
        ([1, 5, 9], [1, 5, 9], "ok - identical: all 3 rows agree"),
        ([1, 5, 9], [9, 5, 1], "fail - the same tokens in other rows: 1 of 3 rows agree"),
        ([1, 5], [1, 4, 5], "fail - A's tokens are some of B's: 1 of 3 rows agree"),
        ([1, 4, 5], [1, 5], "fail - B's tokens are some of A's: 1 of 2 rows agree"),
        ([1, 5, 9], [1, 5, 7], "fail - the mappings differ: 2 of 3 rows agree"),
        ([1, 5, 9], [0, 1, 2], "fail - not comparable: no valid mapping in B"),
    ],
)
def test_the_verdict_is_one_sentence(tmp_path: Path, a: list[int], b: list[int], first_line: str) -> None:
    lines = pair(tmp_path, a, b)
    if b == [0, 1, 2]:
        np.save(tmp_path / "b" / "t2d.npy", np.ones(V, bool))
        lines = page(outcome(tmp_path / "a", tmp_path / "b"))
    assert lines[0] == f"gpu8: vocab-compare: {first_line}"


def test_what_cannot_be_told(tmp_path: Path) -> None:
    write_npy(tmp_path, np.arange(5) * 2)
    lines = page(outcome(tmp_path, tmp_path))
    assert lines[0] == "gpu8: vocab-compare: unknown - cannot tell: A and B are ambiguous"
    assert "rows with the same token" not in "\n".join(lines)


def test_differing_rows_are_marked_without_colour(tmp_path: Path) -> None:
    lines = pair(tmp_path, [1, 5, 9], [1, 6, 9, 12])
    rows = [line.split() for line in lines[lines.index(next(li for li in lines if li.startswith("row "))) + 1 :]][:4]
    assert rows == [["0", "1", "1"], ["1", "5", "6", "<-", "differs"], ["2", "9", "9"], ["3", "none", "12", "<-", "differs"]]


def test_rows_that_are_not_understood_do_not_count_as_different(tmp_path: Path) -> None:
    write_npy(tmp_path / "a", offsets(np.array([1, 5, 9])), mask(np.array([1, 5, 9]), V))
    write_npy(tmp_path / "b", np.zeros(3, np.int64), np.ones(V, bool))
    lines = page(outcome(tmp_path / "a", tmp_path / "b"))
    assert ["1", "5", "?"] in [line.split() for line in lines]
    assert "differs" not in "\n".join(lines)


def test_as_many_rows_as_wanted(tmp_path: Path) -> None:
    assert not any("token id in A" in line for line in pair(tmp_path, [1, 5, 9], [1, 5, 9], first=0))
    rows = [line.split() for line in pair(tmp_path, [1, 5, 9], [1, 5, 9], first=2)]
    assert ["1", "5", "5"] in rows
    assert ["2", "9", "9"] not in rows


def test_the_first_difference_follows_without_a_gap_where_there_is_none(tmp_path: Path) -> None:
    rows = [line.split() for line in pair(tmp_path, [1, 5, 9], [1, 5, 7], first=2)]
    assert ["..."] not in rows
    assert ["2", "9", "7", "<-", "differs"] in rows


def test_texts_of_the_host_steer_nothing(tmp_path: Path) -> None:
    shown = outcome(EXAMPLES / "a.npz", EXAMPLES / "a.npz")
    evil = "/x\x1b[2J\u202e\n[red]y[/red]" + "z" * 2000
    side = dataclasses.replace(shown.result.a, path=evil, kind="\x1b]0;t\x07")
    text = "\n".join(page(dataclasses.replace(shown, answer=dataclasses.replace(shown.result, a=side, encoding_a_reason=evil))))
    assert "\x1b" not in text
    assert "\u202e" not in text
    assert "[red]y" in text
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize(
    ("share", "text"),
    [(0.0, "0.00 %"), (1.0, "100.00 %"), (1e-9, "< 0.01 %"), (0.99999, "> 99.99 %"), (0.15068, "15.07 %")],
)
def test_only_nothing_is_0_and_only_all_is_100_percent(share: float, text: str) -> None:
    assert percent(share) == text
