from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from probes import vocab_compare
from probes.vocab_compare import Params, Result
from remote_diag.findings import Finding, status
from remote_diag.paths import shipped_probes
from remote_diag.probe import load
from remote_diag.testing import Leave, RecordingContext

from ..support import mission
from ..support.checkpoints import (
    Raw,
    bfloat16,
    mask,
    offsets,
    write_npy,
    write_npz,
    write_safetensors,
    write_sharded,
    write_sparse_checkpoint,
)

CHECKOUT = Path(__file__).resolve().parents[2]
EXAMPLES = CHECKOUT / "examples" / "mappings"
V = 1000
A = np.arange(10, 110, dtype=np.int64)


def run(a: Path | str, b: Path | str, **more: Any) -> tuple[Result, list[Finding]]:
    context = RecordingContext(os.curdir)
    result = vocab_compare.run(Params(a=str(a), b=str(b), **more), context)
    return result, context.findings


def compare(tmp_path: Path, a: Any, b: Any, vocab: int = V, **more: Any) -> tuple[Result, list[Finding]]:
    """Compare two lists of ids, each written as a well made pair."""
    for name, ids in (("a", a), ("b", b)):
        write_npy(tmp_path / name, offsets(np.array(ids)), mask(np.array(ids), vocab))
    return run(tmp_path / "a", tmp_path / "b", **more)


def by_code(findings: list[Finding]) -> dict[str, Finding]:
    assert len({(finding.code, finding.subject, finding.message) for finding in findings}) == len(findings)
    return {finding.code: finding for finding in findings}


def test_the_contract_holds() -> None:
    probe = load(shipped_probes() / "vocab_compare.py")
    assert probe.name == "vocab-compare"
    assert set(probe.effects) == {"reads-files"}


def test_results_pass_the_strict_check_of_the_client(tmp_path: Path) -> None:
    adapter = load(shipped_probes() / "vocab_compare.py").result_adapter
    (tmp_path / "broken.npz").write_bytes(b"no archive")
    folder = write_safetensors(tmp_path / os.fsdecode(b"caf\xe9"), {"d2t": offsets(A)})
    for result, _ in (
        run(EXAMPLES / "a.npz", EXAMPLES / "b.npz", counts=str(EXAMPLES / "b.npz")),
        run(EXAMPLES / "a.npz", tmp_path / "broken.npz"),
        run(folder, folder),
    ):
        adapter.validate_json(json.dumps(dataclasses.asdict(result), allow_nan=False), strict=True)


def test_real_mappings_against_an_independent_computation() -> None:
    result, findings = run(EXAMPLES / "a.npz", EXAMPLES / "b.npz", counts=str(EXAMPLES / "b.npz"))
    assert result.verdict == "different"
    assert (result.draft_vocab_size, result.target_vocab_size) == (32_000, 163_840)
    assert (result.encoding_a, result.encoding_b) == ("offset", "offset")
    assert result.positional_matches == 132
    assert result.shared_targets == 21_703
    assert result.common_prefix == 126
    assert result.rows_without_source == 10_297
    assert result.order_preserved is True
    assert result.max_shift == 1393
    assert round(result.coverage_a or 0, 5) == 0.92229
    assert round(result.coverage_b or 0, 5) == 0.99716
    assert round(result.positional_token_share or 0, 5) == 0.15068
    assert round(result.shared_token_share or 0, 5) == 0.92129
    assert result.counts_name == "freq"
    assert result.a.t2d_agrees
    assert result.b.t2d_agrees
    assert result.first_differences[0].row == 126
    assert [finding.code for finding in findings] == ["mappings-differ"]


def test_the_case_that_started_it(tmp_path: Path) -> None:
    a, b = mission.mappings()
    write_safetensors(
        tmp_path / "a",
        {"d2t": offsets(a), "t2d": mask(a, mission.VOCAB)},
        vocab_size=mission.VOCAB,
        draft_vocab_size=mission.ROWS,
    )
    write_npy(tmp_path / "b", offsets(b), mask(b, mission.VOCAB))
    result, findings = run(tmp_path / "a", tmp_path / "b", first=60)
    assert (result.draft_vocab_size, result.target_vocab_size) == (32_000, 163_840)
    assert result.positional_matches == 252
    assert result.shared_targets == 25_750
    assert result.rows_without_source == 6_250
    assert result.common_prefix == 50
    assert result.order_preserved
    assert result.positional_token_share is None
    rows = [(row.row, row.target_a, row.target_b) for row in result.first_rows]
    assert rows == list(zip(range(60), a[:60].tolist(), b[:60].tolist(), strict=True))
    assert next(row.row for row in result.first_rows if row.target_a != row.target_b) == 50
    finding = by_code(findings)["mappings-differ"]
    assert (finding.level, finding.value, finding.threshold, finding.unit) == ("fail", 252, 32_000, "rows")
    assert "6,250 must be made anew" in (finding.action or "")


