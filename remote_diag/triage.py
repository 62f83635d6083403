"""From "the loss is random" to the cause: every hypothesis is looked at on the host, and all verdicts are ranked.

::

    from remote_diag import connect, triage
    with connect("gpu8") as host:
        outcome = triage.run(host, triage.load_case(Path("case.yaml")))
    outcome.result.cause          # 'mapping-replaced'
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import hypotheses, triage_case
from .errors import AuthError, HostKeyError, RdiagError, UnreachableError
from .events import Event, Note, Progress
from .findings import Finding, status
from .outcome import Outcome, Timing
from .text import safe
from .triage_ranking import Contradiction, Explains, Judged, cause, contradiction, findings, rank

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .hypotheses import Broken, Declared
    from .session import Session
    from .triage_case import Case

NAME = "triage"
_STOPS = (UnreachableError, AuthError, HostKeyError)
"""Errors after which nothing further can be asked of the host."""


@dataclass(frozen=True)
class TriageResult:
    """What came of a triage."""

    cause: str | None
    """Id of the one hypothesis that is supported; None when none is, or several are."""
    contradiction: Contradiction
    hypotheses: tuple[Judged, ...]
    """All of them: supported, undecided, refuted; the best explanation first."""
    supported: tuple[str, ...]
    undecided: tuple[str, ...]
    refuted: tuple[str, ...]
    accuracy_ceiling: float | None
    """Highest accuracy that exchanging the two mappings would leave a perfect drafter, 0 to 1: the share of the text
    whose row is the same in both. None without counts."""
    draft_vocab_size: int | None
    notes: tuple[str, ...]
    """What could not be found out beforehand, and why."""


@dataclass(frozen=True)
class _Observed:
    """What is found out before any hypothesis is looked at."""

    case: Case
    contradiction: Contradiction
    ceiling: float | None
    notes: tuple[str, ...]


def load_case(
    path: Path | None = None,
    given: Mapping[str, Any] | None = None,
    sets: Sequence[str] = (),
    *,
    probe_paths: Sequence[Path] = (),
) -> Case:
    """Return a case from a file, options, or both; see :func:`remote_diag.triage_case.load`."""
    declared, _ = hypotheses.find_all(probe_paths)
    return triage_case.load(path, given or {}, sets, declared)


def run(
    session: Session,
    case: Case,
    *,
    probe_paths: Sequence[Path] = (),
    timeout: float | None = None,
    tell: Callable[[Event], None] = lambda _: None,
) -> Outcome[TriageResult]:
    """Look at every hypothesis on the host of ``session``, the cheapest and likeliest first, and rank them.

    None is left out because another one was confirmed. One that fails, or whose environment is unfit, is undecided.

    Args:
        session: open or not.
        case: what is known.
        probe_paths: further places with hypotheses.
        timeout: deadline of each hypothesis, seconds; the host's by default.
        tell: told of every step.

    Raises:
        RdiagError: the host cannot be reached any more, or does not let anybody in.
    """
    from .session import new_run_id

    begun = time.monotonic()
    declared, broken = hypotheses.find_all(probe_paths)
    observed = _observe(session, case, timeout, tell)
    judged = [_of_broken(one) for one in broken]
    for number, one in enumerate(declared):
        tell(Progress(number, len(declared), "hypotheses", one.id))
        judged.append(_judge(session, one, observed.case, timeout))
        tell(Note(f"{number + 1}/{len(declared)} {one.id}: {judged[-1].verdict} ({judged[-1].seconds:.1f} s)"))
    tell(Progress(len(declared), len(declared), "hypotheses", "done"))
    ranked = rank(judged)
    found: list[Finding] = findings(ranked, observed.contradiction)
    by_verdict = {name: tuple(one.id for one in ranked if one.verdict == name) for name in ("supported", "undecided", "refuted")}
    result = TriageResult(
        cause=cause(ranked),
        contradiction=observed.contradiction,
        hypotheses=tuple(ranked),
        supported=by_verdict["supported"],
        undecided=by_verdict["undecided"],
        refuted=by_verdict["refuted"],
        accuracy_ceiling=observed.ceiling,
        draft_vocab_size=observed.case.get("draft_vocab_size"),
        notes=observed.notes,
    )
    seconds = time.monotonic() - begun
    return Outcome(
        host=session.host.name,
        probe=NAME,
        run_id=new_run_id(),
        status=status(found),
        answer=result,
        findings=tuple(found),
        timing=Timing(connect_s=0.0, upload_s=0.0, run_s=seconds, total_s=seconds),
        notes=tuple(session.notes),
    )


# What is known before any hypothesis is looked at


def _observe(session: Session, case: Case, timeout: float | None, tell: Callable[[Event], None]) -> _Observed:
    """Find out from the mappings and the training's numbers what serving and training say."""
    notes: list[str] = []
    ceiling = None
    after = case.get("mapping") or case.get("drafter_after")
    if case.get("drafter_before") and after:
        tell(Note("comparing the mappings"))
        compared = _ask(session, "vocab-compare", timeout, notes, a=case.get("drafter_before"), b=after, counts=case.get("counts"))
        if compared is not None:
            ceiling = compared.positional_token_share
            case = case.with_values(
                draft_vocab_size=case.get("draft_vocab_size") or compared.draft_vocab_size,
                target_vocab_size=case.get("target_vocab_size") or compared.target_vocab_size,
            )
    if case.get("log") or case.get("loss") or case.get("accuracy"):
        tell(Note("reading the training's numbers"))
        case = _read_numbers(session, case, timeout, notes)
    against = contradiction(
        serving_accept_length=case.get("serving_accept_length"),
        serving_accuracy=case.get("serving_accuracy"),
        training_loss=case.get("observed_loss"),
        uniform_loss=case.get("uniform_loss"),
        training_accuracy=case.get("observed_accuracy"),
        draft_vocab_size=case.get("draft_vocab_size"),
    )
    return _Observed(case, against, ceiling, tuple(notes))


