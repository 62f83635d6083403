from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from .support.checkpoints import mask, offsets, write_npy
from .support.cli import CHECKOUT, rdiag

EXAMPLES = CHECKOUT / "examples" / "mappings"
A, B = str(EXAMPLES / "a.npz"), str(EXAMPLES / "b.npz")


def test_a_table_and_exit_code_1(tmp_path: Path) -> None:
    ran = rdiag("vocab-compare", A, B, "--counts", B, "--first", "3", home=tmp_path)
    assert (ran.code, ran.err) == (1, "")
    lines = ran.out.splitlines()
    assert lines[0] == "local: vocab-compare: fail - the mappings differ: 132 of 32,000 rows agree"
    assert any("15.07 %" in line for line in lines)


def test_json_holds_every_promised_name(tmp_path: Path) -> None:
    ran = rdiag("vocab-compare", A, A, "--json", "--first", "2", home=tmp_path)
    assert ran.code == 0
    assert set(ran.json) >= {"schema_version", "host", "probe", "run_id", "status", "result", "findings", "timing"}
    result = ran.json["result"]
    assert result["verdict"] == "identical"
    assert result["first_rows"] == [{"row": row, "target_a": row, "target_b": row} for row in range(2)]
    assert set(result) >= {
        "draft_vocab_size", "target_vocab_size", "positional_matches", "shared_targets", "common_prefix",
        "rows_without_source", "order_preserved", "max_shift", "verdict", "encoding_a", "encoding_b", "first_rows",
        "positional_token_share", "shared_token_share", "coverage_a", "coverage_b",
    }  # fmt: skip
    assert result["coverage_a"] is None


def test_an_encoding_given_by_hand_arrives(tmp_path: Path) -> None:
    write_npy(tmp_path / "low", np.arange(50) * 2)
    low = str(tmp_path / "low")
    assert rdiag("vocab-compare", low, low, home=tmp_path).code == 10
    ran = rdiag("vocab-compare", low, low, "--encoding-a", "absolute", "--encoding-b", "offset", "--json", home=tmp_path)
    assert (ran.code, ran.json["result"]["encoding_a"], ran.json["result"]["encoding_b"]) == (1, "absolute", "offset")


@pytest.mark.parametrize("name", ["-rf", "a b", "$(touch owned)", "'\"`;&|<>", "新しい\n語彙", "~", "*", "caf\udce9"])
def test_any_name_of_a_file_arrives_as_it_is(tmp_path: Path, name: str) -> None:
    ids = np.arange(5, 60)
    folder = write_npy(tmp_path / name, offsets(ids), mask(ids, 100))
    (tmp_path / "hosts.yaml").write_text(f"hosts:\n  local: {{transport: local, workdir: {str(tmp_path)!r}}}\n")
    ran = rdiag("vocab-compare", "--json", "--", name, str(folder), home=tmp_path)
    assert ran.code == 0, ran.err
    assert ran.json["result"]["a"]["rows"] == 55
    assert sorted(os.listdir(tmp_path)) == sorted([name, "hosts.yaml", "config", "cache", "state", *_homes(tmp_path)])


def _homes(home: Path) -> list[str]:
    return [name for name in (".cache", ".config") if (home / name).exists()]


def test_a_missing_file_is_an_error_of_its_own(tmp_path: Path) -> None:
    ran = rdiag("vocab-compare", A, "/nonexistent/drafter", home=tmp_path)
    assert ran.code == 7
    assert ran.err.splitlines() == [
        "rdiag: error: local: start: B: /nonexistent/drafter: No such file or directory",
        "hint: the path is looked up on the host",
    ]


@pytest.mark.parametrize(("name", "start"), [("o.html", b"<!doctype html>"), ("O.SVG", b"<svg"), ("o.png", b"\x89PNG")])
def test_a_picture(tmp_path: Path, name: str, start: bytes) -> None:
    ran = rdiag("vocab-compare", A, B, "--plot", name, home=tmp_path)
    assert (ran.code, ran.err) == (1, "")
    assert (tmp_path / name).read_bytes().startswith(start)


def test_pictures_of_several_hosts(tmp_path: Path) -> None:
    (tmp_path / "hosts.yaml").write_text("hosts:\n  one: {transport: local}\n  two: {transport: local}\n")
    ran = rdiag("vocab-compare", A, B, "--plot", "o.svg", "-H", "one", "-H", "two", "--json", home=tmp_path)
    assert (ran.code, ran.err) == (1, "")
    assert sorted(path.name for path in tmp_path.glob("*.svg")) == ["o-one.svg", "o-two.svg"]


def test_pictures_that_cannot_be(tmp_path: Path) -> None:
    ran = rdiag("vocab-compare", A, B, "--plot", "o.pdf", home=tmp_path)
    assert (ran.code, ran.out) == (2, "")
    assert "has to end in .html, .svg or .png" in ran.err
    assert rdiag("vocab-compare", A, B, "--plot", "none/o.svg", home=tmp_path).code == 2
    without = tmp_path / "without"
    without.mkdir()
    (without / "matplotlib.py").write_text("raise ImportError('broken')")
    ran = rdiag("vocab-compare", A, B, "--plot", "o.png", home=tmp_path, PYTHONPATH=f"{without}:{CHECKOUT}")
    assert ran.code == 2
    assert "pip install 'remote-diag[plot]'" in ran.err
    assert not (tmp_path / "o.png").exists()
    (tmp_path / "broken.npz").write_bytes(b"")
    ran = rdiag("vocab-compare", A, str(tmp_path / "broken.npz"), "--plot", "o.svg", home=tmp_path)
    assert ran.code == 1
    assert "o.svg is not drawn" in ran.err


def test_texts_of_tokens(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text('{"model": {"vocab": {"\\u2581hi": 126, "\\u001b[31m": 135, "z": 7037}}}')
    ran = rdiag("vocab-compare", A, B, "--counts", B, "--tokenizer", str(tmp_path), "--accuracy", "0.5", home=tmp_path)
    assert "'z'" in ran.out
    assert "\x1b[31m" not in ran.out
    assert "7.53 %" in ran.out
    ran = rdiag("vocab-compare", A, B, "--counts", B, "--tokenizer", str(tmp_path), "--json", home=tmp_path)
    assert ran.json["result"]["only_b"][0]["text"] == "z"
    assert ran.json["result"]["tokenizer"] == str(tmp_path / "tokenizer.json")
    assert rdiag("vocab-compare", A, B, "--tokenizer", "/nonexistent", home=tmp_path).code == 7
