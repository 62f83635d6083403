"""Triage as a whole: what it asks, in which order, what it makes of failures; and that it names what was planted."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from remote_diag import hypotheses, triage
from remote_diag.errors import ConnectionLost, DeadlineExceeded, HostKeyError, RdiagError
from remote_diag.events import Event, Note, Progress
from remote_diag.triage_case import Case

from .support.in_process import InProcess
from .support.probe_files import write_hypothesis

if TYPE_CHECKING:
    from .support.planted import Planted, Planter
    from .support.tiny_stack import Stack


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Work where only hypotheses of the test's own are found; return the folder for them."""
    monkeypatch.chdir(tmp_path)
    everywhere = hypotheses.find_all
    monkeypatch.setattr(hypotheses, "find_all", lambda places=(): _only(everywhere(places), tmp_path / "probes"))
    return tmp_path / "probes" / "hypotheses"


def _only(found: Any, folder: Path) -> Any:
    declared, broken = found
    return [one for one in declared if folder in one.probe.path.resolve().parents], broken


def run(folder: Path, case: Case | None = None, *, name: str = "local", told: list[Event] | None = None) -> Any:
    outcome = triage.run(InProcess(folder, name), case or Case({}), tell=(told if told is not None else []).append)  # type: ignore[arg-type]
    return outcome.result


def test_a_hit_stops_nothing(own: Path, tmp_path: Path) -> None:
    write_hypothesis(own, "first", "return supported('seen', accuracy=0.2, next_command='rdiag x')", likelihood=0.9)
    write_hypothesis(own, "second", "return refuted('not seen')", likelihood=0.5)
    told: list[Event] = []
    result = run(tmp_path, told=told)
    assert (result.cause, result.supported, result.refuted) == ("first", ("first",), ("second",))
    assert [event.text.split(":")[0] for event in told if isinstance(event, Note)] == ["1/2 first", "2/2 second"]
    assert [(event.done, event.total) for event in told if isinstance(event, Progress)] == [(0, 2), (1, 2), (2, 2)]


def test_only_what_is_declared_is_handed_over(own: Path, tmp_path: Path) -> None:
    body = "return supported('%s %s %s' % (params.target, params.counts, params.observed_loss))"
    write_hypothesis(own, "one", body, params={"target": "str", "counts": "str | None = None", "observed_loss": "float | None = None"})
    result = run(tmp_path, Case({"target": "/t", "drafter_before": "/a", "loss": (7.5,), "draft_vocab_size": 200}))
    assert result.hypotheses[0].evidence == ("/t None 7.5",)


def test_what_is_missing_is_named_and_nothing_is_run(own: Path, tmp_path: Path) -> None:
    write_hypothesis(own, "one", "raise RuntimeError", params={"target": "str", "observed_loss": "float", "samples": "tuple[str, ...] = ()"})
    session = InProcess(tmp_path)
    result = triage.run(session, Case({})).result  # type: ignore[arg-type]
    assert session.ran == []
    one = result.hypotheses[0]
    assert (one.verdict, one.missing, one.evidence) == ("undecided", ("target", "log"), ("the case does not say: target, log",))
    assert result.cause is None


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ("raise ValueError('odd')", "could not be looked at: ValueError: odd"),
        ("context.unfit('no torch')", "could not be looked at: no torch"),
        ("return supported() if 0 else Result('perhaps', (), None, None, None, None, ())", "answered 'perhaps', which is no verdict"),
    ],
)
def test_a_failing_one_is_undecided_and_the_others_go_on(own: Path, tmp_path: Path, body: str, why: str) -> None:
    write_hypothesis(own, "bad", body, likelihood=0.9)
    write_hypothesis(own, "good", "return supported('seen')")
    result = run(tmp_path)
    assert (result.cause, result.undecided) == ("good", ("bad",))
    assert result.hypotheses[1].evidence[0] == why


def test_a_broken_file_is_undecided(own: Path, tmp_path: Path) -> None:
    write_hypothesis(own, "good", "return refuted('not seen')")
    (own / "bad.py").write_text("def\n")
    result = run(tmp_path)
    assert (result.refuted, result.undecided) == (("good",), ("bad",))
    assert "not Python" in result.hypotheses[0].evidence[0]


class _Failing(InProcess):
    error: RdiagError = ConnectionLost("gone")

    def run(self, probe: Any, params: Any = None, *, timeout: float | None = None) -> Any:  # noqa: ARG002
        self.ran.append("one")
        raise self.error


@pytest.mark.parametrize("error", [ConnectionLost("gone"), HostKeyError("changed")])
def test_a_lost_host_ends_it(own: Path, tmp_path: Path, error: RdiagError) -> None:
    for name in ("one", "two"):
        write_hypothesis(own, name, "return refuted()")
    session = _Failing(tmp_path)
    session.error = error
    with pytest.raises(type(error)):
        triage.run(session, Case({}))  # type: ignore[arg-type]
    assert session.ran == ["one"]


