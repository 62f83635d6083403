from __future__ import annotations

from pathlib import Path

import pytest

from remote_diag import paths
from remote_diag.errors import ConfigError
from remote_diag.hypotheses import FOLDER, RESULT_FIELDS, declare, find_all
from remote_diag.probe import load
from remote_diag.triage_case import ENTRIES, OBSERVED, entries

from .support.probe_files import write_hypothesis, write_probe


@pytest.fixture(autouse=True)
def work(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_shipped_ones() -> None:
    declared, broken = find_all()
    assert not broken
    assert {one.id for one in declared} == {
        "mapping-replaced", "verifier-order", "final-norm", "aux-order", "shift-by-one", "aux-layer-ids", "head-overwritten",
        "d2t-cast", "t2d-disagrees", "mask-empty", "embedding-replaced", "body-replaced",
        "norm-flags",
    }  # fmt: skip
    for one in declared:
        assert one.probe.effects == ("reads-files",)
        assert tuple(field.name for field in one.probe.result_fields) == ("verdict", "evidence", "explains", "accuracy", "loss", "next_command", "missing")


def test_shipped_ones_take_what_a_case_has() -> None:
    for one in find_all()[0]:
        for field in one.probe.params_fields:
            known = {**ENTRIES, **OBSERVED}[field.name]
            # A probe may require what a case may lack, and take any word where a case offers a choice.
            assert field.name == "trainer" or field.annotation == known.kind or (field.required and field.annotation is str), (one.id, field.name)


def test_cheap_and_likely_ones_come_first(work: Path) -> None:
    for name, cost, likelihood in (("slow", 10.0, 0.5), ("quick", 1.0, 0.5), ("unlikely", 1.0, 0.01)):
        write_hypothesis(work / "mine" / FOLDER, name, "return refuted()", cost=cost, likelihood=likelihood)
    order = [one.id for one in find_all([work / "mine"])[0]]
    assert order.index("quick") < order.index("slow") < order.index("unlikely")


def test_own_ones_are_found_and_win(work: Path) -> None:
    write_hypothesis(work / "probes" / FOLDER, "cosmic_rays", "return refuted()")
    own = write_hypothesis(work / "probes" / FOLDER, "mask_empty", "return refuted()")
    declared = {one.id: one for one in find_all()[0]}
    assert declared["cosmic-rays"].claim == "The probe cosmic_rays of a test"
    assert declared["mask-empty"].probe.path.resolve() == own.resolve()
    assert len(declared) == 14


def test_own_ones_add_entries_to_the_case(work: Path) -> None:
    write_hypothesis(work / "probes" / FOLDER, "cosmic_rays", "return refuted()", params={"flux": "float"})
    known = entries(find_all()[0])
    assert (known["flux"].kind, known["flux"].doc) == (float, "The flux.")
    assert "observed_loss" not in known


def test_other_probes_are_no_hypotheses(work: Path) -> None:
    with pytest.raises(ConfigError, match="HYPOTHESIS is missing"):
        declare(load(write_probe(work, "plain", "return Result('x')")))
    assert "vocab-compare" not in {one.id for one in find_all()[0]}


@pytest.mark.parametrize(
    "declaration", ["{}", "3", "{'cost_s': 0, 'likelihood': 0.5}", "{'cost_s': 1, 'likelihood': 1.5}", "{'cost_s': True, 'likelihood': 1}",
                    "{'cost_s': 1, 'likelihood': 0.5, 'x': 1}", "{'cost_s': 1e999, 'likelihood': 1}"],
)  # fmt: skip
def test_a_bad_declaration_hides_no_other(work: Path, declaration: str) -> None:
    path = write_hypothesis(work / "probes" / FOLDER, "odd", "return refuted()")
    text = path.read_text()
    path.write_text(text.replace("{'cost_s': 1.0, 'likelihood': 0.1}", declaration))
    assert declaration in path.read_text()
    declared, broken = find_all()
    assert (len(declared), [one.id for one in broken]) == (13, ["odd"])
    assert "HYPOTHESIS" in broken[0].error.message
    assert "cost_s" in (broken[0].error.hint or "")


def test_a_result_that_lacks_fields_is_refused(work: Path) -> None:
    path = write_probe(work, "half", "return Result('refuted')", result={"verdict": "str"})
    path.write_text(path.read_text() + "\nHYPOTHESIS = {'cost_s': 1.0, 'likelihood': 0.1}\n")
    with pytest.raises(ConfigError, match="Result lacks evidence"):
        declare(load(path))
    assert len(RESULT_FIELDS) == 7


def test_files_are_looked_for_where_probes_are() -> None:
    assert (paths.shipped_probes() / FOLDER).is_dir()
