"""``rdiag triage`` as a process, over the agent on this machine; mappings and heads that numpy writes are enough for it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from .support.checkpoints import mask, offsets, write_safetensors
from .support.cli import rdiag
from .support.probe_files import write_hypothesis

V, D, H = 2000, 300, 16


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, a drafter with mapping A, and the same head under mapping B."""
    folder = tmp_path_factory.mktemp("world")
    random = np.random.default_rng(3)
    head = random.normal(size=(V, H)).astype(np.float32)
    a = np.sort(random.choice(V, D, replace=False))
    b = np.sort(random.choice(V, D, replace=False))
    write_safetensors(folder / "target", {"lm_head.weight": head, "model.embed_tokens.weight": head}, vocab_size=V, hidden_size=H)
    for name, ids in (("before", a), ("after", b)):
        tensors: Any = {
            "lm_head.weight": head[a], "fc.weight": np.zeros((H, 3 * H), np.float32), "d2t": offsets(ids), "t2d": mask(ids, V),
        }  # fmt: skip
        write_safetensors(folder / name, tensors, vocab_size=V, draft_vocab_size=D, hidden_size=H)
    for name, ids in (("counts", b), ("counts-of-a", a)):
        counts = np.ones(V, np.int64)
        counts[ids] = 3
        np.save(folder / f"{name}.npy", counts)
    case = {
        "host": "local", "drafter_before": str(folder / "before"), "drafter_after": str(folder / "after"),
        "target": str(folder / "target"), "counts": str(folder / "counts.npy"), "serving_accept_length": 3.1, "loss": [9.9],
        "accuracy": [0.01],
    }  # fmt: skip
    (folder / "case.yaml").write_text(json.dumps(case))
    return folder


def test_the_cause_for_people(world: Path, tmp_path: Path) -> None:
    ran = rdiag("triage", str(world / "case.yaml"), home=tmp_path)
    assert ran.code == 1, ran.err
    lines = ran.out.splitlines()
    assert lines[0] == "local: triage: fail - the cause is mapping-replaced"
    assert ran.out.index("supported  mapping-replaced") < ran.out.index("undecided  ") < ran.out.index("refuted    ")
    assert "yet trains no better than chance" in " ".join(lines[1:4])
    command = f"  rdiag vocab-remap {world / 'before'} --mapping {world / 'after'} --out {world / 'before'}-remapped --verifier {world / 'target'}"
    assert command in lines, lines[-3:]


def test_the_old_mapping_is_kept_where_that_costs_nothing(world: Path, tmp_path: Path) -> None:
    ran = rdiag("triage", str(world / "case.yaml"), "--counts", str(world / "counts-of-a.npy"), "--json", home=tmp_path)
    best = ran.json["result"]["hypotheses"][0]
    assert best["next_command"].startswith(f"rdiag vocab-keep {world / 'before'} --out {world / 'before'}-mapping --mapping ")
    assert any("costs next to nothing" in line for line in best["evidence"])


def test_rows_are_not_to_be_moved_where_only_the_mapping_of_the_drafter_is_given(world: Path, tmp_path: Path) -> None:
    d2t = np.arange(D) + 1
    np.savez(tmp_path / "a.npz", d2t=d2t - np.arange(D), t2d=mask(d2t, V))
    options = ("--drafter-before", str(tmp_path / "a.npz"), "--mapping", str(world / "after"), "--loss", "9.9", "--accuracy", "0.01")
    ran = rdiag("triage", *options, "--json", home=tmp_path)
    best = ran.json["result"]["hypotheses"][0]
    assert (best["id"], best["verdict"]) == ("mapping-replaced", "supported")
    assert best["next_command"].startswith(f"rdiag vocab-keep {tmp_path / 'a.npz'} --out ")


