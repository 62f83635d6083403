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
            if answer is not None or not params.serving_dump:
                return answer or _untold()
    else:
        texts = read_texts(context, params.samples, meter, hidden)
    return _by_server(texts, read_texts(context, params.serving_dump, meter, hidden))


def _untold() -> Answer:
    from probes.lib.hypothesis import undecided

    return undecided(
        "the stored states predict no place of the text clearly better than others",
        missing=("serving_dump",),
    )


def _by_text(texts: list[Text], target: Target) -> Answer | None:
    """Judge by which token the target's head says; None where that does not tell."""
    from probes.lib.case_samples import predict
    from probes.lib.hypothesis import percent, refuted

    found = predict(texts, target)
    better = found.better
    told = ", ".join("%s %s" % (_NAMES[step], percent(better[step])) for step in sorted(better))
    fact = "the target's head, fed with the stored states, says %s (%d places)" % (told, found.positions)
    if found.shift is None:
        return None
    if found.shift == 1:
        return refuted(fact)
    return _supported(fact, found.shift - 1, better[1])


_NAMES = {-1: "the token before in", 0: "their own token in", 1: "the next token in", 2: "the one after the next in"}


def _supported(fact: str, early: int, accuracy: float | None) -> Answer:
    from probes.lib.hypothesis import supported

    where = "%d token%s too %s" % (abs(early), "" if abs(early) == 1 else "s", "early" if early > 0 else "late")
    return supported(
        fact,
        "the states stand %s against the tokens" % where,
        explains="a loss near or above that of a uniform guess: states and tokens are of different places",
        accuracy=accuracy,
        next_command="make the hidden states anew without the shift, or take the shift out of the trainer's data loader",
    )


def _by_server(texts: list[Text], served: list[Text]) -> Answer:
    """Judge by the place at which the states are those of the server."""
    from probes.lib.case_samples import compare_served
    from probes.lib.hypothesis import refuted, undecided

    like = compare_served(texts, served)
    cosines = {shift: float(like.cosines[shift].max(axis=1).mean()) for shift in sorted(like.cosines)}
    fact = "cosine with the server's states, by how much later training has them: " + ", ".join(
        "%+d %.3f" % item for item in cosines.items()
    )
    if max(cosines.values()) < ALIKE:
        return undecided(fact, "at no place are they alike")
    if like.shift == 0:
        return refuted(fact)
    return _supported(fact, -like.shift, None)
