"""The hidden states of the target's layers are stored in another order than the drafter is fed with.

The drafter's first matrix has one block for each layer: low, middle, high. Layers that come in another order meet the weights
of one another. Nothing about their shapes shows it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from probes.lib.files import Meter
    from probes.lib.hypothesis import Answer
    from remote_diag.probe import Context

EFFECTS = ("reads-files",)
HYPOTHESIS = {"cost_s": 8.0, "likelihood": 0.08}

ALIKE = 0.9
"""Cosine of states of the same layer and token; below, they are others."""
SLIGHT = 0.02
"""Nats that an order may gain by accident."""


@dataclass(frozen=True)
class Params:
    """Entries of the case."""

    __pydantic_config__ = {"extra": "forbid", "allow_inf_nan": False, "use_attribute_docstrings": True}

    samples: tuple[str, ...]
    """Files with the hidden states that it is trained on."""
    drafter_before: str | None = None
    """The drafter that serves above chance (A)."""
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
    """Hold the layers against a server's, or run the drafter under every order of them."""
    context.require("numpy")
    from probes.lib.hypothesis import answered

    return Result(**answered(lambda meter: _decide(params, context, meter)))


def _decide(params: Params, context: Context, meter: Meter) -> Answer:
    from probes.lib.case_samples import compare_served, read_texts
    from probes.lib.hypothesis import needs, refuted, undecided

    facts: list[str] = []
    if params.serving_dump:
        like = compare_served(
            read_texts(context, params.samples, meter, _width(params, meter)),
            read_texts(context, params.serving_dump, meter, _width(params, meter)),
        )
        order, worst = like.order(like.shift), like.worst(like.shift)
        facts.append("layer by layer, training's states are most like the server's %s (least cosine %.3f)" % (
            ", ".join(map(str, order)), worst))  # fmt: skip
        if worst >= ALIKE:
            if order == tuple(range(len(order))):
                return refuted(*facts)
            if sorted(order) == list(range(len(order))):
                return _supported(facts, order)
        facts.append("not every layer has one that it is like")
    if params.target is not None:
        answer = _by_target(params, context, params.target, facts, meter)
        if answer is not None:
            return answer
    if params.drafter_before is None:
        return undecided(*facts, missing=("drafter_before",)) if facts else needs("serving_dump", "target", "drafter_before")
    return _by_replay(params, context, facts)


def _by_target(params: Params, context: Context, path: str, facts: list[str], meter: Meter) -> Answer | None:
    """Judge by the layers that the target itself computes; None where that does not tell."""
    from probes.lib.case_samples import find_layers
    from probes.lib.hypothesis import refuted
    from probes.lib.target import open_target

    with open_target(path, meter) as target:
        found, told = find_layers(context, params.samples, target, meter)
    facts.append(told)
    layers = [layer for layer in found or () if layer is not None]
    if not layers or len(layers) < len(found or ()) or len(set(layers)) < len(layers):
        return None
    order = tuple(sorted(layers).index(layer) for layer in layers)
    return refuted(*facts) if layers == sorted(layers) else _supported(facts, order)


def _width(params: Params, meter: Meter) -> int | None:
    from probes.lib.target import open_target

    if params.target is None:
        return None
    with open_target(params.target, meter) as target:
        return target.head().columns


def _by_replay(params: Params, context: Context, facts: list[str]) -> Answer:
    from itertools import permutations

    from probes.lib.case_replay import has_torch, run_over
    from probes.lib.hypothesis import refuted, undecided

    if not has_torch():
        return undecided(*facts, "running the drafter needs torch on the host", missing=("serving_dump",))
    plain = run_over(context, params.drafter_before or "", params.samples, params.target)
    layers = len(plain.declared.hypothesis.aux_order)
    every = [order for order in permutations(range(layers)) if order != tuple(range(layers))] if layers <= 4 else [
        tuple(range(layers))[::-1]
    ]
    tried = run_over(
        context, params.drafter_before or "", params.samples, params.target,
        tuple("aux=%s" % "-".join(map(str, order)) for order in every),
    )  # fmt: skip
    best = tried.best.hypothesis.aux_order
    facts += [
        tried.told(),
        "in the best other order, %s: top-1 %.3f, loss %.3g" % (
            "-".join(map(str, best)), tried.best.steps[0].top1, tried.best.steps[0].loss),
    ]  # fmt: skip
    if tried.alternative:
        return _supported(facts, best)
    if tried.declared.score <= tried.best.score + SLIGHT:
        return refuted(*facts)
    if not tried.fits:
        return refuted(*facts, "no order of the layers makes it predict these samples")
    return undecided(*facts, "it does slightly better in the other order, and well in both", missing=("serving_dump",))


def _supported(facts: list[str], order: tuple[int, ...]) -> Answer:
    from probes.lib.hypothesis import supported

    return supported(
        *facts,
        explains="a loss and an accuracy near those of token frequencies: every layer meets the weights of another",
        next_command="make the hidden states anew with the layers in ascending order; stored now: %s" % "-".join(map(str, order)),
    )