def test_a_deadline_ends_one_hypothesis_only(own: Path, tmp_path: Path) -> None:
    for name in ("one", "two"):
        write_hypothesis(own, name, "return refuted()")
    session = _Failing(tmp_path)
    session.error = DeadlineExceeded("after 10 s", hint="raise --timeout")
    result = triage.run(session, Case({})).result  # type: ignore[arg-type]
    assert result.undecided == ("one", "two")
    assert result.hypotheses[0].evidence == ("could not be looked at: after 10 s", "raise --timeout")


def test_commands_name_the_host(own: Path, tmp_path: Path) -> None:
    write_hypothesis(own, "one", "return supported(next_command='rdiag vocab-remap a')")
    write_hypothesis(own, "two", "return supported(next_command='write it anew')")
    commands = {one.id: one.next_command for one in run(tmp_path, name="gpu8").hypotheses}
    assert commands == {"one": "rdiag vocab-remap a --host gpu8", "two": "write it anew"}
    assert {one.next_command for one in run(tmp_path).hypotheses} == {"rdiag vocab-remap a", "write it anew"}


def test_numbers_become_the_contradiction(own: Path, tmp_path: Path) -> None:
    write_hypothesis(own, "one", "return supported(accuracy=0.02)")
    case = Case({"loss": (18.9,), "accuracy": (0.01,), "draft_vocab_size": 32_000, "serving_accept_length": 3.2})
    result = run(tmp_path, case)
    assert result.contradiction.exists is True
    assert (result.contradiction.training_loss, round(result.contradiction.uniform_loss, 3)) == (18.9, 10.373)
    explains = result.hypotheses[0].explains
    assert (explains.accuracy, explains.observed_accuracy, explains.accuracy_ratio) == (0.02, 0.01, 0.5)


def test_what_cannot_be_read_beforehand_is_noted(own: Path, tmp_path: Path) -> None:
    write_hypothesis(own, "one", "return refuted()")
    result = run(tmp_path, Case({"log": "/nowhere/log", "drafter_before": "/nowhere/a", "mapping": "/nowhere/b"}))
    assert [note.split(":")[0] for note in result.notes] == ["vocab-compare", "loss-check"]
    assert result.contradiction.exists is None


# On a stack that works


@pytest.fixture(scope="module")
def every_hypothesis() -> Any:
    return hypotheses.find_all()