def test_json_holds_every_promised_name(world: Path, tmp_path: Path) -> None:
    ran = rdiag("triage", str(world / "case.yaml"), "--json", home=tmp_path)
    assert ran.code == 1
    assert set(ran.json) >= {"schema_version", "host", "probe", "run_id", "status", "result", "findings", "timing"}
    assert (ran.json["probe"], ran.json["status"], ran.json["host"]) == ("triage", "fail", "local")
    result = ran.json["result"]
    assert result["cause"] == "mapping-replaced"
    assert result["contradiction"]["exists"] is True
    for one in result["hypotheses"]:
        assert set(one) >= {"id", "verdict", "evidence", "explains", "next_command"}
        assert one["verdict"] in {"supported", "refuted", "undecided"}
        assert one["evidence"]
    first = result["hypotheses"][0]
    assert first["explains"]["observed_accuracy"] == 0.01
    assert 0 < first["explains"]["accuracy"] < 0.1
    assert {one["id"] for one in result["hypotheses"] if one["verdict"] == "undecided"} == {
        "final-norm", "shift-by-one", "aux-order", "aux-layer-ids",
    }  # fmt: skip
    assert {finding["code"] for finding in ran.json["findings"] if finding["level"] == "fail"} == {"mapping-replaced"}


def test_options_instead_of_a_file(world: Path, tmp_path: Path) -> None:
    ran = rdiag("triage", "--drafter-before", str(world / "before"), "--mapping", str(world / "after"), "--loss", "9.9", "--json", home=tmp_path)
    assert ran.code == 1, ran.err
    assert ran.json["result"]["cause"] == "mapping-replaced"


def test_nothing_can_be_decided(world: Path, tmp_path: Path) -> None:
    ran = rdiag("triage", "--target", str(world / "target"), "--json", home=tmp_path)
    assert ran.code == 10, ran.err
    result = ran.json["result"]
    assert (result["cause"], result["supported"]) == (None, [])
    missing = {one["id"]: one["missing"] for one in result["hypotheses"]}
    assert missing["mapping-replaced"] == ["drafter_before"]


def test_an_own_hypothesis_is_one_more_file(world: Path, tmp_path: Path) -> None:
    write_hypothesis(
        tmp_path / "probes" / "hypotheses", "cosmic_rays", "return supported('flux %g' % params.flux)", params={"flux": "float"},
    )  # fmt: skip
    case = json.loads((world / "case.yaml").read_text())
    (tmp_path / "case.yaml").write_text(json.dumps({"flux": 7.5, "drafter_before": case["drafter_before"], "drafter_after": case["drafter_before"]}))
    ran = rdiag("triage", "case.yaml", "--json", home=tmp_path)
    assert ran.code == 1, ran.err
    assert ran.json["result"]["cause"] == "cosmic-rays"
    assert ran.json["result"]["hypotheses"][0]["evidence"] == ["flux 7.5"]


def test_a_dry_run_contacts_nothing(world: Path, tmp_path: Path) -> None:
    ran = rdiag("triage", str(world / "case.yaml"), "--dry-run", home=tmp_path)
    assert ran.code == 0, ran.err
    assert not (tmp_path / ".cache").exists()
    assert " 1. mapping-replaced (about 1 s, likelihood 0.4)" in ran.out
    assert "the case lacks samples" in ran.out
    plan = rdiag("triage", str(world / "case.yaml"), "--dry-run", "--json", home=tmp_path).json["plan"]
    assert len(plan) == 13


def test_misuse(tmp_path: Path) -> None:
    empty = rdiag("triage", home=tmp_path)
    assert empty.code == 2
    # One entry a line, for people who do not know yet what to say.
    assert "      drafter_before: the drafter that serves" in empty.err
    assert "\\x0a" not in empty.err
    assert rdiag("triage", "nowhere.yaml", home=tmp_path).code == 3
    (tmp_path / "case.yaml").write_text("target: /t\nsampels: [/s]\n")
    ran = rdiag("triage", "case.yaml", home=tmp_path)
    assert ran.code == 3
    assert ran.err.startswith("rdiag: error: config: case.yaml:2:1: a case has no entry 'sampels'; did you mean 'samples'?\n")
    (tmp_path / "hosts.yaml").write_text("hosts:\n  a: {transport: local}\n  b: {transport: local}\n")
    ran = rdiag("triage", "--target", "/t", "-H", "a", "-H", "b", home=tmp_path)
    assert (ran.code, "one host, not 2" in ran.err) == (2, True)