@pytest.mark.parametrize(
    ("b", "verdict", "level"),
    [
        (A, "identical", "ok"),
        (A[::-1], "permutation", "fail"),
        (np.arange(10, 120), "subset", "fail"),
        (np.arange(10, 100), "superset", "fail"),
        (np.arange(11, 111), "different", "fail"),
        (np.arange(500, 600), "different", "fail"),
    ],
)
def test_verdicts(tmp_path: Path, b: Any, verdict: str, level: str) -> None:
    result, findings = compare(tmp_path, A, b)
    assert result.verdict == verdict
    assert result.draft_vocab_size == len(b)
    assert result.a.rows == 100
    assert status(findings) == level


def test_nothing_in_common(tmp_path: Path) -> None:
    result, findings = compare(tmp_path, A, np.arange(500, 600))
    assert (result.shared_targets, result.max_shift, result.order_preserved) == (0, None, True)
    assert "no token in common" in (by_code(findings)["mappings-differ"].action or "")


def test_rows_beyond_the_shorter_side(tmp_path: Path) -> None:
    result, _ = compare(tmp_path, A[:2], A[:4], first=3)
    assert [(row.target_a, row.target_b) for row in result.first_rows] == [(10, 10), (11, 11), (None, 12)]
    assert [(row.row, row.target_a, row.target_b) for row in result.first_differences] == [(2, None, 12), (3, None, 13)]


def test_no_rows_when_none_are_wanted(tmp_path: Path) -> None:
    result, _ = compare(tmp_path, A, A + 1, first=0)
    assert result.first_rows == result.first_differences == ()


def test_every_kind_of_file_says_the_same(tmp_path: Path) -> None:
    d2t, t2d = offsets(A), mask(A, V)
    places = [
        write_safetensors(tmp_path / "single", {"model.d2t": d2t, "model.t2d": t2d}),
        write_sharded(tmp_path / "sharded", [{"w": d2t}, {"d2t": d2t, "t2d": t2d}]),
        write_npy(tmp_path / "npy", d2t, t2d),
        write_npz(tmp_path / "x.npz", d2t=A, t2d=t2d),
    ]
    for place in places:
        result, findings = run(places[0], place)
        assert result.verdict == "identical"
        assert [finding.code for finding in findings] == ["mappings-identical"]
    assert result.encoding_b == "absolute"
    assert result.stored_equal is False


def test_which_files_were_read_and_how_much(tmp_path: Path) -> None:
    folder = write_sharded(tmp_path / "s", [{"w": np.zeros(50_000)}, {"d2t": offsets(A), "t2d": mask(A, V)}])
    result, _ = run(folder, folder)
    assert [Path(file).name for file in result.a.files] == [
        "model.safetensors.index.json",
        "model-00002-of-00002.safetensors",
    ]
    read = sum((folder / Path(file).name).stat().st_size for file in result.a.files)
    assert result.bytes_read <= 2 * (read + 64)
    assert result.a.path == str(folder)
    assert result.a.kind == "safetensors-sharded"


