"""The hidden states come from other layers of the target than those that the drafter was trained with.

A number means the output of a layer to some programs and its input to others; ids that are copied from one kind of config into
the other are off by one. The drafter is then fed with states that are alike, and not the ones that it knows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from probes.lib.files import Meter
    from probes.lib.hypothesis import Answer
    from remote_diag.probe import Context

EFFECTS = ("reads-files",)
HYPOTHESIS = {"cost_s": 6.0, "likelihood": 0.15}

ALIKE = 0.97
"""Cosine above which states are of the same layer, whatever the precision."""
OTHER = 0.9
"""Cosine below which they are of another one."""


@dataclass(frozen=True)
class Params:
    """Entries of the case."""

    __pydantic_config__ = {"extra": "forbid", "allow_inf_nan": False, "use_attribute_docstrings": True}

    drafter_before: str | None = None
    """The drafter that serves above chance (A)."""
    drafter_after: str | None = None
    """The drafter as training has it (B)."""
    target: str | None = None
    """The target model."""
    samples: tuple[str, ...] = ()
    """Files with the hidden states that it is trained on."""
    serving_dump: tuple[str, ...] = ()
    """The same texts' hidden states as the server has them."""
    sample_layers: tuple[int, ...] = ()
    """Layers of the target whose input was captured into the samples, in order."""
    observed_accuracy: float | None = None
    """Accuracy that training starts with, 0 to 1."""


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
    """Compare the configurations, the samples with those of a server, and run the drafter over the samples."""
    context.require("numpy")
    from probes.lib.hypothesis import answered

    return Result(**answered(lambda meter: _decide(params, context, meter)))


def _decide(params: Params, context: Context, meter: Meter) -> Answer:
    from probes.lib.hypothesis import refuted, undecided

    facts: list[str] = []
    before = _inputs(params.drafter_before, "before", facts, meter)
    after = _inputs(params.drafter_after, "in training", facts, meter)
    if before is not None and after is not None and before != after:
        return _supported(facts, before, "the two configurations mean different layers")
    known = before or after
    if params.sample_layers:
        facts.append("the samples hold the inputs of layers %s" % _listed(params.sample_layers))
        if known is not None and params.sample_layers[: len(known)] != known:
            return _supported(facts, known, "the samples were taken from other layers")
    told = _by_states(params, context, known, facts, meter)
    if told is True:
        return _supported(facts, known, "the samples hold other layers than the drafter is fed with elsewhere")
    if told is False or (params.sample_layers and known is not None):
        return refuted(*facts)
    if not params.samples and before is not None and after is not None:
        return undecided(*facts, "the configurations agree; what the samples hold is not known", missing=("samples", "sample_layers"))
    return undecided(*facts or ["which layers the samples hold is not known"], missing=("serving_dump", "sample_layers"))


def _by_states(
    params: Params, context: Context, known: tuple[int, ...] | None, facts: list[str], meter: Meter
) -> bool | None:
    """Return whether the samples hold other layers, by what is stored in them; None where that does not tell."""
    told = _by_server(params, context, facts, meter)
    if told is None and params.samples and params.target is not None:
        told = _by_target(params, context, known, facts)
    if told is None and params.samples and params.drafter_before is not None:
        told = _by_drafter(params, context, facts)
    return told


def _inputs(path: str | None, which: str, facts: list[str], meter: Meter) -> tuple[int, ...] | None:
    """Return the layers whose input feeds a drafter by its configuration; None where that does not say."""
    from probes.lib.check_config import AUX_INPUT, meant_convention
    from probes.lib.drafter import open_drafter

    if path is None:
        return None
    with open_drafter(path, meter) as drafter:
        config = drafter.config
        ids = None if config is None else config.aux_ids[0]
        fc, hidden = drafter.entry("fc"), None if config is None else config.target_hidden_size
    if config is None or ids is None:
        facts.append("the config.json of the drafter %s names no layers" % which)
        return None
    inputs = meant_convention(config) == AUX_INPUT
    told = "takes the %s of layers %s" % ("inputs" if inputs else "outputs", _listed(ids))
    facts.append("the drafter %s %s (%s)" % (which, told, config.dialect))
    blocks = fc.shape[1] // hidden if fc is not None and len(fc.shape) == 2 and hidden else len(ids)
    # speculators may list the last layer too, whose state the loss needs and fc does not.
    return tuple(item if inputs else item + 1 for item in ids)[:blocks]


def _by_server(params: Params, context: Context, facts: list[str], meter: Meter) -> bool | None:
    """Return whether a server feeds the drafter with other layers; None where that is not known."""
    from probes.lib.case_samples import compare_served, read_texts
    from probes.lib.target import open_target

    if not params.samples or not params.serving_dump:
        return None
    width = None
    if params.target is not None:
        with open_target(params.target, meter) as target:
            width = target.head().columns
    like = compare_served(
        read_texts(context, params.samples, meter, width), read_texts(context, params.serving_dump, meter, width)
    )
    worst = like.worst(like.shift)
    order = like.order(like.shift)
    each = ", ".join("%.3f" % value for value in like.cosines[like.shift].max(axis=1))
    facts.append("cosine of each layer with the server's that it is most like: %s (%d tokens)" % (each, like.tokens))
    if worst >= ALIKE and sorted(order) == list(range(len(order))):
        return False
    if worst < OTHER or len(set(order)) < len(order):
        return True
    return None


def _by_target(params: Params, context: Context, known: tuple[int, ...] | None, facts: list[str]) -> bool | None:
    """Judge by what the target itself computes; None where that does not tell."""
    from probes.lib.case_samples import find_layers
    from probes.lib.files import Meter
    from probes.lib.target import open_target

    meter = Meter()
    with open_target(params.target or "", meter) as target:
        found, told = find_layers(context, params.samples, target, meter)
    facts.append(told)
    if found is None or known is None:
        return None
    if None in found:
        return True
    # Their order is another matter.
    return sorted(layer for layer in found if layer is not None) != sorted(known)


def _by_drafter(params: Params, context: Context, facts: list[str]) -> bool | None:
    """Return False where the drafter does far better with these layers than training does; None where that does not tell."""
    from probes.lib.case_replay import has_torch, run_over

    if not has_torch():
        return None
    found = run_over(context, params.drafter_before or "", params.samples, params.target)
    facts.append(found.told())
    top1, seen = found.declared.steps[0].top1, params.observed_accuracy
    if not found.fits or seen is None or top1 <= 2 * seen:
        return None
    facts.append("so the layers leave far more than the accuracy of %.3g that training starts with" % seen)
    return False


def _listed(ids: tuple[int, ...]) -> str:
    return ", ".join(map(str, ids))


def _supported(facts: list[str], known: tuple[int, ...] | None, why: str) -> Answer:
    from probes.lib.hypothesis import supported

    wanted = "" if known is None else ": the inputs of layers %s, which are the outputs of %s" % (
        _listed(known), _listed(tuple(item - 1 for item in known)))  # fmt: skip
    return supported(
        *facts,
        why,
        explains="a low accuracy, the lower the further the layers are apart; off by one costs most of the acceptance",
        next_command="take the hidden states from the layers that the drafter was trained with%s" % wanted,
    )