@pytest.fixture(scope="module")
def planting(tiny_stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> Planter:
    from .support.planted import Planter

    return Planter(tiny_stack, tmp_path_factory.mktemp("planted"))


@pytest.fixture
def planter(planting: Planter, every_hypothesis: Any, monkeypatch: pytest.MonkeyPatch) -> Planter:
    """Return what plants causes; the shipped hypotheses are loaded once for all tests."""
    monkeypatch.setattr(hypotheses, "find_all", lambda _=(): every_hypothesis)
    return planting


GIVEN_TIME = pytest.mark.timeout(400)
"""Whoever comes first trains the stack."""
CAUSES = (
    "mapping-replaced", "verifier-order", "final-norm", "aux-order", "shift-by-one", "aux-layer-ids", "head-overwritten",
    "d2t-cast", "t2d-disagrees", "d2t-of-another", "embedding-replaced", "body-replaced",
    "norm-flags", "mask-empty",
)  # fmt: skip


def verdicts(result: Any) -> dict[str, str]:
    return {one.id: one.verdict for one in result.hypotheses}


def test_all_plants_are_tested() -> None:
    from .support.planted import PLANTS

    assert set(PLANTS) == {"healthy", *CAUSES}


@GIVEN_TIME
@pytest.mark.parametrize("cause", CAUSES)
def test_the_planted_cause_is_named_and_all_others_are_acquitted(planter: Planter, tmp_path: Path, cause: str) -> None:
    planted = planter.plant(cause)
    case = triage.load_case(planted.case)
    result = run(tmp_path, case)
    told = {one.id: one.evidence for one in result.hypotheses if one.verdict != "refuted"}
    assert result.cause == planted.cause, told
    assert set(verdicts(result).values()) == {"supported", "refuted"}, told
    # With less to go by it may become undecided. It is never acquitted, and no other one is accused.
    for missing in (("serving_dump", "trainer"), ("counts", "loss", "accuracy"), ("drafter_after",), ("drafter_before", "target")):
        less = run(tmp_path, replace(case, values={name: value for name, value in case.values.items() if name not in missing}))
        told = {one.id: one.evidence for one in less.hypotheses if one.verdict == "supported"}
        assert set(told) <= {planted.cause}, (missing, told)
        assert verdicts(less)[planted.cause or ""] != "refuted", missing


@GIVEN_TIME
def test_a_healthy_training_is_acquitted_of_everything(planter: Planter, tmp_path: Path) -> None:
    outcome = triage.run(InProcess(tmp_path), triage.load_case(planter.plant("healthy").case))  # type: ignore[arg-type]
    assert set(verdicts(outcome.result).values()) == {"refuted"}
    assert outcome.result.contradiction.exists is False
    assert outcome.status == "ok"


@GIVEN_TIME
def test_the_mapping_from_cause_to_repair(planter: Planter, tmp_path: Path) -> None:
    import math

    import torch

    from .support.planted import read_head
    from .support.tiny_stack import D, copy_drafter, evaluate

    planted = planter.plant("mapping-replaced")
    session = InProcess(tmp_path)
    result = triage.run(session, triage.load_case(planted.case)).result  # type: ignore[arg-type]
    loss, accuracy = planted.curve.loss[0], planted.curve.accuracy[0]
    assert loss > math.log(D)
    assert result.contradiction.exists is True
    ceiling = result.accuracy_ceiling or 0.0
    assert 0.5 * ceiling < accuracy < 1.2 * ceiling
    best = result.hypotheses[0]
    assert best.explains.accuracy == pytest.approx(ceiling)
    assert (best.next_command or "").startswith(("rdiag vocab-remap ", "rdiag vocab-keep "))
    out = tmp_path / "remapped"
    values = planted.values
    session.run("vocab-remap", {"source": values["drafter_before"], "mapping": values["drafter_after"], "out": str(out), "verifier": values["target"]})
    drafter = copy_drafter(planter.stack)
    with torch.no_grad():
        drafter.lm_head.weight.copy_(torch.from_numpy(read_head(out)))
    again = planter.train(drafter, ids=planter.other)
    original = evaluate(planter.stack.drafter, planter.stack.target, planter.sound)
    assert again.loss[0] < 1.15 * original.loss[0] < 0.6 * loss
    assert again.accuracy[0] > 0.9 * original.accuracy[0]
    # Diagnosed again as it would be trained now, the mapping is no suspect any more.
    repaired = run(tmp_path, triage.load_case(planted.case, {"drafter_after": str(out), "loss": tuple(again.loss), "accuracy": tuple(again.accuracy)}))
    assert verdicts(repaired)["mapping-replaced"] == "refuted"
    assert verdicts(repaired)["head-overwritten"] == "refuted"


def judged(planted: Planted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, id_: str, **values: Any) -> Any:
    """Return what one hypothesis makes of a case."""
    declared, _ = hypotheses.find_all()
    case = triage.load_case(planted.case)
    with monkeypatch.context() as patch:
        patch.setattr(hypotheses, "find_all", lambda _: ([one for one in declared if one.id == id_], []))
        known = {name: value for name, value in {**case.values, **values}.items() if value is not None}
        return run(tmp_path, replace(case, values=known)).hypotheses[0]


@GIVEN_TIME
def test_layers_that_are_shifted_without_the_last_one(planter: Planter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import numpy as np

    from probes.lib import case_samples, hidden_layers

    samples = [replace(one, aux=tuple(np.roll(layer, 1, 0) for layer in one.aux)) for one in planter.sound]
    planted, healthy = planter.case("aux-shifted", planter.train(samples=samples), samples=samples), planter.plant("healthy")

    def check(told: str, **known: Any) -> None:
        one = judged(planted, tmp_path, monkeypatch, "shift-by-one", **known)
        assert (one.verdict, one.evidence[-1]) == ("supported", "the states stand 1 token too late against the tokens")
        assert told in one.evidence[-2]
        one = judged(healthy, tmp_path, monkeypatch, "shift-by-one", **known)
        assert (one.verdict, told in one.evidence[-1]) == ("refuted", True)

    check("likeness of the other layers to the final states")
    # Where that tells nothing, the server does, or the target; else it stays open.
    monkeypatch.setattr(case_samples, "STANDS_OUT", 2.0)
    check("cosine with the server's states")
    check("the target's own layers give for", serving_dump=None)
    monkeypatch.setattr(hidden_layers, "_KINDS", ())
    for case in (planted, healthy):
        one = judged(case, tmp_path, monkeypatch, "shift-by-one", serving_dump=None)
        assert (one.verdict, one.missing) == ("undecided", ("serving_dump",))


@GIVEN_TIME
def test_mappings_that_nothing_was_loaded_into_or_that_hold_ids(
    planter: Planter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import numpy as np

    from .support.planted import SPREAD
    from .support.tiny_stack import D, V

    ids = planter.stack.mapping_a
    for name, mapping, told, command in (
        ("never-loaded", {"d2t": np.zeros(D, np.int64), "t2d": np.arange(V)}, "all zero", "write the d2t and t2d of"),
        ("as-ids", {"d2t": ids * SPREAD}, "200 of 200 rows as token ids", "write d2t anew as offsets"),
    ):
        planted = planter.case(name, planter.train(), after=mapping)
        one = judged(planted, tmp_path, monkeypatch, "t2d-disagrees")
        assert (one.verdict, told in one.evidence[0]) == ("supported", True), one.evidence
        assert (one.next_command or "").startswith(command)


@GIVEN_TIME
def test_a_head_that_nothing_was_loaded_into(planter: Planter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import numpy as np

    head = np.full_like(planter.head(planter.stack.mapping_a), np.nan)
    planted = planter.case("head-nan", planter.train(), after={"lm_head__weight": head})
    one = judged(planted, tmp_path, monkeypatch, "head-overwritten")
    assert (one.verdict, one.evidence[-1]) == ("supported", "200 of its sampled rows hold NaN: the head was never loaded")
