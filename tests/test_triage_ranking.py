from __future__ import annotations

from typing import Any

import pytest

from remote_diag.findings import status
from remote_diag.triage_ranking import Explains, Judged, Verdict, cause, contradiction, findings, rank


def judged(id_: str, verdict: Verdict, *, accuracy: float | None = None, observed: float | None = 0.1, likelihood: float = 0.1) -> Judged:
    return Judged(id_, "The claim", verdict, ("a number",), Explains("so", accuracy, observed, None, None), f"do {id_}", (), likelihood, 0.1)


def numbers(**given: Any) -> dict[str, Any]:
    return {
        "serving_accept_length": None, "serving_accuracy": None, "training_loss": None, "uniform_loss": None,
        "training_accuracy": None, "draft_vocab_size": None, **given,
    }  # fmt: skip


NONE = contradiction(**numbers())


def test_supported_before_undecided_before_refuted() -> None:
    ranked = rank([judged("a", "refuted"), judged("b", "undecided"), judged("c", "supported")])
    assert [one.id for one in ranked] == ["c", "b", "a"]


def test_the_better_explanation_comes_first() -> None:
    far, near, unknown = (judged(name, "supported", accuracy=value) for name, value in (("far", 0.9), ("near", 0.12), ("unknown", None)))
    assert [one.id for one in rank([far, unknown, near])] == ["near", "unknown", "far"]


def test_the_likelier_comes_first_where_numbers_say_nothing() -> None:
    assert [one.id for one in rank([judged("a", "undecided"), judged("b", "undecided", likelihood=0.4)])] == ["b", "a"]


def test_zero_accuracies_can_be_held_against_each_other() -> None:
    ratio = judged("x", "supported", accuracy=0.0, observed=0.0).explains.accuracy_ratio
    assert ratio == 1
    assert judged("x", "supported", accuracy=None).explains.accuracy_ratio is None


@pytest.mark.parametrize(
    ("verdicts", "named"),
    [
        (["refuted", "refuted"], None),
        (["supported", "refuted"], "0"),
        (["undecided", "supported"], "1"),
        (["supported", "supported"], None),
        ([], None),
    ],
)
def test_a_cause_is_named_when_one_alone_is_supported(verdicts: list[Verdict], named: str | None) -> None:
    assert cause([judged(str(number), verdict) for number, verdict in enumerate(verdicts)]) == named


@pytest.mark.parametrize(
    ("given", "exists"),
    [
        ({"serving_accept_length": 3.2, "training_loss": 19.0, "uniform_loss": 10.37}, True),
        ({"serving_accept_length": 3.2, "training_accuracy": 0.02, "draft_vocab_size": 32_000}, True),
        ({"serving_accuracy": 0.6, "training_loss": 2.0, "uniform_loss": 10.37, "training_accuracy": 0.0}, True),
        ({"serving_accept_length": 3.2, "training_loss": 2.0, "uniform_loss": 10.37}, False),
        ({"serving_accept_length": 1.02, "training_loss": 19.0, "uniform_loss": 10.37}, False),
        ({"training_loss": 19.0, "uniform_loss": 10.37}, None),
        ({"serving_accept_length": 3.2, "training_loss": 19.0}, None),
        ({}, None),
    ],
)
def test_the_contradiction(given: dict[str, Any], exists: bool | None) -> None:
    assert contradiction(**numbers(**given)).exists is exists


def test_the_contradiction_is_told_with_its_numbers() -> None:
    told = contradiction(**numbers(serving_accept_length=3.2, training_loss=19.04, uniform_loss=10.37, draft_vocab_size=32_000))
    assert told.text == "serves above chance: acceptance length 3.2, yet trains no better than chance: loss 19 (10.4 is a uniform guess)"
    assert told.chance == 1 / 32_000
    assert NONE.text == "how it serves is not known; how it trains is not known"


def test_a_loss_of_a_guess_beside_a_better_accuracy() -> None:
    given = {"serving_accept_length": 3.0, "training_loss": 5.8, "uniform_loss": 5.3, "training_accuracy": 0.2, "draft_vocab_size": 200}
    told = contradiction(**numbers(**given))
    assert told.exists is True
    assert "yet trains with a loss no better than chance: loss 5.8" in told.text


def test_status_of_what_was_found() -> None:
    found = findings([judged("a", "refuted"), judged("b", "supported", accuracy=0.3), judged("c", "undecided")], NONE)
    assert [(one.level, one.code) for one in found] == [("ok", "a"), ("fail", "b"), ("unknown", "c")]
    assert (found[1].value, found[1].threshold, found[1].unit, found[1].action) == (0.1, 0.3, "accuracy", "do b")
    assert found[0].action is None
    assert status(found) == "fail"
    assert status(findings([judged("a", "refuted"), judged("c", "undecided")], NONE)) == "unknown"


def test_a_contradiction_that_nothing_explains_is_unknown() -> None:
    fits = contradiction(**numbers(serving_accept_length=3.2, training_loss=2.0, uniform_loss=10.37))
    assert status(findings([judged("a", "refuted")], fits)) == "ok"
    assert [one.code for one in findings([judged("a", "refuted")], NONE)] == ["a", "no-cause-found"]
    assert status(findings([], NONE)) == "unknown"
