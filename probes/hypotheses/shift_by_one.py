"""The stored hidden states are shifted against their tokens by one.

Programs that make the data and trainers each may shift states against tokens; when both do, or neither, the drafter learns to
predict a token that it was just given, or one that nobody can know yet.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from probes.lib.case_samples import Text
    from probes.lib.files import Meter
    from probes.lib.hypothesis import Answer
    from probes.lib.target import Target
    from remote_diag.probe import Context

EFFECTS = ("reads-files",)
HYPOTHESIS = {"cost_s": 3.0, "likelihood": 0.1}

ALIKE = 0.9
"""Cosine of states of the same layer and token, in bfloat16 or quantised to 8 bits; below, they are others."""


@dataclass(frozen=True)
class Params:
    """Entries of the case."""

    __pydantic_config__ = {"extra": "forbid", "allow_inf_nan": False, "use_attribute_docstrings": True}

    samples: tuple[str, ...]
    """Files with the hidden states that it is trained on."""
    target: str | None = None
    """The target model."""
    serving_dump: tuple[str, ...] = ()
    """The same texts' hidden states as the server has them."""


@dataclass(frozen=True)
class Result:
    """What every hypothesis answers."""

    __pydantic_config__ = {"extra": "forbid", "allow_inf_nan": False, "use_attribute_docstrings": True}

    verdict: Literal["supported", "refuted", "undecided"]
    """Whether it holds."""
    evidence: tuple[str, ...]
    """The numbers that say so."""
    explains: str | None
    """What it would account for, in words."""
    accuracy: float | None
    """Accuracy that training would start with for this cause alone, at most, 0 to 1."""
    loss: float | None
    """Loss that training would start with for this cause alone, nat."""
    next_command: str | None
    """What to type next."""
    missing: tuple[str, ...]
    """Entries of the case that would decide it."""


def run(params: Params, context: Context) -> Result:
    """Find by how many tokens later the target's head, fed with the stored states, is right."""
    context.require("numpy")
    from probes.lib.hypothesis import answered

    return Result(**answered(lambda meter: _decide(params, context, meter)))


def _decide(params: Params, context: Context, meter: Meter) -> Answer:
    from probes.lib.case_samples import read_texts
    from probes.lib.hypothesis import needs

    if params.target is None and not params.serving_dump:
        return needs("target", "serving_dump")
    hidden = None
    if params.target is not None:
        from probes.lib.target import open_target

        with open_target(params.target, meter) as target:
            hidden = target.head().columns
            texts = read_texts(context, params.samples, meter, hidden)
            answer = _by_text(texts, target)
            if answer.verdict == "refuted" and texts[0].aux:
                facts, told = _beside_final(texts, answer.evidence)
                return told or _by_aux(params, context, texts, facts, (target, meter))
            if answer.verdict == "supported" or not params.serving_dump:
                return answer
    else:
        texts = read_texts(context, params.samples, meter, hidden)
    return _by_server(texts, read_texts(context, params.serving_dump, meter, hidden))


def _by_text(texts: list[Text], target: Target) -> Answer:
    """Judge the final states by which token the target's head says."""
    from probes.lib.case_samples import predict
    from probes.lib.hypothesis import percent, refuted, undecided

    found = predict(texts, target)
    better = found.better
    told = ", ".join("%s %s" % (_NAMES[step], percent(better[step])) for step in sorted(better))
    fact = "the target's head, fed with the stored states, says %s (%d places)" % (told, found.positions)
    if found.shift is None:
        return undecided(fact, "they predict no place of the text clearly better than others", missing=("serving_dump",))
    if found.shift == 1:
        return refuted(fact)
    return _supported(fact, found.shift - 1, better[1])


def _beside_final(texts: list[Text], facts: tuple[str, ...]) -> tuple[tuple[str, ...], Answer | None]:
    """Judge the layers that feed the drafter by the final states, which are in their places: (facts, answer or None)."""
    from probes.lib.case_samples import layers_beside_final
    from probes.lib.hypothesis import refuted

    alike, late = layers_beside_final(texts)
    if not alike:
        return facts, None
    told = "likeness of the other layers to the final states, by how much later they stand: %s" % ", ".join(
        "%+d %.3f" % item for item in alike.items()
    )
    if late is None:
        return (*facts, told), None
    return facts, _supported(told, -late, None, *facts) if late else refuted(*facts, told)


def _by_aux(
    params: Params, context: Context, texts: list[Text], facts: tuple[str, ...], opened: tuple[Target, Meter]
) -> Answer:
    """Judge the layers that feed the drafter by the server's, or by what the target computes."""
    from probes.lib.case_samples import match_aux, read_texts
    from probes.lib.files import Unreadable
    from probes.lib.hypothesis import refuted, undecided

    target, meter = opened
    if params.serving_dump:
        answer = _by_server(texts, read_texts(context, params.serving_dump, meter, target.head().columns), facts)
        if answer.verdict != "undecided":
            return answer
        facts = answer.evidence
    try:
        offsets = {match.offset for match in match_aux(context, params.samples, target, meter) if match.layer is not None}
    except Unreadable as error:
        offsets = set()
        facts = (*facts, "the target's layers could not be run: %s" % error.reason)
    if len(offsets) == 1:
        (offset,) = offsets
        told = "the states of the other layers are those that the target's own layers give for %s"
        return _supported(told % "other places", offset, None, *facts) if offset else refuted(*facts, told % "the same places")
    return undecided(
        *facts, "whether the states of the other layers are in their places is not known", missing=("serving_dump",)
    )


_NAMES = {-1: "the token before in", 0: "their own token in", 1: "the next token in", 2: "the one after the next in"}


def _supported(fact: str, early: int, accuracy: float | None, *more: str) -> Answer:
    from probes.lib.hypothesis import supported

    where = "%d token%s too %s" % (abs(early), "" if abs(early) == 1 else "s", "early" if early > 0 else "late")
    return supported(
        *more,
        fact,
        "the states stand %s against the tokens" % where,
        explains="a loss near or above that of a uniform guess: states and tokens are of different places",
        accuracy=accuracy,
        next_command="make the hidden states anew without the shift, or take the shift out of the trainer's data loader",
    )


def _by_server(texts: list[Text], served: list[Text], facts: tuple[str, ...] = ()) -> Answer:
    """Judge by the place at which the states are those of the server."""
    from probes.lib.case_samples import compare_served
    from probes.lib.hypothesis import refuted, undecided

    like = compare_served(texts, served)
    cosines = {shift: float(like.cosines[shift].max(axis=1).mean()) for shift in sorted(like.cosines)}
    fact = "cosine with the server's states, by how much later training has them: " + ", ".join(
        "%+d %.3f" % item for item in cosines.items()
    )
    if max(cosines.values()) < ALIKE:
        return undecided(*facts, fact, "at no place are they alike")
    if like.shift == 0:
        return refuted(*facts, fact)
    return _supported(fact, -like.shift, None, *facts)