def _read_numbers(session: Session, case: Case, timeout: float | None, notes: list[str]) -> Case:
    read = _ask(
        session, "loss-check", timeout, notes,
        path=case.get("log"), loss=case.get("loss") or (), accuracy=case.get("accuracy") or (),
        draft_vocab_size=case.get("draft_vocab_size"), target_vocab_size=case.get("target_vocab_size"),
        mask_density=case.get("mask_density"),
    )  # fmt: skip
    if read is None:
        return case
    numbers = read.interpretation
    families = {found.family for found in read.dialects}
    trainer = next((name for name in ("specforge", "speculators", "angelslim", "torchspec", "modelopt", "nemo", "safeai")
                    if name in families), None)  # fmt: skip
    return case.with_values(
        observed_loss=numbers.loss_start,
        observed_accuracy=numbers.accuracy_start,
        uniform_loss=numbers.reference_high if numbers.reference_high is not None else _plain_reference(case, numbers),
        loss_verdict=read.verdict,
        trainer=case.get("trainer") or trainer,
    )


def _plain_reference(case: Case, numbers: Any) -> float | None:
    """Return ln D for bare numbers: people who type them mean the loss per supervised token."""
    return None if case.get("log") else numbers.ln_d


def _ask(session: Session, probe: str, timeout: float | None, notes: list[str], **params: Any) -> Any:
    """Return the result of a shipped probe, None where it has none; a failure is noted."""
    try:
        return session.run(probe, params, timeout=timeout).answer
    except _STOPS:
        raise
    except RdiagError as error:
        notes.append(f"{probe}: {error.message}")
        return None


# One hypothesis


def _judge(session: Session, one: Declared, case: Case, timeout: float | None) -> Judged:
    begun = time.monotonic()
    names = [field.name for field in one.probe.params_fields]
    missing = tuple(name for name in one.requires if case.get(name) is None)
    if missing:
        # The derived entries come from the numbers of the training.
        wanted = tuple(dict.fromkeys("log" if name in triage_case.OBSERVED else name for name in missing))
        return _undecided(one.id, one.claim, f"the case does not say: {', '.join(wanted)}", case, one.likelihood, missing=wanted)
    params = {name: case.get(name) for name in names if case.get(name) is not None}
    try:
        answer = session.run(one.probe, params, timeout=timeout).answer
    except _STOPS:
        raise
    except RdiagError as error:
        why = f"could not be looked at: {error.message}"
        hints = () if error.hint is None else (error.hint,)
        return _undecided(one.id, one.claim, why, case, one.likelihood, *hints, seconds=time.monotonic() - begun)
    if answer is None:
        return _undecided(one.id, one.claim, "gave no result", case, one.likelihood, seconds=time.monotonic() - begun)
    if answer.verdict not in ("supported", "refuted", "undecided"):
        why = f"answered {safe(str(answer.verdict), limit=40)!r}, which is no verdict"
        return _undecided(one.id, one.claim, why, case, one.likelihood, seconds=time.monotonic() - begun)
    return Judged(
        id=one.id,
        claim=one.claim,
        verdict=answer.verdict,
        evidence=tuple(answer.evidence),
        explains=_explains(case, answer.explains, answer.accuracy, answer.loss),
        next_command=_on_host(answer.next_command, session.host.name),
        missing=tuple(answer.missing),
        likelihood=one.likelihood,
        seconds=round(time.monotonic() - begun, 3),
    )


def _undecided(
    id_: str, claim: str, why: str, case: Case | None, likelihood: float, *more: str,
    missing: tuple[str, ...] = (), seconds: float = 0.0,
) -> Judged:  # fmt: skip
    explains = Explains(None, None, None, None, None) if case is None else _explains(case, None, None, None)
    return Judged(id_, claim, "undecided", (why, *more), explains, None, missing, likelihood, round(seconds, 3))


def _of_broken(one: Broken) -> Judged:
    return _undecided(one.id, "A file that is no hypothesis", one.error.message, None, 0.0, *filter(None, [one.error.hint]))


def _explains(case: Case, text: str | None, accuracy: float | None, loss: float | None) -> Explains:
    return Explains(text, accuracy, case.get("observed_accuracy"), loss, case.get("observed_loss"))


def _on_host(command: str | None, host: str) -> str | None:
    """Return a command of rdiag as it has to be typed here, for that host."""
    if command is None or not command.startswith("rdiag ") or host == "local":
        return command
    return f"{command} --host {shlex.quote(host)}"


def with_host(case: Case, host: str) -> Case:
    """Return the case with another host than its own."""
    return replace(case, host=host)
