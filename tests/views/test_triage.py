from __future__ import annotations

from typing import Any

import pytest

from remote_diag.findings import status
from remote_diag.outcome import Outcome, Timing
from remote_diag.triage import TriageResult
from remote_diag.triage_ranking import Explains, Judged, Verdict, contradiction, findings
from remote_diag.views.triage import next_steps, render, sentence


def judged(id_: str, verdict: Verdict, **more: Any) -> Judged:
    values = {
        "claim": "The claim", "evidence": ("a number",), "explains": Explains(None, None, None, None, None),
        "next_command": f"rdiag {id_}", "missing": (), "likelihood": 0.1, "seconds": 0.1, **more,
    }  # fmt: skip
    return Judged(id_, verdict=verdict, **values)


def result(*hypotheses: Judged, **more: Any) -> TriageResult:
    by = {name: tuple(one.id for one in hypotheses if one.verdict == name) for name in ("supported", "undecided", "refuted")}
    against = contradiction(
        serving_accept_length=3.2, serving_accuracy=None, training_loss=19.0, uniform_loss=10.4, training_accuracy=None, draft_vocab_size=None
    )
    cause = by["supported"][0] if len(by["supported"]) == 1 else None
    return TriageResult(cause, against, hypotheses, by["supported"], by["undecided"], by["refuted"], **{"accuracy_ceiling": None, "draft_vocab_size": None, "notes": (), **more})


def shown(answer: TriageResult) -> str:
    from rich.console import Console

    found = tuple(findings(answer.hypotheses, answer.contradiction))
    timing = Timing(0.0, 0.0, 0.1, 0.1)
    console = Console(width=100, color_system=None)
    with console.capture() as capture:
        console.print(render(Outcome("gpu8", "triage", "run", status(found), answer, found, timing)))
    return capture.get()


@pytest.mark.parametrize(
    ("verdicts", "told"),
    [
        (["supported", "refuted"], "the cause is h0"),
        (["supported", "supported"], "2 hypotheses are supported: h0, h1"),
        (["undecided", "refuted"], "no cause found; 1 of 2 hypotheses are undecided"),
        (["refuted", "refuted"], "none of 2 hypotheses is the cause"),
    ],
)
def test_the_verdict_in_one_sentence(verdicts: list[Verdict], told: str) -> None:
    assert sentence(result(*(judged(f"h{number}", verdict) for number, verdict in enumerate(verdicts)))) == told


def test_the_numbers_are_shown() -> None:
    explains = Explains("a low accuracy", 0.3, 0.02, 10.4, None)
    text = shown(result(judged("one", "supported", explains=explains), judged("two", "undecided", missing=("target",)), accuracy_ceiling=0.3, notes=("loss-check: no",)))
    assert text.startswith("gpu8: triage: fail - the cause is one\nserves above chance: acceptance length 3.2, yet trains no better")
    for line in (
        "an accuracy of at most 0.3", "explains: a low accuracy", "accuracy at most 0.3 explained, 0.02 observed; loss 10.4 explained, nothing observed",
        "to decide it, add to the case: target", "note: loss-check: no",
    ):  # fmt: skip
        assert line in text


def test_texts_from_a_host_steer_no_terminal() -> None:
    evil = "\x1b[31mred\x07\u202e"
    hostile = judged("one", "supported", claim=evil, evidence=(evil,), explains=Explains(evil, None, None, None, None), next_command=evil, missing=(evil,))
    for text in (shown(result(hostile, notes=(evil,))), *next_steps((hostile,))):
        assert not {"\x1b", "\x07", "\u202e"} & set(text)


def test_next_steps_are_those_of_the_cause() -> None:
    both = (judged("one", "supported"), judged("two", "undecided"))
    assert next_steps(both) == ["next:", "  rdiag one"]
    assert next_steps(both[1:]) == ["next:", "  rdiag two"]
    assert next_steps((judged("three", "refuted"), judged("four", "undecided", next_command=None))) == []


def test_a_long_command_stays_one_line() -> None:
    command = "rdiag vocab-remap " + "/long/path" * 40
    assert next_steps((judged("one", "supported", next_command=command),)) == ["next:", f"  {command}"]