def test_of_a_checkpoint_of_2_gb_less_than_4_mb_are_read(tmp_path: Path) -> None:
    a, b = mission.mappings()
    for name, ids in (("a", a), ("b", b)):
        path = write_sparse_checkpoint(tmp_path / f"{name}.safetensors", ids, mission.VOCAB, head_bytes=2 << 30)
        assert path.stat().st_size > 2_000_000_000
    result, _ = run(tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    assert result.positional_matches == 252
    assert result.a.lm_head_rows == 32_000
    assert result.bytes_read < 4 << 20


def test_neither_torch_nor_safetensors_is_imported() -> None:
    code = f"""
import sys
sys.modules["torch"] = sys.modules["safetensors"] = None
from probes import vocab_compare
assert "numpy" not in sys.modules, "numpy is imported with the module"
from remote_diag.testing import RecordingContext
result = vocab_compare.run(vocab_compare.Params(a={str(EXAMPLES / "a.npz")!r}, b={str(EXAMPLES / "b.npz")!r}), RecordingContext("."))
print(result.positional_matches)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=CHECKOUT, capture_output=True, text=True, timeout=60)
    assert done.stdout == "132\n", done.stderr


def test_without_numpy_the_environment_is_unfit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "numpy", None)
    with pytest.raises(Leave, match="numpy") as caught:
        run(EXAMPLES / "a.npz", EXAMPLES / "b.npz")
    assert caught.value.outcome == "environment"


@pytest.mark.parametrize("where", ["a", "b", "counts"])
def test_a_missing_file_is_no_finding(tmp_path: Path, where: str) -> None:
    good = str(EXAMPLES / "a.npz")
    paths = {"a": good, "b": good, "counts": good, where: str(tmp_path / "gone")}
    with pytest.raises(Leave, match="No such file") as caught:
        run(**paths)
    assert caught.value.outcome == "environment"
    assert caught.value.message.startswith({"a": "A: ", "b": "B: ", "counts": "counts: "}[where])
    assert caught.value.hint


@pytest.mark.parametrize(
    ("tensors", "code", "encoding"),
    [
        ({"d2t": np.zeros(100, np.int64), "t2d": np.ones(V, bool)}, "d2t-uninitialised", "uninitialised"),
        ({"d2t": np.zeros(100, np.int64), "t2d": np.zeros(V, bool)}, "d2t-uninitialised", "uninitialised"),
        ({"d2t": np.full(100, 5000)}, "d2t-corrupt", "corrupt"),
        ({"d2t": bfloat16(offsets(np.arange(1000, 100_000, 3)))}, "d2t-corrupt", "corrupt"),
        ({"d2t": Raw("F8_E4M3", [4], b"1234")}, "file-damaged", "corrupt"),
        ({"d2t": A.reshape(10, 10)}, "file-damaged", "corrupt"),
    ],
)
def test_a_side_that_is_no_mapping(tmp_path: Path, tensors: Any, code: str, encoding: str) -> None:
    write_safetensors(tmp_path / "b", tensors)
    good = write_safetensors(tmp_path / "a", {"d2t": offsets(A)}, vocab_size=V, draft_vocab_size=100)
    for a, b, name in ((good, tmp_path / "b", "b"), (tmp_path / "b", good, "a")):
        result, findings = run(a, b, counts=str(write_npz(tmp_path / "c.npz", freq=np.ones(V, int))))
        assert result.verdict == "corrupt"
        assert getattr(result, f"encoding_{name}") == encoding
        assert getattr(result, f"encoding_{name}_reason")
        assert result.positional_matches is result.shared_targets is result.max_shift is result.coverage_a is None
        assert by_code(findings)[code].level == "fail"
        assert by_code(findings)[code].action
        assert {getattr(row, f"target_{name}") for row in result.first_rows} == {None}
        assert len(result.first_rows) == 20


def test_a_damaged_file_is_a_finding_with_its_path(tmp_path: Path) -> None:
    folder = write_safetensors(tmp_path / "b", {"d2t": offsets(A), "t2d": mask(A, V)})
    os.truncate(folder / "model.safetensors", (folder / "model.safetensors").stat().st_size - 10)
    result, findings = run(EXAMPLES / "a.npz", folder)
    assert result.verdict == "corrupt"
    assert "model.safetensors: cut: 10 bytes are missing" in (result.b.problem or "")
    assert by_code(findings)["file-damaged"].subject == str(folder)
    assert status(findings) == "fail"


LOW = np.arange(100, dtype=np.int64) * 2


def test_what_cannot_be_told_is_unknown(tmp_path: Path) -> None:
    write_npy(tmp_path / "a", LOW)
    result, findings = run(tmp_path / "a", tmp_path / "a")
    assert result.verdict == "unknown"
    assert result.encoding_a == result.encoding_b == "ambiguous"
    assert result.stored_equal is True
    assert result.first_rows == ()
    assert status(findings) == "unknown"
    assert "--encoding-a" in (findings[0].action or "")


def test_the_user_can_tell_what_the_files_do_not(tmp_path: Path) -> None:
    write_npy(tmp_path / "a", LOW)
    result, findings = run(tmp_path / "a", tmp_path / "a", encoding_a="absolute", encoding_b="offset")
    assert (result.encoding_a, result.encoding_b) == ("absolute", "offset")
    assert result.encoding_a_reason == "as asked for"
    assert result.verdict == "different"
    assert status(findings) == "fail"


def test_the_other_side_tells_the_size_of_the_vocabulary(tmp_path: Path) -> None:
    ids = np.sort(np.random.default_rng(0).choice(V, 300, replace=False)).astype(np.int64)
    write_npy(tmp_path / "bare", ids)
    write_npy(tmp_path / "whole", offsets(ids), mask(ids, V))
    assert run(tmp_path / "bare", tmp_path / "bare")[0].verdict == "unknown"
    result, _ = run(tmp_path / "bare", tmp_path / "whole")
    assert result.verdict == "identical"
    assert "the other side's" in result.encoding_a_reason
    assert (result.a.target_vocab_size, result.target_vocab_size) == (None, V)


def test_no_size_is_made_up(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "a", {"d2t": offsets(A), "embed_tokens.weight": np.zeros((V, 1))})
    result, findings = run(tmp_path / "a", tmp_path / "a")
    assert result.target_vocab_size is None
    assert result.verdict == "identical"
    # A missing t2d is nothing to complain about while it is not needed.
    assert [finding.code for finding in findings] == ["mappings-identical"]
    assert result.a.t2d_kind == "absent"


def test_a_config_tells_the_size(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "a", {"d2t": offsets(A)}, transformer_layer_config={"vocab_size": V}, draft_vocab_size=100)
    result, findings = run(tmp_path / "a", tmp_path / "a")
    assert result.target_vocab_size == V
    assert (result.a.config_dialect, result.a.config_draft_vocab_size) == ("speculators", 100)
    assert status(findings) == "ok"


def test_an_old_speculators_config_names_the_draft_size_twice(tmp_path: Path) -> None:
    config: dict[str, Any] = {"transformer_layer_config": {"vocab_size": 100}, "draft_vocab_size": 100}
    write_safetensors(tmp_path / "a", {"d2t": offsets(A)}, **config)
    write_safetensors(tmp_path / "b", {"d2t": offsets(A), "t2d": mask(A, V)}, **config)
    result, findings = run(tmp_path / "a", tmp_path / "b")
    assert result.verdict == "identical"
    assert (result.a.target_vocab_size, result.b.target_vocab_size) == (None, V)
    assert status(findings) == "ok"


@pytest.mark.parametrize(
    ("tensors", "config", "code", "level"),
    [
        ({"t2d": mask(A + 1, V)}, {}, "t2d-disagrees", "fail"),
        ({"t2d": np.ones(V, bool)}, {}, "t2d-disagrees", "fail"),
        ({"t2d": np.zeros(V, bool)}, {}, "t2d-disagrees", "fail"),
        ({"t2d": mask(A, V).reshape(10, -1)}, {}, "t2d-unusable", "fail"),
        ({"t2d": np.full(V, 0.5)}, {}, "t2d-unusable", "fail"),
        ({"t2d": np.ones(50, bool)}, {}, "t2d-unusable", "fail"),
        ({"t2d": mask(A, V)}, {"vocab_size": V + 64}, "config-disagrees", "degraded"),
        ({"t2d": mask(A, V)}, {"draft_vocab_size": 64}, "config-disagrees", "degraded"),
        ({"lm_head.weight": np.zeros((90, 1))}, {"vocab_size": V}, "head-size", "fail"),
        ({"d2t": offsets(A).astype(np.float32)}, {}, "d2t-type", "degraded"),
    ],
)
def test_faults_of_one_side_are_found_although_the_mappings_are_equal(
    tmp_path: Path, tensors: Any, config: Any, code: str, level: str
) -> None:
    folder = write_safetensors(tmp_path / "x", {"d2t": offsets(A), **tensors}, **config)
    result, findings = run(folder, folder)
    assert result.verdict == "identical"
    found = [finding for finding in findings if finding.code == code]
    assert [finding.level for finding in found] == [level, level]
    assert {finding.code for finding in findings} == {code, "mappings-identical"}
    assert all(finding.subject == str(folder) and finding.action for finding in found)


@pytest.mark.parametrize("rows", [100, V])
def test_heads_that_fit(tmp_path: Path, rows: int) -> None:
    folder = write_safetensors(tmp_path, {"d2t": offsets(A), "lm_head.weight": np.zeros((rows, 1))}, vocab_size=V)
    assert status(run(folder, folder)[1]) == "ok"


def test_a_broken_config_is_said_and_does_not_hinder(tmp_path: Path) -> None:
    folder = write_safetensors(tmp_path, {"d2t": offsets(A), "t2d": mask(A, V)})
    (folder / "config.json").write_text("{")
    result, findings = run(folder, folder)
    assert result.verdict == "identical"
    assert by_code(findings[:1])["config-unreadable"].level == "degraded"
    assert "config.json" in (result.a.problem or "")


def test_rows_in_order_of_frequency_are_mentioned(tmp_path: Path) -> None:
    result, findings = compare(tmp_path, A[::-1], A[::-1])
    assert result.verdict == "identical"
    assert result.a.ascending is False
    assert result.a.t2d_agrees is True
    assert {(finding.code, finding.level) for finding in findings} == {
        ("rows-not-ascending", "ok"),
        ("mappings-identical", "ok"),
    }


def test_targets_of_different_size(tmp_path: Path) -> None:
    write_npy(tmp_path / "a", offsets(A), mask(A, V))
    write_npy(tmp_path / "b", offsets(A), mask(A, V + 64))
    result, findings = run(tmp_path / "a", tmp_path / "b")
    assert result.verdict == "identical"
    assert result.target_vocab_size == V + 64
    assert by_code(findings)["target-vocab-differs"].level == "fail"


def test_a_full_vocabulary_needs_no_d2t(tmp_path: Path) -> None:
    full = write_safetensors(tmp_path / "full", {"lm_head.weight": np.zeros((V, 1))}, vocab_size=V)
    result, _ = run(full, full)
    assert (result.verdict, result.encoding_a, result.draft_vocab_size) == ("identical", "offset", V)
    assert "there is no d2t" in result.encoding_a_reason
    pruned = write_safetensors(
        tmp_path / "pruned", {"lm_head.weight": np.zeros((100, 1))}, vocab_size=V, draft_vocab_size=100
    )
    assert run(pruned, pruned)[0].encoding_a == "uninitialised"


def test_counts_of_nothing(tmp_path: Path) -> None:
    counts = write_npz(tmp_path / "c.npz", freq=np.zeros(V, int))
    result, findings = compare(tmp_path, A, A, counts=str(counts))
    assert result.coverage_a is None
    assert by_code(findings)["counts-empty"].level == "unknown"


def test_counts_of_another_tokenizer(tmp_path: Path) -> None:
    counts = write_npz(tmp_path / "c.npz", freq=np.ones(2 * V, int))
    result, findings = compare(tmp_path, A, A, counts=str(counts))
    assert result.coverage_a == 0.05
    assert by_code(findings)["counts-of-other-vocabulary"].level == "degraded"
    # A longer vector is fine while it only counts what is there.
    padded = write_npz(tmp_path / "p.npz", freq=np.r_[np.ones(V, int), np.zeros(64, int)])
    assert status(compare(tmp_path, A, A, counts=str(padded))[1]) == "ok"


def test_shares_are_taken_by_token(tmp_path: Path) -> None:
    freq = np.zeros(V, int)
    freq[[10, 11, 12, 500]] = [50, 30, 15, 5]
    counts = str(write_npz(tmp_path / "c.npz", freq=freq))
    result, _ = compare(tmp_path, [10, 11, 12], [10, 12, 500], counts=counts)
    assert (result.positional_token_share, result.shared_token_share) == (0.5, 0.65)
    assert (result.coverage_a, result.coverage_b) == (0.95, 0.7)
    assert result.tokens_counted == 100.0


@pytest.mark.parametrize(
    "values", [{"a": ""}, {"b": ""}, {"counts": ""}, {"a": "x\0y"}, {"first": -1}, {"first": 1001}]
)
def test_parameters_that_cannot_be(values: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(values))):
        Params(**{"a": "a", "b": "b", **values})


def test_relative_paths_begin_where_the_probe_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compare(tmp_path, A, A)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "-a").symlink_to("a")
    result, _ = run("-a", "b")
    assert result.verdict == "identical"
    assert result.a.path == str(tmp_path / "-a")
